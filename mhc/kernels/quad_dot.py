"""Four streams in registers: the post map that makes them, and their projection as in `split`, accurate to fp32.

A lane holds 4 adjacent columns of one token in every stream. Each stream is a step of 16 columns a warp, so the slice
of `fn` that a block keeps in registers is as large as its slice of all four streams: hence clusters of 16 blocks.
"""

from dataclasses import dataclass

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.split import PARTS, clear, cut_step, multiply

STREAMS = 4
CLUSTER = 16  # more than a GPU need support; a Hopper one does
WARPS = 16
THREADS = WARPS * 32  # one warp more would leave 96 registers a thread, too few beside `fn`
# Pairs of streams whose inner products are summed, in the order of their places; see `gram`.
GRAM = ((0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (0, 2), (1, 2), (1, 3), (0, 3), (2, 3))


@dataclass(frozen=True)
class Quad:
    """Compile-time sizes.

    Args:
        config: shapes and constants; hc is 4, H a multiple of 256 and at most 4096.
        tile: most tokens a cluster works on at a time, 8 or 16: every block then owns at most one.
        is_post: whether a post map makes the streams.
    """

    config: MHCConfig
    tile: int
    is_post: bool

    pairs = 1  # of tiles of 8 rows of `fn`, which fill a tensor core's 16 rows
    odd = 1  # row tiles without a partner
    row_tiles = 3

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
    def token_tiles(self) -> int:
        """Tiles of 8 tokens."""
        return self.tile // 8

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
        """Floats a token that every block needs: pre, the inner products, padding for the copy engine."""
        return -(-(STREAMS + len(GRAM)) // 4) * 4

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
def cut_fn(plan, w, pairs, odd, top):
    """Cut what `load_fn` loaded into bf16 parts; a step is a stream."""
    for j in T.unroll(STREAMS):
        cut_step(plan, w, j * plan.row_tiles * 4, pairs, odd, top, j)


def first_col(tid):
    """Of the 4 adjacent columns that a lane holds: a warp takes 16."""
    return tid // 32 * 16 + tid % 4 * 4


@T.macro
def dot_tile(plan, buffers, slot, o_slot, pairs, odd, top, partial, count, tid):
    """partial[warp, t / 8, :, t % 8] = this warp's share of `flat(r) @ fn.T` and of the streams' inner products.

    Of `count` tokens, whose streams come from the slot, where new ones of a post map also replace the old.
    """
    x_words, o_words, map_gates = buffers
    row = tid % 32 // 4
    quad = tid % 4
    col = first_col(tid)
    x = T.alloc_local((STREAMS * 2,), "uint32")
    a = T.alloc_local((4,), "uint32")
    acc = T.alloc_local((4,), "float32")
    total = T.alloc_local((6,), "float32")
    if plan.is_post:
        for h in T.unroll(plan.token_tiles):
            if h * 8 < count and tid // 32 < plan.warps:
                post_map(plan, x_words, slot, o_words, map_gates, o_slot, h * 8 + row, col)
        # so that the compiler forgets the new streams and has their registers for the sums
        T.sync_warp()
    for h in T.unroll(plan.token_tiles):
        if h * 8 < count and tid // 32 < plan.warps:
            for j in T.unroll(STREAMS):
                for e in T.vectorized(2):
                    x[j * 2 + e] = x_words[slot, h * 8 + row, (j * plan.cols + col) // 2 + e]
            for i in T.unroll(6):
                total[i] = 0.0
            for j in T.unroll(STREAMS):
                # the smallest products first, as the tensor core truncates
                clear(acc)
                for part in T.unroll(PARTS):
                    multiply(pairs, (j * PARTS + PARTS - 1 - part) * 4, x, j * 2, acc)
                for e in T.unroll(4):
                    total[e] = total[e] + acc[e]
                clear(acc)
                multiply(odd, j * 4, x, j * 2, acc)
                for e in T.unroll(2):
                    acc[e] = acc[e] + acc[2 + e]
                    acc[2 + e] = 0.0
                # tokens times themselves have the squares on their diagonal
                for k in T.unroll(2):
                    a[k * 2] = top[j * 2 + k]
                    a[k * 2 + 1] = x[j * 2 + k]
                multiply(a, 0, x, j * 2, acc)
                for e in T.unroll(2):
                    total[4 + e] = total[4 + e] + acc[e]
                if row // 2 == quad:
                    partial[tid // 32, h, plan.rows + j, row] = T.if_then_else(row % 2 == 0, acc[2], acc[3])
            gram(plan, x, 0, partial, h, tid)
            gram(plan, x, 1, partial, h, tid)
            gram(plan, x, 2, partial, h, tid)
            for n in T.unroll(plan.row_tiles):
                for e in T.vectorized(2):
                    partial[tid // 32, h, n * 8 + row, quad * 2 + e] = total[n // 2 * 4 + n % 2 * 2 + e]


@T.macro
def gram(plan, x, i, partial, h, tid):
    """This warp's share of the inner products at places 4 + 2 i and 5 + 2 i of `GRAM`, which share a stream.

    They are on the diagonals of two streams times a third, each stream's registers being laid out as an operand's.
    """
    row = tid % 32 // 4
    at = STREAMS + 2 * i
    upper, lower, shared = streams_of(at)
    a = T.alloc_local((4,), "uint32")
    acc = T.alloc_local((4,), "float32")
    for k in T.unroll(2):
        a[k * 2] = x[upper * 2 + k]
        a[k * 2 + 1] = x[lower * 2 + k]
    clear(acc)
    multiply(a, 0, x, shared * 2, acc)
    if row // 2 == tid % 4:
        for e in T.unroll(2):
            partial[tid // 32, h, plan.rows + at + e, row] = T.if_then_else(row % 2 == 0, acc[e * 2], acc[e * 2 + 1])


def streams_of(at):
    """What pairs `at` and `at + 1` of `GRAM` do not share, and what they share."""
    (shared,) = {*GRAM[at]} & {*GRAM[at + 1]}
    return sum(GRAM[at]) - shared, sum(GRAM[at + 1]) - shared, shared


@T.macro
def post_map(plan, x_words, slot, o_words, map_gates, o_slot, t, col):
    """The new streams of a token's old ones and its output, in place, rounded to bf16: 4 columns of each."""
    x = T.alloc_local((2,), "uint32")
    o = T.alloc_local((2,), "uint32")
    f = T.alloc_local((4,), "float32")
    gate = T.alloc_local((STREAMS,), "float32")
    value = T.alloc_local((STREAMS * 4,), "float32")
    pair = T.alloc_local((2,), "bfloat16")
    for e in T.vectorized(2):
        o[e] = o_words[o_slot, t, col // 2 + e]
    for e in T.vectorized(STREAMS):
        gate[e] = map_gates[o_slot, t, e]
    unpack(o, 0, f)
    # r'[k] = post_k * o + sum_j comb[j, k] * r[j]
    for k in T.unroll(STREAMS):
        for e in T.unroll(4):
            value[k * 4 + e] = gate[k] * f[e]
    for j in T.unroll(STREAMS):
        for e in T.vectorized(STREAMS):
            gate[e] = map_gates[o_slot, t, (1 + j) * STREAMS + e]
        for e in T.vectorized(2):
            x[e] = x_words[slot, t, (j * plan.cols + col) // 2 + e]
        unpack(x, 0, f)
        for k in T.unroll(STREAMS):
            for e in T.unroll(4):
                value[k * 4 + e] += gate[k] * f[e]
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


@T.macro
def add_warps(plan, partial, gate_part, mix_stage, mix_part, slot, count, rank, tid):
    """Sums over the warps: of pre and inner products to gate_part[slot, rank, t], the others to where they are sent.

    Those are at mix_stage[slot, owner], the block's own at mix_part[slot, rank].
    """
    value = T.alloc_local((1,), "float32")
    for i in T.unroll(T.ceildiv(plan.token_tiles * plan.sums * 8, THREADS)):
        q = i * THREADS + tid
        h = q // (plan.sums * 8)
        m = q // 8 % plan.sums
        t = h * 8 + q % 8
        if t < count:
            value[0] = partial[0, h, m, q % 8]
            for g in T.unroll(plan.warps - 1):
                value[0] += partial[g + 1, h, m, q % 8]
            if m < STREAMS:
                gate_part[slot, rank, t, m] = value[0]
            elif m >= plan.rows:
                gate_part[slot, rank, t, STREAMS + m - plan.rows] = value[0]
            elif t == rank:
                mix_part[slot, rank, m - STREAMS] = value[0]
            else:
                mix_stage[slot, t, m - STREAMS] = value[0]
