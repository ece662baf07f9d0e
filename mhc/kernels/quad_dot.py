"""Four streams: the post map that makes them, and their projection as in `split`, accurate to fp32.

A lane makes 4 adjacent columns of one token in every stream and then feeds them to the tensor cores. Each stream is a
step of 16 columns a warp, so the slice of `fn` that a block keeps is as large as its slice of all four streams: hence
clusters of 16 blocks. Of it, the lowest parts of two row tiles lie in shared memory: no registers are left for them.
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
# Pairs of streams whose inner products are summed, in the order of their places; see `gram`.
GRAM = ((0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (0, 2), (1, 2), (1, 3), (0, 3), (2, 3))


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
        """Of a token's streams: 16 columns of padding put 4 rows of a fragment into different banks."""
        return STREAMS * self.cols + 16

    @property
    def rows(self) -> int:
        """Rows of `fn`."""
        return self.config.mix_rows

    @property
    def sums(self) -> int:
        """Values a token: the rows and the inner products."""
        return self.rows + len(GRAM)

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
    """w = this lane's 4 columns of each row tile and stream; nothing waits yet."""
    if tid // 32 < plan.warps:
        for j in T.unroll(STREAMS):
            for n in T.unroll(plan.row_tiles):
                for e in T.vectorized(4):
                    w[(j * plan.row_tiles + n) * 4 + e] = fn[
                        n * 8 + tid % 32 // 4, j * plan.config.hidden_size + rank * plan.cols + first_col(tid) + e
                    ]


@T.macro
def cut_fn(plan, w, pairs, odd, top, lowest, tid):
    """Cut what `load_fn` loaded into bf16 parts; a step is a stream. Of `pairs` the lowest go to shared memory."""
    for j in T.unroll(STREAMS):
        cut_step(plan, w, j * plan.row_tiles * 4, pairs, odd, top, j)
        for e in T.vectorized(4):
            lowest[j, tid, e] = pairs[(j * PARTS + PARTS - 1) * 4 + e]


def first_col(tid):
    """Of the 4 adjacent columns that a lane holds: a warp takes 16."""
    return tid // 32 * 16 + tid % 4 * 4


@T.macro
def map_tile(plan, x_words, o_words, map_gates, slot, tid):
    """The new streams of a tile, in place of what they are made of."""
    if tid // 32 < plan.warps:
        post_map(plan, x_words, o_words, map_gates, slot, tid % 32 // 4, first_col(tid))
    # so that the compiler forgets the new streams and has their registers for the sums
    T.sync_warp()


@T.macro
def dot_tile(plan, x_words, slot, lowest, pairs, odd, top, partial, at, tid):
    """partial[at, warp, :, t] = this warp's share of `flat(r) @ fn.T` and of the streams' inner products."""
    row = tid % 32 // 4
    quad = tid % 4
    col = first_col(tid)
    warp = tid // 32
    x = T.alloc_local((STREAMS * 2,), "uint32")
    a = T.alloc_local((4,), "uint32")
    acc = T.alloc_local((4,), "float32")
    total = T.alloc_local((6,), "float32")
    if warp < plan.warps:
        for i in T.unroll(6):
            total[i] = 0.0
        for i in T.unroll(STREAMS // 2):
            load_words(plan, x, x_words, slot, i * 2, 2, row, col)
            # two streams at a time, and the smallest products first, as the tensor core truncates
            clear(acc)
            for k in T.unroll(2):
                for e in T.vectorized(4):
                    a[e] = lowest[i * 2 + k, tid, e]
                multiply(a, 0, x, (i * 2 + k) * 2, acc)
            for part in T.unroll(PARTS - 1):
                for k in T.unroll(2):
                    multiply(pairs, ((i * 2 + k) * PARTS + PARTS - 2 - part) * 4, x, (i * 2 + k) * 2, acc)
            for e in T.unroll(4):
                total[e] = total[e] + acc[e]
            clear(acc)
            for k in T.unroll(2):
                multiply(odd, (i * 2 + k) * 4, x, (i * 2 + k) * 2, acc)
            for e in T.unroll(2):
                acc[e] = acc[e] + acc[2 + e]
            for k in T.unroll(2):
                j = i * 2 + k
                for e in T.unroll(2):
                    acc[2 + e] = 0.0
                # tokens times themselves have the squares on their diagonal
                for e in T.unroll(2):
                    a[e * 2] = top[j * 2 + e]
                    a[e * 2 + 1] = x[j * 2 + e]
                multiply(a, 0, x, j * 2, acc)
                if row // 2 == quad:
                    partial[at, warp, plan.rows + j, row] = T.if_then_else(row % 2 == 0, acc[2], acc[3])
            for e in T.unroll(2):
                total[4 + e] = total[4 + e] + acc[e]
        for n in T.unroll(plan.row_tiles):
            for e in T.vectorized(2):
                partial[at, warp, n * 8 + row, quad * 2 + e] = total[n // 2 * 4 + n % 2 * 2 + e]
        # read anew: there are no registers to keep them in
        load_words(plan, x, x_words, slot, 0, STREAMS, row, col)
        gram(plan, x, 0, partial, at, tid)
        gram(plan, x, 1, partial, at, tid)
        gram(plan, x, 2, partial, at, tid)


@T.macro
def load_words(plan, x, x_words, slot, first, count, row, col):
    for k in T.unroll(count):
        for e in T.vectorized(2):
            x[(first + k) * 2 + e] = x_words[slot, row, ((first + k) * plan.cols + col) // 2 + e]


@T.macro
def gram(plan, x, i, partial, at, tid):
    """This warp's share of the inner products at places 4 + 2 i and 5 + 2 i of `GRAM`, which share a stream.

    They are on the diagonals of two streams times a third, each stream's registers being laid out as an operand's.
    """
    row = tid % 32 // 4
    pair = STREAMS + 2 * i
    upper, lower, shared = streams_of(pair)
    a = T.alloc_local((4,), "uint32")
    acc = T.alloc_local((4,), "float32")
    for k in T.unroll(2):
        a[k * 2] = x[upper * 2 + k]
        a[k * 2 + 1] = x[lower * 2 + k]
    clear(acc)
    multiply(a, 0, x, shared * 2, acc)
    if row // 2 == tid % 4:
        for e in T.unroll(2):
            value = T.if_then_else(row % 2 == 0, acc[e * 2], acc[e * 2 + 1])
            partial[at, tid // 32, plan.rows + pair + e, row] = value


def streams_of(at):
    """What pairs `at` and `at + 1` of `GRAM` do not share, and what they share."""
    (shared,) = {*GRAM[at]} & {*GRAM[at + 1]}
    return sum(GRAM[at]) - shared, sum(GRAM[at + 1]) - shared, shared


@T.macro
def post_map(plan, x_words, o_words, map_gates, slot, t, col):
    """The new streams of a token's old ones and its output, in place, rounded to bf16: 4 columns of each."""
    x = T.alloc_local((2,), "uint32")
    o = T.alloc_local((2,), "uint32")
    f = T.alloc_local((4,), "float32")
    gate = T.alloc_local((STREAMS,), "float32")
    value = T.alloc_local((STREAMS * 4,), "float32")
    pair = T.alloc_local((2,), "bfloat16")
    for e in T.vectorized(2):
        o[e] = o_words[slot, t, col // 2 + e]
    for e in T.vectorized(STREAMS):
        gate[e] = map_gates[slot, t, e]
    unpack(o, 0, f)
    # r'[k] = post_k * o + sum_j comb[j, k] * r[j], or post_k * o + x
    for k in T.unroll(STREAMS):
        for e in T.unroll(4):
            value[k * 4 + e] = gate[k] * f[e]
    for j in T.unroll(plan.sources):
        if plan.sources == STREAMS:
            for e in T.vectorized(STREAMS):
                gate[e] = map_gates[slot, t, (1 + j) * STREAMS + e]
        for e in T.vectorized(2):
            x[e] = x_words[slot, t, (j * plan.cols + col) // 2 + e]
        unpack(x, 0, f)
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
            x_words[slot, t, (k * plan.cols + col) // 2 + e] = x[e]


@T.macro
def unpack(words, at, f):
    """f = the fp32 values of four bf16 in two registers."""
    for i in T.unroll(2):
        f[i * 2] = T.reinterpret(words[at + i] << T.uint32(16), "float32")
        f[i * 2 + 1] = T.reinterpret(T.bitwise_and(words[at + i], T.uint32(0xFFFF0000)), "float32")
