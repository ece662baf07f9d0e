"""Four streams: the post map that makes them, their projection as in `split`, accurate to fp32, and inner products.

A lane makes 4 adjacent columns of one token in every stream and feeds them to the tensor cores. A warp takes 16 columns
of every stream, so the slice of `fn` that a block keeps is as large as its slice of all four streams: hence clusters of
16 blocks. Of it, the lowest parts of two row tiles lie in shared memory: no registers are left for them.
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
SLOTS = 5  # tiles: one is made, one projected, two wait for their gates, one is on its way; also of sums
BARRIERS = 8  # one a step, of what there are fewer slots for: a power of two is quicker to work out
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
    def pitch(self) -> int:
        """Columns from one token to the next: its streams and, behind them, the sub-layer's output.

        With the padding, 32 bytes more than a multiple of 128: what 4 lanes read of 4 tokens is in different banks.
        """
        columns = (STREAMS + 1) * self.cols
        return columns + (16 - columns) % 64

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
def prefetch_fn(plan, fn, rank, lane):
    """Have L2 fetch the block's slice of `fn`, a row of a stream a lane."""
    if lane < plan.rows * STREAMS:
        T.evaluate(
            T.call_extern(
                "handle",
                "mhc_prefetch",
                T.access_ptr(fn[lane // STREAMS, lane % STREAMS * plan.config.hidden_size + rank * plan.cols], "r"),
                plan.cols * 4,
            )
        )


@T.macro
def load_fn(plan, fn, w, first, rank, tid):
    """w = this lane's 4 columns of each row tile of two streams from `first` on; nothing waits yet.

    Adjacent ones, not two and two as `ldmatrix` would have them: that takes twice the requests, and the cache serves a
    row a cycle.
    """
    if tid // 32 < plan.warps:
        for j in T.unroll(STREAMS // 2):
            for n in T.unroll(plan.row_tiles):
                for e in T.vectorized(4):
                    w[((first + j) * plan.row_tiles + n) * 4 + e] = fn[
                        n * 8 + tid % 32 // 4,
                        (first + j) * plan.config.hidden_size + rank * plan.cols + first_col(tid) + e,
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
    """Of the 4 adjacent columns that a lane makes and projects: a warp takes 16."""
    return tid // 32 * 16 + tid % 4 * 4


@T.macro
def map_tile(plan, x_words, map_gates, slot, tid):
    """The new streams of a tile, rounded to bf16, in place of what they are made of."""
    t = tid % 32 // 4
    x = T.alloc_local((2,), "uint32")
    f = T.alloc_local((4,), "float32")
    gate = T.alloc_local((STREAMS,), "float32")
    value = T.alloc_local((STREAMS * 4,), "float32")
    pair = T.alloc_local((2,), "bfloat16")
    if tid // 32 < plan.warps:
        load_words(plan, x, 0, x_words, slot, STREAMS, tid)
        for e in T.vectorized(STREAMS):
            gate[e] = map_gates[slot, t, e]
        unpack(x, f)
        # r'[k] = post_k * o + sum_j comb[j, k] * r[j], or post_k * o + x
        for k in T.unroll(STREAMS):
            for e in T.unroll(4):
                value[k * 4 + e] = gate[k] * f[e]
        for j in T.unroll(plan.sources):
            if plan.sources == STREAMS:
                for e in T.vectorized(STREAMS):
                    gate[e] = map_gates[slot, t, (1 + j) * STREAMS + e]
            load_words(plan, x, 0, x_words, slot, j, tid)
            unpack(x, f)
            for k in T.unroll(STREAMS):
                for e in T.unroll(4):
                    if plan.sources == STREAMS:
                        value[k * 4 + e] += gate[k] * f[e]
                    else:
                        value[k * 4 + e] += f[e]
        for k in T.unroll(STREAMS):
            for i in T.unroll(2):
                for e in T.vectorized(2):
                    pair[e] = T.cast(value[k * 4 + i * 2 + e], "bfloat16")
                x[i] = T.reinterpret(pair[T.Ramp(0, 1, 2)], "uint32")
            for e in T.vectorized(2):
                x_words[slot, t, (k * plan.cols + first_col(tid)) // 2 + e] = x[e]
    # so that the compiler forgets the new streams and has their registers for the sums
    T.sync_warp()


@T.macro
def load_words(plan, x, at, x_words, slot, stream, tid):
    """x[at:] = a lane's 4 columns of a stream of its token."""
    for e in T.vectorized(2):
        x[at + e] = x_words[slot, tid % 32 // 4, (stream * plan.cols + first_col(tid)) // 2 + e]


@T.macro
def unpack(words, f):
    """f = the fp32 values of the bf16 in two registers."""
    for i in T.unroll(2):
        f[i * 2] = T.reinterpret(words[i] << T.uint32(16), "float32")
        f[i * 2 + 1] = T.reinterpret(T.bitwise_and(words[i], T.uint32(0xFFFF0000)), "float32")


@T.macro
def dot_tile(plan, x_words, slot, lowest, pairs, odd, top, partial, at, tid):
    """partial[at, warp] = this warp's share of `flat(r) @ fn.T` [M, 8] and of the streams' inner products [8, 10].

    The tensor core truncates as it accumulates, so it adds up two streams at a time, the smallest products first; the
    lower parts of the last row tile of all four. A product takes long and the next of its sum waits for it, so those of
    five sums take turns: two of the pairs, the lower parts of the last row tile, and twice its upper ones, of which a
    first operand has two streams'. Any order of the 16 columns is right if both operands keep it.
    """
    row = tid % 32 // 4
    quad = tid % 4
    warp = tid // 32
    x = T.alloc_local((STREAMS * 2,), "uint32")
    a = T.alloc_local((8,), "uint32")
    acc = T.alloc_local((20,), "float32")
    inner = T.alloc_local((len(GRAM),), "float32")
    if warp < plan.warps:
        for j in T.unroll(STREAMS):
            load_words(plan, x, j * 2, x_words, slot, j, tid)
        for i in T.unroll(5):
            clear(acc, i * 4)
        for k in T.unroll(2):
            for i in T.unroll(2):
                for e in T.vectorized(4):
                    a[i * 4 + e] = lowest[i * 2 + k, tid, e]
            for i in T.unroll(2):
                multiply(a, i * 4, x, (i * 2 + k) * 2, acc, i * 4)
            multiply(odd, k * 4, x, k * 2, acc, 8)
            multiply(top, 0, x, k * 2, acc, 12 + k * 4)
        for k in T.unroll(2):
            for i in T.unroll(2):
                multiply(pairs, ((i * 2 + k) * PARTS + 1) * 4, x, (i * 2 + k) * 2, acc, i * 4)
            multiply(odd, (2 + k) * 4, x, (2 + k) * 2, acc, 8)
            multiply(top, 4, x, (2 + k) * 2, acc, 12 + k * 4)
        for k in T.unroll(2):
            for i in T.unroll(2):
                multiply(pairs, (i * 2 + k) * PARTS * 4, x, (i * 2 + k) * 2, acc, i * 4)
        # two streams times a third have two inner products a token on their diagonals
        for i in T.unroll(STREAMS // 2):
            for k in T.unroll(2):
                for e in T.unroll(2):
                    a[i * 4 + k * 2 + e] = x[(i * 2 + e) * 2 + k]
        inner_products(plan, inner, a, 0, x, 0, row)
        inner_products(plan, inner, a, 0, x, 1, row)
        inner_products(plan, inner, a, 0, x, 2, row)
        inner_products(plan, inner, a, 0, x, 3, row)
        inner_products(plan, inner, a, 1, x, 2, row)
        inner_products(plan, inner, a, 1, x, 3, row)
        for e in T.unroll(4):
            acc[e] = acc[e] + acc[4 + e]
        for n in T.unroll(2):
            for e in T.vectorized(2):
                partial[at, warp, (n * 8 + row) * TILE + quad * 2 + e] = acc[n * 2 + e]
        for e in T.unroll(2):
            acc[8 + e] = (acc[8 + e] + acc[10 + e]) + (acc[12 + e] + acc[18 + e])
        for e in T.vectorized(2):
            partial[at, warp, (16 + row) * TILE + quad * 2 + e] = acc[8 + e]
        if row // 2 == quad:
            for n in T.unroll(2):
                for e in T.vectorized(4):
                    partial[at, warp, plan.rows * TILE + row * GRAM_PITCH + n * 4 + e] = inner[n * 4 + e]
            for e in T.vectorized(2):
                partial[at, warp, plan.rows * TILE + row * GRAM_PITCH + 8 + e] = inner[8 + e]


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
