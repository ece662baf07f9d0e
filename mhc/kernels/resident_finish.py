"""What follows from the sums of a step: gates, collapse and its norm, post, comb."""

import tilelang.language as T

from mhc.kernels.parts import CLUSTER, sigmoid
from mhc.kernels.remote import arrive, gather_quad, send_quad
from mhc.kernels.resident_parts import BATCH, TILE, WARPS, first, second
from mhc.kernels.resident_post import column, token
from mhc.kernels.sinkhorn import sinkhorn


@T.macro
def pre_gates(shape, at_all, pre, arrived, scale, base, step, tid):
    """pre[t, :] from the sums of all blocks, one warp a token."""
    hc = shape.streams
    lane = tid % 32
    t = tid // 32
    total = T.alloc_local((1,), "float32")
    factor = T.alloc_local((1,), "float32")
    bias = T.alloc_local((1,), "float32")
    factor[0] = scale[0]
    bias[0] = base[T.min(lane, hc - 1)]
    T.mbarrier_wait_parity(arrived[step % 2], step // 2 % 2)
    if t < TILE:
        total[0] = 0.0
        if lane <= hc:
            for b in T.unroll(CLUSTER):
                total[0] += at_all[((step % 2 * CLUSTER + b) * shape.common + lane) * TILE + t]
        mean_square = T.shfl_sync(total[0], hc) / (hc * shape.config.hidden_size)
        # m *= rsqrt(mean(flat(r)^2) + rms_eps);  pre = sigmoid(m * scale[0] + base) + pre_eps
        rstd = T.rsqrt(mean_square + shape.config.rms_eps)
        if lane < hc:
            pre[t, lane] = sigmoid(total[0] * rstd * factor[0] + bias[0]) + shape.config.pre_eps


@T.macro
def collapse(shape, has_norm, x, y, pre, y_square, tid):
    """y = bf16(sum_j pre_j * r_j); y_square[warp, :] = its sums of squares."""
    hc = shape.streams
    yb = T.alloc_local((2,), "bfloat16")
    value = T.alloc_local((2,), "float32")
    total = T.alloc_local((1,), "float32")
    gate = T.alloc_local((hc,), "float32")
    total[0] = 0.0
    for j in T.unroll(hc):
        gate[j] = pre[token(tid), j]
    for q in T.unroll(4):
        value[0] = 0.0
        value[1] = 0.0
        for j in T.unroll(hc):
            value[0] += gate[j] * first(x[j * 4 + q])
            value[1] += gate[j] * second(x[j * 4 + q])
        for e in T.vectorized(2):
            yb[e] = T.cast(value[e], "bfloat16")
        y[q] = T.reinterpret(yb[T.Ramp(0, 1, 2)], "uint32")
        value[0] = first(y[q])
        value[1] = second(y[q])
        total[0] += value[0] * value[0]
        total[0] += value[1] * value[1]
    if has_norm:
        total[0] = total[0] + T.shfl_xor(total[0], 1)
        total[0] = total[0] + T.shfl_xor(total[0], 2)
        if tid % 4 == 0:
            y_square[tid // 32, token(tid)] = total[0]


@T.macro
def send_squares(y_square, square, squared, parity, rank, tid):
    """square [2, CLUSTER, TILE] of every block gets this one's `sum(y^2)`. One warp, not one that sends sums."""
    lane = tid % 32
    value = T.alloc_local((1,), "float32")
    quad = T.alloc_local((4,), "float32")
    if tid // 32 == WARPS - 2:
        value[0] = 0.0
        for i in T.unroll(WARPS):
            value[0] += y_square[i, lane % TILE]
        gather_quad(value, quad, lane)
        if lane < 2 * TILE:
            index = (parity * CLUSTER + rank) * TILE + lane % TILE // 4 * 4
            send_quad(quad, square, index, squared, parity, lane % 4 + lane // TILE * 4, rank)
        arrive(squared, parity, True, (CLUSTER - 1) * 4 * TILE, lane)


@T.macro
def write(shape, has_norm, y, square, squared, weight, layer_input, step, rank, t0, end, tid):
    """layer_input = y * rsqrt(mean(y^2) + norm_eps) * weight."""
    cols = shape.cols
    t = token(tid)
    wb = T.alloc_local((4,), "uint32")
    zb = T.alloc_local((2,), "bfloat16")
    z = T.alloc_local((2,), "float32")
    total = T.alloc_local((1,), "float32")
    if has_norm:
        wb[T.Ramp(0, 1, 4)] = T.ldg128(weight[rank * cols + column(tid)], pred=column(tid) < cols)
        T.mbarrier_wait_parity(squared[step % 2], step // 2 % 2)
        total[0] = 0.0
        for b in T.unroll(CLUSTER):
            total[0] += square[(step % 2 * CLUSTER + b) * TILE + t]
        total[0] = T.rsqrt(total[0] / shape.config.hidden_size + shape.config.norm_eps)
        for q in T.unroll(4):
            z[0] = first(y[q]) * total[0] * first(wb[q])
            z[1] = second(y[q]) * total[0] * second(wb[q])
            for e in T.vectorized(2):
                zb[e] = T.cast(z[e], "bfloat16")
            y[q] = T.reinterpret(zb[T.Ramp(0, 1, 2)], "uint32")
    if column(tid) < cols and t0 + t < end:
        T.stg128(layer_input[t0 + t, rank * cols + column(tid)], y[T.Ramp(0, 1, 4)])


@T.macro
def own_mixes(shape, at_all, at_owner, logits, arrived, scale, base, post, step, rank, t0, end, lane):
    """post of the token of a step that this block owns, and the logits of its comb. One warp."""
    hc, mixes = shape.streams, shape.mixes
    m = T.min(lane, mixes - 1)
    factor = T.alloc_local((1,), "float32")
    bias = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    square = T.alloc_local((1,), "float32")
    factor[0] = scale[T.if_then_else(m < hc, 1, 2)]
    bias[0] = base[hc + m]
    T.mbarrier_wait_parity(arrived[step % 2], step // 2 % 2)
    if lane < mixes and t0 + rank < end:
        total[0] = 0.0
        square[0] = 0.0
        for b in T.unroll(CLUSTER):
            square[0] += at_all[((step % 2 * CLUSTER + b) * shape.common + hc) * TILE + rank]
            total[0] += at_owner[(step % 2 * CLUSTER + b) * shape.mixes_sent + m]
        # m *= rsqrt(mean(flat(r)^2) + rms_eps)
        rstd = T.rsqrt(square[0] / (hc * shape.config.hidden_size) + shape.config.rms_eps)
        total[0] = total[0] * rstd * factor[0] + bias[0]
        if m < hc:
            # post = post_mult * sigmoid(m * scale[1] + base)
            post[t0 + rank, m] = shape.config.post_mult * sigmoid(total[0])
        else:
            logits[step % BATCH, m - hc] = total[0]
    T.sync_warp()


@T.macro
def own_comb(shape, logits, comb, step, rank, begin, end, lane):
    """comb = sinkhorn(logits) of the steps of a batch up to this one, one lane a token."""
    hc = shape.streams
    c = T.alloc_local((hc * hc,), "float32")
    ago = step % BATCH - lane
    t = begin + (step - ago) * TILE + rank
    if ago >= 0 and t < end:
        for q in T.unroll(hc * hc):
            c[q] = logits[lane, q]
        sinkhorn(shape, c)
        for i in T.unroll(hc):
            for j in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                comb[t, i * hc + j] = c[i * hc + j]
    T.sync_warp()  # the logits are overwritten next
