"""The projection of one stream on tensor cores: bf16 products, accurate to fp32.

`x` is bf16 already. `fn` is cut into three bf16 numbers of 8 bits each whose sum it is exactly, so all products are
exact. The tensor core truncates as it accumulates, so it only ever adds up 16 columns: all further sums are rounded
fp32, in an order that depends on H alone.
"""

from dataclasses import dataclass

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import CLUSTER

PARTS = 3  # 8 bits each: a float's 24
SLOTS = 4  # of exchanged sums
X_SLOTS = 3  # tiles of x: one being projected, the one before, the one after


@dataclass(frozen=True)
class Slices:
    """Compile-time sizes of a kernel whose clusters split every row of x over 8 blocks.

    Args:
        config: shapes and constants.
        tile: most tokens a cluster works on at a time; a tensor core takes 8 at once.
        rows: mixing rows computed: M, or `2 hc` without comb.
    """

    config: MHCConfig
    tile: int
    rows: int

    @property
    def warps(self) -> int:
        """Warps that load, dot, mix and store; many rows of `fn` want more registers than 16 warps leave each other."""
        return 16 if self.config.mix_rows <= 24 else 8

    @property
    def cols(self) -> int:
        """S, the columns of a block: a multiple of 8, so rows move as 16-byte vectors."""
        return self.config.hidden_size // CLUSTER

    @property
    def pitch(self) -> int:
        """Of a row of the tile: 16 columns of padding put 4 rows of a fragment into different banks."""
        return self.cols + 16

    @property
    def vecs(self) -> int:
        """Vectors of 8 columns a lane: a warp moves a row."""
        return -(-self.cols // 256)

    @property
    def workers(self) -> int:
        return self.warps * 32

    @property
    def threads(self) -> int:
        """The workers, and a warp that computes comb."""
        return self.workers + (32 if self.comb else 0)

    @property
    def rounds(self) -> int:
        """Tokens a warp moves, one after the other."""
        return -(-self.tile // self.warps)

    @property
    def row_tiles(self) -> int:
        """Tiles of 8 rows of `fn`, as a tensor core takes them."""
        return -(-self.rows // 8)

    @property
    def steps(self) -> int:
        """Steps of 16 columns a warp that cover the block's columns."""
        return -(-self.cols // (16 * self.warps))

    @property
    def pairs(self) -> int:
        """Pairs of row tiles, which fill a tensor core's 16 rows."""
        return self.row_tiles // 2

    @property
    def odd(self) -> int:
        """Row tiles without a partner."""
        return self.row_tiles % 2

    @property
    def sums(self) -> int:
        """Values a token: the rows and the sum of squares."""
        return self.rows + 1

    @property
    def token_tiles(self) -> int:
        """Tiles of 8 tokens."""
        return -(-self.tile // 8)

    @property
    def resident(self) -> bool:
        """Whether a lane keeps its share of `fn` in registers from tile to tile."""
        return self.steps * self.row_tiles * 2 * PARTS <= (40 if self.warps > 8 else 72)

    @property
    def steps_held(self) -> int:
        """Steps of `fn` in registers at a time."""
        return self.steps if self.resident else 1

    @property
    def comb(self) -> int:
        """Rows of comb, hc^2 or none."""
        return self.rows - 2 * self.config.hc_mult

    @property
    def commons(self) -> int:
        """Sums a token that every block needs: pre, post, the squares."""
        return 2 * self.config.hc_mult + 1

    @property
    def token_pitch(self) -> int:
        """Floats between two such sums of a token: a multiple of 4, padded as `pitch` is."""
        return self.token_tiles * 8 + 4

    @property
    def comb_sent(self) -> int:
        """`comb`, filled up to a multiple of 4."""
        return -(-self.comb // 4) * 4

    @property
    def owned(self) -> int:
        """Tokens of a tile whose comb a block computes: t = rank, rank + 8, ..."""
        return -(-self.tile // CLUSTER)

    @property
    def mixes(self) -> int:
        """Sums that a block needs for them; a minimum where there is no comb."""
        return max(self.owned * self.comb_sent, 4)

    @property
    def batch(self) -> int:
        """Steps whose comb is computed at once, a lane a token."""
        return 32 // self.owned


@T.macro
def load_fn(plan, fn, w, rank, tid):
    """w = this lane's columns of the block's slice of `fn` [M, H], if they stay in registers; nothing waits yet."""
    if plan.resident:
        for s in T.unroll(plan.steps):
            load_step(plan, fn, w, s * plan.row_tiles * 4, s, rank, tid)


@T.macro
def cut_fn(plan, w, pairs, odd, top):
    """Cut what `load_fn` loaded."""
    if plan.resident:
        for s in T.unroll(plan.steps):
            cut_step(plan, w, s * plan.row_tiles * 4, pairs, odd, top, s)


@T.macro
def load_step(plan, fn, w, at, step, rank, tid):
    """w[at:] = 4 columns of row `lane / 4` of each row tile, zeros past the block's slice."""
    col = first_col(plan, step, tid)
    for n in T.unroll(plan.row_tiles):
        if col < plan.cols:
            for e in T.vectorized(4):
                w[at + n * 4 + e] = fn[T.min(n * 8 + tid % 32 // 4, plan.rows - 1), rank * plan.cols + col + e]
        else:
            for e in T.unroll(4):
                w[at + n * 4 + e] = 0.0


def first_col(plan, step, tid):
    """Of the 4 adjacent columns that a lane holds in a step: a warp takes 16 in every 16 `warps`."""
    return (step * plan.warps + tid // 32) * 16 + tid % 4 * 4


@T.macro
def cut_step(plan, w, at, pairs, odd, top, step):
    """A step's weights cut into the upper 8 bits, the next 8 and the rest, laid out as `dot_tile` multiplies them.

    pairs[step, part, pair, :] are first operands of 16 rows; odd[step, :] has the middle part of the last 8 rows above
    their lower part, and top[step, :] is half an operand.
    """
    a = T.alloc_local((2,), "float32")
    packed = T.alloc_local((1,), "uint32")
    for n in T.unroll(plan.row_tiles):
        for k in T.unroll(2):
            for e in T.unroll(2):
                a[e] = w[at + n * 4 + k * 2 + e]
            for part in T.unroll(PARTS):
                packed[0] = T.bitwise_or(
                    T.shift_right(T.reinterpret(a[0], "uint32"), T.uint32(16)),
                    T.bitwise_and(T.reinterpret(a[1], "uint32"), T.uint32(0xFFFF0000)),
                )
                if n < plan.pairs * 2:
                    pairs[((step * PARTS + part) * plan.pairs + n // 2) * 4 + k * 2 + n % 2] = packed[0]
                elif part == 0:
                    top[step * 2 + k] = packed[0]
                else:
                    odd[step * 4 + k * 2 + part - 1] = packed[0]
                if part < PARTS - 1:
                    for e in T.unroll(2):
                        upper = T.bitwise_and(T.reinterpret(a[e], "uint32"), T.uint32(0xFFFF0000))
                        a[e] = a[e] - T.reinterpret(upper, "float32")


@T.macro
def dot_tile(plan, x_words, slot, fn, w, pairs, odd, top, partial, count, rank, tid):
    """partial[warp, t / 8, :, t % 8] = this warp's share of `x @ fn.T` and of `sum(x^2)`, for `count` tokens.

    `fn` is the first operand, 8 tokens the second. Column c of a step plays k = c // 4 * 2 + c % 2 + 8 * (c % 4 // 2):
    any order is right if both operands keep it, and this one makes each lane's columns adjacent. The tile times itself
    has the squares on its diagonal: it takes the place of 8 rows of `fn`, whose registers would be laid out alike.
    """
    row = tid % 32 // 4
    quad = tid % 4
    x = T.alloc_local((2,), "uint32")
    a = T.alloc_local((4,), "uint32")
    acc = T.alloc_local((4,), "float32")
    low = T.alloc_local((4,), "float32")
    total = T.alloc_local((plan.pairs * 4 + 4,), "float32")
    last = plan.pairs * 4  # the odd row tile, or nothing, and the squares
    for h in T.unroll(plan.token_tiles):
        if h * 8 < count:
            for i in T.unroll(plan.pairs * 4 + 4):
                total[i] = 0.0
            # unrolled, the many rows of hc 8 would spill
            for s in T.unroll(plan.steps) if plan.row_tiles <= 3 else T.unroll(plan.steps, unroll_factor=1):
                held = s if plan.resident else 0
                col = first_col(plan, s, tid)
                if not plan.resident:
                    load_step(plan, fn, w, 0, s, rank, tid)
                for e in T.unroll(2):
                    x[e] = T.uint32(0)
                if h * 8 + row < plan.tile and col < plan.cols:
                    for e in T.vectorized(2):
                        x[e] = x_words[slot, h * 8 + row, col // 2 + e]
                if not plan.resident:
                    cut_step(plan, w, 0, pairs, odd, top, 0)
                for pair in T.unroll(plan.pairs):
                    clear(acc)
                    clear(low)
                    multiply(pairs, ((held * PARTS + 2) * plan.pairs + pair) * 4, x, 0, low)
                    multiply(pairs, ((held * PARTS + 1) * plan.pairs + pair) * 4, x, 0, acc)
                    for e in T.unroll(4):
                        acc[e] = acc[e] + low[e]
                    multiply(pairs, (held * PARTS * plan.pairs + pair) * 4, x, 0, acc)
                    for e in T.unroll(4):
                        total[pair * 4 + e] = total[pair * 4 + e] + acc[e]
                clear(acc)
                if plan.odd:
                    multiply(odd, held * 4, x, 0, acc)
                    for e in T.unroll(2):
                        acc[e] = acc[e] + acc[2 + e]
                        acc[2 + e] = 0.0
                for k in T.unroll(2):
                    a[k * 2] = top[held * 2 + k] if plan.odd else T.uint32(0)
                    a[k * 2 + 1] = x[k]
                multiply(a, 0, x, 0, acc)
                for e in T.unroll(4):
                    total[last + e] = total[last + e] + acc[e]
            for n in T.unroll(plan.row_tiles):
                if n * 8 + row < plan.rows:
                    for e in T.vectorized(2):
                        partial[tid // 32, h, n * 8 + row, quad * 2 + e] = total[n // 2 * 4 + n % 2 * 2 + e]
            if row // 2 == quad:
                partial[tid // 32, h, plan.rows, row] = T.if_then_else(row % 2 == 0, total[last + 2], total[last + 3])


@T.macro
def clear(acc, at=0):
    for e in T.unroll(4):
        acc[at + e] = 0.0


@T.macro
def multiply(a, a_at, b, b_at, acc, at=0):
    """acc[16 x 8] += a[16 x 16] @ b[16 x 8], a lane's registers beginning at the offsets."""
    T.ptx_mma(
        "float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32", a.data, a_at, b.data, b_at, acc.data, at, False
    )
