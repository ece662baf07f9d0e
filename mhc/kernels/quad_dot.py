"""Four streams: their projection as in `split`, accurate to fp32, and their inner products.

A warp takes 16 columns of every stream. So the slice of `fn` that a block keeps is as large as its slice of all four
streams: hence clusters of 16 blocks. Of it, the lowest parts of two row tiles lie in shared memory: no registers are
left for them.
"""

from dataclasses import dataclass

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.split import PARTS, clear, cut_step, multiply

STREAMS = 4
CLUSTER = 16  # more than a GPU need support; a Hopper one does
WARPS = 16
WORKERS = WARPS * 32
TILE = 8  # tokens: as many as a tensor core takes
# Pairs of streams whose inner products are summed, in the order of their places.
GRAM = ((0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (0, 2), (1, 2), (1, 3), (0, 3), (2, 3))
GRAM_PITCH = 12  # floats between two tokens' inner products: a multiple of 4, and 8 tokens are in different banks


@dataclass(frozen=True)
class Quad:
    """Compile-time sizes.

    Args:
        config: shapes and constants; hc is 4, H a multiple of 256 and at most 4096.
        source: see `quad`.
    """

    config: MHCConfig
    source: str

    pairs = 1  # of tiles of 8 rows of `fn`, which fill a tensor core's 16 rows
    odd = 1  # row tiles without a partner
    row_tiles = 3

    @property
    def is_post(self) -> bool:
        """Whether a post map makes the streams."""
        return self.source != "pre"

    @property
    def sources(self) -> int:
        """What they are made of, or are: streams, or the one embedding that all are."""
        return 1 if self.source == "post_pre_collapsed" else STREAMS

    @property
    def cols(self) -> int:
        """S, the columns of a block."""
        return self.config.hidden_size // CLUSTER

    @property
    def warps(self) -> int:
        """Warps that dot, 16 columns each."""
        return self.cols // 16

    @property
    def stride(self) -> int:
        """Columns from one stream of a token to the next in shared memory.

        An odd multiple of 16 bytes, as is `pitch`: the 8 rows that a fragment is loaded from are in different banks.
        """
        return self.cols + 8

    @property
    def pitch(self) -> int:
        """Columns from one token to the next: its streams, and behind them the sub-layer's output."""
        return (STREAMS + 1) * self.stride

    @property
    def rows(self) -> int:
        """Rows of `fn`."""
        return self.config.mix_rows

    @property
    def partial(self) -> int:
        """Floats of a warp's sums of a tile: rows by tokens, then tokens by inner products."""
        return self.rows * TILE + TILE * GRAM_PITCH

    @property
    def gates(self) -> int:
        """Sums a token that every block needs: pre, the inner products."""
        return STREAMS + len(GRAM)

    @property
    def mixes(self) -> int:
        """Floats that a token's owner needs: post and comb."""
        return self.rows - STREAMS


@T.macro
def load_fn(plan, fn, w, rank, tid):
    """w = this lane's columns of each row tile and stream, two and two, as a fragment has them; nothing waits yet."""
    if tid // 32 < plan.warps:
        for j in T.unroll(STREAMS):
            for n in T.unroll(plan.row_tiles):
                for k in T.unroll(2):
                    for e in T.vectorized(2):
                        w[(j * plan.row_tiles + n) * 4 + k * 2 + e] = fn[
                            n * 8 + tid % 32 // 4,
                            j * plan.config.hidden_size + rank * plan.cols + first_col(tid) + tid % 4 * 2 + k * 8 + e,
                        ]


@T.macro
def cut_fn(plan, w, pairs, odd, top, lowest, tid):
    """Cut what `load_fn` loaded into bf16 parts; a step is a stream.

    Of `pairs` the lowest go to shared memory. top[j / 2] has the upper parts of two streams, 8 rows each.
    """
    upper = T.alloc_local((STREAMS * 2,), "uint32")
    for j in T.unroll(STREAMS):
        cut_step(plan, w, j * plan.row_tiles * 4, pairs, odd, upper, j)
        for k in T.unroll(2):
            top[j // 2 * 4 + k * 2 + j % 2] = upper[j * 2 + k]
        for e in T.vectorized(4):
            lowest[j, tid, e] = pairs[(j * PARTS + PARTS - 1) * 4 + e]


def first_col(tid):
    """Of the 16 columns that a warp takes."""
    return tid // 32 * 16


@T.macro
def dot_tile(plan, x_tile, slot, lowest, pairs, odd, top, partial, at, tid):
    """partial[at, warp] = this warp's share of `flat(r) @ fn.T` [M, 8] and of the streams' inner products [8, 10].

    The tensor core truncates as it accumulates, so it adds up two streams at a time, the smallest products first.
    """
    row = tid % 32 // 4
    quad = tid % 4
    warp = tid // 32
    x = T.alloc_local((STREAMS * 2,), "uint32")
    a = T.alloc_local((8,), "uint32")
    acc = T.alloc_local((12,), "float32")
    inner = T.alloc_local((len(GRAM),), "float32")
    if warp < plan.warps:
        for i in T.unroll(STREAMS // 2):
            load_pair(plan, x, i * 4, x_tile, slot, i * 2, tid % 32 // 16, tid // 8 % 2, tid)
        for i in T.unroll(STREAMS // 2):
            clear(acc, i * 4)
            for k in T.unroll(2):
                for e in T.vectorized(4):
                    a[k * 4 + e] = lowest[i * 2 + k, tid, e]
                multiply(a, k * 4, x, (i * 2 + k) * 2, acc, i * 4)
            for part in T.unroll(PARTS - 1):
                for k in T.unroll(2):
                    multiply(pairs, ((i * 2 + k) * PARTS + PARTS - 2 - part) * 4, x, (i * 2 + k) * 2, acc, i * 4)
        for e in T.unroll(4):
            acc[e] = acc[e] + acc[4 + e]
        for n in T.unroll(2):
            for e in T.vectorized(2):
                partial[at, warp, (n * 8 + row) * TILE + quad * 2 + e] = acc[n * 2 + e]
        # the last row tile: the lower parts of all streams; the upper ones, of even streams above those of odd ones
        for i in T.unroll(3):
            clear(acc, i * 4)
        for j in T.unroll(STREAMS):
            multiply(odd, j * 4, x, j * 2, acc, 0)
        for i in T.unroll(STREAMS // 2):
            for k in T.unroll(2):
                multiply(top, i * 4, x, (i * 2 + k) * 2, acc, (1 + k) * 4)
        for e in T.unroll(2):
            acc[e] = (acc[e] + acc[2 + e]) + (acc[4 + e] + acc[8 + 2 + e])
        for e in T.vectorized(2):
            partial[at, warp, (16 + row) * TILE + quad * 2 + e] = acc[e]
        # two streams times a third have two inner products a token on their diagonals
        for i in T.unroll(STREAMS // 2):
            load_pair(plan, a, i * 4, x_tile, slot, i * 2, tid // 8 % 2, tid % 32 // 16, tid)
        inner_products(plan, inner, a, 0, x, 0, row)
        inner_products(plan, inner, a, 0, x, 1, row)
        inner_products(plan, inner, a, 0, x, 2, row)
        inner_products(plan, inner, a, 0, x, 3, row)
        inner_products(plan, inner, a, 1, x, 2, row)
        inner_products(plan, inner, a, 1, x, 3, row)
        if row // 2 == quad:
            for n in T.unroll(2):
                for e in T.vectorized(4):
                    partial[at, warp, plan.rows * TILE + row * GRAM_PITCH + n * 4 + e] = inner[n * 4 + e]
            for e in T.vectorized(2):
                partial[at, warp, plan.rows * TILE + row * GRAM_PITCH + 8 + e] = inner[8 + e]


@T.macro
def load_pair(plan, x, at, x_tile, slot, first, stream, half, tid):
    """x[at:] = 16 columns of 8 tokens in two streams, `first` and the next: four matrices of 8 x 8.

    Args:
        stream, half: of the matrix whose `tid % 8`th row this lane points at, the stream and the half of the columns.
            The streams one after the other are two second operands, in turn they are the rows of a first one.
    """
    T.ptx_ldmatrix(
        T.bool(False),
        4,
        T.access_ptr(x_tile[slot, tid % 8, (first + stream) * plan.stride + first_col(tid) + half * 8], "r", extent=8),
        T.access_ptr(x[at], "w", extent=4),
    )


@T.macro
def inner_products(plan, inner, a, pair, x, j, row):
    """inner[:] of streams 2 pair and 2 pair + 1, the rows of a[pair], with stream j: a lane has those of token `row`.

    Only some lanes do: of the 8 x 8 products of tokens, a token's own are on the diagonal.
    """
    acc = T.alloc_local((4,), "float32")
    clear(acc, 0)
    multiply(a, pair * 4, x, j * 2, acc, 0)
    if pair * 2 <= j:
        inner[GRAM.index((pair * 2, j))] = T.if_then_else(row % 2 == 0, acc[0], acc[1])
    if pair * 2 + 1 <= j:
        inner[GRAM.index((pair * 2 + 1, j))] = T.if_then_else(row % 2 == 0, acc[2], acc[3])
