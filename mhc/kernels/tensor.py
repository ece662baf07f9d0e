"""The projection of many streams on tensor cores, accurate to fp32."""

import tilelang.language as T

from mhc.kernels.fma import sum_squares
from mhc.kernels.parts import WARPS, WORKERS, sync_workers


@T.macro
def dot_tile_tensor(plan, tile_smem, fn, partial, stage, parity, rank, tid):
    """stage[parity, t, :] = this block's share of `flat(r) @ fn.T` and of `sum(flat(r)^2)`.

    A warp takes 16 columns in every 128. bf16 streams are exact in tf32; `fn` is split into a tf32 part rounded to
    nearest and the rest, of which tf32 keeps all but 2^-22 of the weight. The tensor core truncates as it accumulates,
    so it only ever adds up 16 columns: all further sums are rounded fp32.

    Column c of a step plays k = c / 4 + 4 * (c % 2) of product c % 4 / 2: any order of k is right if both operands keep
    it, and this one makes each lane's columns adjacent.
    """
    lane = tid % 32
    warp = tid // 32
    row = lane // 4  # of the fragment's 8, beside 4 lanes a row
    quad = lane % 4
    width = plan.streams * plan.cols
    xb = T.alloc_local((4,), "bfloat16")
    xf = T.alloc_local((4,), "float32")
    a = T.alloc_local((8,), "float32")
    w = T.alloc_local((4,), "float32")
    high = T.alloc_local((4,), "float32")
    low = T.alloc_local((4,), "float32")
    acc = T.alloc_local((4,), "float32")
    total = T.alloc_local((4 * plan.row_tiles,), "float32")
    value = T.alloc_local((1,), "float32")
    for i in T.unroll(4 * plan.row_tiles):
        total[i] = 0.0
    # four steps at a time: their loads of `fn` are in flight together, and more would not fit the registers
    for group in T.unroll(T.ceildiv(plan.steps, 4), unroll_factor=1):
        for inner in T.unroll(T.min(plan.steps, 4)):
            col = ((group * 4 + inner) * WARPS + warp) * 16 + quad * 4
            fn_col = (col // plan.cols) * plan.config.hidden_size + rank * plan.cols + col % plan.cols
            for e in T.unroll(8):
                a[e] = 0.0
            if col < width:
                # rows `row` and `row + 8` of the tile: a[product * 4 + {0, 2}] the first, {1, 3} the second
                for h in T.unroll(2 if plan.tile > 8 else 1):
                    if h * 8 + row < plan.tile:
                        for e in T.vectorized(4):
                            xb[e] = tile_smem[h * 8 + row, col + e]
                        for e in T.vectorized(4):
                            xf[e] = T.cast(xb[e], "float32")
                        for e in T.unroll(4):
                            a[e // 2 * 4 + e % 2 * 2 + h] = xf[e]
            for n in T.unroll(plan.row_tiles):
                for e in T.unroll(4):
                    w[e] = 0.0
                if col < width:
                    for e in T.vectorized(4):
                        w[e] = fn[T.min(n * 8 + row, plan.rows - 1), fn_col + e]
                for e in T.unroll(4):
                    # tf32 keeps 10 bits of mantissa: add half a unit, drop the rest
                    bits = T.reinterpret(w[e], "uint32") + T.uint32(0x1000)
                    high[e] = T.reinterpret(T.bitwise_and(bits, T.uint32(0xFFFFE000)), "float32")
                    low[e] = w[e] - high[e]
                    acc[e] = 0.0
                for product in T.unroll(2):
                    multiply(a, product * 4, low, product * 2, acc, 0)
                    multiply(a, product * 4, high, product * 2, acc, 0)
                for e in T.unroll(4):
                    total[n * 4 + e] = total[n * 4 + e] + acc[e]
    for n in T.unroll(plan.row_tiles):
        for h in T.unroll(2 if plan.tile > 8 else 1):
            for e in T.unroll(2):
                if h * 8 + row < plan.tile and n * 8 + quad * 2 + e < plan.rows:
                    partial[warp, h * 8 + row, n * 8 + quad * 2 + e] = total[n * 4 + h * 2 + e]
    sum_squares(plan, tile_smem, stage, parity, tid)
    sync_workers()
    for i in T.unroll(T.ceildiv(plan.tile * plan.rows, WORKERS)):
        q = i * WORKERS + tid
        if q < plan.tile * plan.rows:
            value[0] = partial[0, q // plan.rows, q % plan.rows]
            for g in T.unroll(WARPS - 1):
                value[0] += partial[g + 1, q // plan.rows, q % plan.rows]
            stage[parity, q // plan.rows, q % plan.rows] = value[0]
    T.fence_proxy_async()
    sync_workers()


@T.macro
def multiply(a, a_at, b, b_at, acc, acc_at):
    """acc[16 x 8] += a[16 x 8] @ b[8 x 8] in tf32 products and fp32 sums; a lane's registers begin at the offsets."""
    T.ptx_mma(
        "float32", "m16n8k8", "row", "col", "tf32", "tf32", "fp32", a.data, a_at, b.data, b_at, acc.data, acc_at, False
    )
