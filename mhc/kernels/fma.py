"""The projection of one stream on fp32 FMAs, and the sum of squares that the tensor cores leave to them."""

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
    reduce_lanes(plan, acc, row0, stage, parity, lane)
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
def reduce_lanes(plan, acc, row0, stage, parity, lane):
    """stage[parity, t] = acc[t] summed over the warp: a butterfly that halves the tokens first.

    Adds the same pairs as a full butterfly of every value, so the bits do not depend on the tile, with fewer shuffles.
    The lanes end in `tile` groups, each with one token.
    """
    if plan.tile >= 2:
        halve(plan, acc, plan.tile // 2, 16, lane)
    if plan.tile >= 4:
        halve(plan, acc, plan.tile // 4, 8, lane)
    if plan.tile >= 8:
        halve(plan, acc, plan.tile // 8, 4, lane)
    for m in T.unroll(plan.warp_rows):
        if plan.tile < 2:
            acc[m] = acc[m] + T.shfl_xor(acc[m], 16)
        if plan.tile < 4:
            acc[m] = acc[m] + T.shfl_xor(acc[m], 8)
        if plan.tile < 8:
            acc[m] = acc[m] + T.shfl_xor(acc[m], 4)
        acc[m] = acc[m] + T.shfl_xor(acc[m], 2)
        acc[m] = acc[m] + T.shfl_xor(acc[m], 1)
    if lane % (32 // plan.tile) == 0:
        for m in T.unroll(plan.warp_rows):
            if row0 + m < plan.rows:
                stage[parity, lane // (32 // plan.tile), row0 + m] = acc[m]


@T.macro
def halve(plan, acc, count, mask, lane):
    """Lanes with bit `mask` keep the upper `count` tokens, the others the lower; each adds its partner's share."""
    upper = T.bitwise_and(lane, mask) != 0
    for i in T.unroll(count * plan.warp_rows):
        low = acc[i]
        high = acc[count * plan.warp_rows + i]
        sent = T.shfl_xor(T.if_then_else(upper, low, high), mask)
        acc[i] = T.if_then_else(upper, high, low) + sent


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
