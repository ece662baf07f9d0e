"""The projection of one stream on fp32 FMAs."""

import tilelang.language as T

from mhc.kernels.parts import WARPS, sync_workers


@T.macro
def dot_tile_fma(plan, tile_smem, fn, w, stage, parity, rank, tid):
    """stage[parity, t, :] = the block's share of `x @ fn.T` and `sum(x^2)`; a warp dots its rows of `fn`, kept in w."""
    lane = tid % 32
    row0 = tid // 32 * plan.warp_rows
    acc = T.alloc_local((plan.tile * plan.warp_rows,), "float32")
    xb = T.alloc_local((4,), "bfloat16")
    xf = T.alloc_local((4,), "float32")
    for i in T.unroll(plan.tile * plan.warp_rows):
        acc[i] = 0.0
    for chunk in T.unroll(plan.chunks):
        slot = chunk * plan.warp_rows * 4 if plan.resident else 0
        if not plan.resident:
            load_fn(plan, fn, w, chunk, 0, rank, tid)
        col = (chunk * 32 + lane) * 4
        if col < plan.cols:
            for t in T.unroll(plan.tile):
                for e in T.vectorized(4):
                    xb[e] = tile_smem[t, col + e]
                for e in T.vectorized(4):
                    xf[e] = T.cast(xb[e], "float32")
                # m = x @ fn.T
                for m in T.unroll(plan.warp_rows):
                    for e in T.unroll(4):
                        acc[t * plan.warp_rows + m] += w[slot + m * 4 + e] * xf[e]
    # the tile in powers of two: 12 tokens are 8 and then 4
    if plan.tile & 16:
        reduce_lanes(plan, acc, 0, 16, row0, stage, parity, lane)
    if plan.tile & 8:
        reduce_lanes(plan, acc, plan.tile // 16 * 16, 8, row0, stage, parity, lane)
    if plan.tile & 4:
        reduce_lanes(plan, acc, plan.tile // 8 * 8, 4, row0, stage, parity, lane)
    if plan.tile & 2:
        reduce_lanes(plan, acc, plan.tile // 4 * 4, 2, row0, stage, parity, lane)
    if plan.tile & 1:
        reduce_lanes(plan, acc, plan.tile // 2 * 2, 1, row0, stage, parity, lane)
    sum_squares(plan, tile_smem, stage, parity, tid)
    T.fence_proxy_async()
    sync_workers()


@T.macro
def load_resident_fn(plan, fn, w, rank, tid):
    """w = every chunk's weights, where they fit into registers (`plan.resident`)."""
    if plan.resident:
        for chunk in T.unroll(plan.chunks):
            load_fn(plan, fn, w, chunk, chunk * plan.warp_rows * 4, rank, tid)


@T.macro
def load_fn(plan, fn, w, chunk, slot, rank, tid):
    """w[slot:] = the 4 columns of this lane's chunk in each of its warp's rows of `fn`."""
    row0 = tid // 32 * plan.warp_rows
    col = (chunk * 32 + tid % 32) * 4
    if col < plan.cols:
        for m in T.unroll(plan.warp_rows):
            for e in T.vectorized(4):
                w[slot + m * 4 + e] = fn[T.min(row0 + m, plan.rows - 1), rank * plan.cols + col + e]


@T.macro
def reduce_lanes(plan, acc, first, count, row0, stage, parity, lane):
    """stage[parity, first : first + count] = acc summed over the warp: a butterfly that halves the tokens first.

    Adds the same pairs as a full butterfly of every value, so the bits do not depend on the tile, at a fifth of the
    shuffles. The lanes end in `count` groups, each with one token.
    """
    at = first * plan.warp_rows
    if count >= 2:
        halve(plan, acc, at, count // 2, 16, lane)
    if count >= 4:
        halve(plan, acc, at, count // 4, 8, lane)
    if count >= 8:
        halve(plan, acc, at, count // 8, 4, lane)
    if count >= 16:
        halve(plan, acc, at, count // 16, 2, lane)
    for m in T.unroll(plan.warp_rows):
        if count < 2:
            acc[at + m] = acc[at + m] + T.shfl_xor(acc[at + m], 16)
        if count < 4:
            acc[at + m] = acc[at + m] + T.shfl_xor(acc[at + m], 8)
        if count < 8:
            acc[at + m] = acc[at + m] + T.shfl_xor(acc[at + m], 4)
        if count < 16:
            acc[at + m] = acc[at + m] + T.shfl_xor(acc[at + m], 2)
        acc[at + m] = acc[at + m] + T.shfl_xor(acc[at + m], 1)
    if lane % (32 // count) == 0:
        for m in T.unroll(plan.warp_rows):
            if row0 + m < plan.rows:
                stage[parity, first + lane // (32 // count), row0 + m] = acc[at + m]


@T.macro
def halve(plan, acc, at, count, mask, lane):
    """Lanes with bit `mask` keep the upper `count` tokens, the others the lower; each adds its partner's share."""
    upper = T.bitwise_and(lane, mask) != 0
    for i in T.unroll(count * plan.warp_rows):
        low = acc[at + i]
        high = acc[at + count * plan.warp_rows + i]
        sent = T.shfl_xor(T.if_then_else(upper, low, high), mask)
        acc[at + i] = T.if_then_else(upper, high, low) + sent


@T.macro
def sum_squares(plan, tile_smem, stage, parity, tid):
    """stage[parity, t, rows] = this block's share of `sum(flat(r)^2)`; one warp a token."""
    lane = tid % 32
    width = plan.streams * plan.cols
    xb = T.alloc_local((4,), "bfloat16")
    xf = T.alloc_local((4,), "float32")
    square = T.alloc_local((1,), "float32")
    for i in T.unroll(T.ceildiv(plan.tile, WARPS)):
        t = i * WARPS + tid // 32
        if t < plan.tile:
            square[0] = 0.0
            for chunk in T.unroll(T.ceildiv(width, 128)):
                col = (chunk * 32 + lane) * 4
                if col < width:
                    for e in T.vectorized(4):
                        xb[e] = tile_smem[t, col + e]
                    for e in T.vectorized(4):
                        xf[e] = T.cast(xb[e], "float32")
                    for e in T.unroll(4):
                        square[0] += xf[e] * xf[e]
            square[0] = T.warp_reduce_sum(square[0])
            if lane == 0:
                stage[parity, t, plan.rows] = square[0]
