"""From the exchanged sums of a tile of one stream to its post, layer input and comb."""

import tilelang.language as T

from mhc.kernels.parts import CLUSTER, sigmoid
from mhc.kernels.sinkhorn import balance, sinkhorn
from mhc.kernels.split import SLOTS, X_SLOTS


@T.macro
def finish_tile(plan, has_norm, outputs, sums, x_tile, weights, into, step, rank, t0, end, tid):
    """All of a tile but comb, once its sums are there; a warp a token, which every block gates."""
    gate_part, arrived = sums
    scale, base, weight = weights
    residual, post, layer_input, factor = into
    lane = tid % 32
    hc = plan.config.hc_mult
    slot = step % SLOTS
    token = T.alloc_local((1,), "int32")  # kept, or every address would add it up anew
    bias = T.alloc_local((1,), "float32")
    factor_of = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    p = T.alloc_local((1,), "float32")
    xb = T.alloc_local((8,), "bfloat16")
    wb = T.alloc_local((plan.vecs * 8,), "bfloat16")
    if has_norm:
        for v in T.unroll(plan.vecs):
            col = (v * 32 + lane) * 8
            if col < plan.cols:
                for e in T.vectorized(8):
                    wb[v * 8 + e] = weight[rank * plan.cols + col + e]
    # lane j < hc holds pre_j, the next hc lanes post, and one the sum of squares
    factor_of[0] = scale[T.if_then_else(lane < hc, 0, 1)]
    bias[0] = base[T.min(lane, 2 * hc - 1)]
    T.mbarrier_wait_parity(arrived[slot], step // SLOTS % 2)
    for i in T.unroll(plan.rounds):
        t = i * plan.warps + tid // 32
        token[0] = t0 + t
        if token[0] < end:
            total[0] = 0.0
            if lane <= 2 * hc:
                for b in T.unroll(CLUSTER):
                    total[0] += gate_part[((slot * CLUSTER + b) * plan.commons + lane) * plan.token_pitch + t]
            # m *= rsqrt(mean(x^2) + rms_eps)
            mean_square = T.shfl_sync(total[0], 2 * hc) / plan.config.hidden_size
            total[0] = sigmoid(total[0] * T.rsqrt(mean_square + plan.config.rms_eps) * factor_of[0] + bias[0])
            if t % CLUSTER == rank and lane >= hc and lane < 2 * hc:
                post[token[0], lane - hc] = plan.config.post_mult * total[0]
            # P = sum_j pre_j;  mean((P * x)^2) = P^2 * mean(x^2)
            total[0] = total[0] + plan.config.pre_eps
            p[0] = 0.0
            for j in T.unroll(hc):
                p[0] += T.shfl_sync(total[0], j)
            rstd = T.rsqrt(p[0] * p[0] * mean_square + plan.config.norm_eps)
            if outputs == "table":
                if t % CLUSTER == rank and lane < 2:
                    factor[token[0], lane] = T.if_then_else(lane == 0, p[0], rstd)
            else:
                for v in T.unroll(plan.vecs):
                    col = (v * 32 + lane) * 8
                    if col < plan.cols:
                        for e in T.vectorized(8):
                            xb[e] = x_tile[step % X_SLOTS, t, col + e]
                        if outputs == "all":
                            for j in T.unroll(hc):
                                for e in T.vectorized(8):
                                    residual[T.cast(token[0], "int64"), j, rank * plan.cols + col + e] = xb[e]
                        scale_row(has_norm, xb, wb, v * 8, p[0], rstd)
                        for e in T.vectorized(8):
                            layer_input[token[0], rank * plan.cols + col + e] = xb[e]


@T.macro
def scale_row(has_norm, xb, wb, w_at, p, rstd):
    """xb = bf16(P * x), then bf16(that * rstd * weight) if normed: 8 columns of the layer input."""
    y = T.alloc_local((8,), "float32")
    # casts of whole vectors become packed conversions, at four times the rate
    for e in T.vectorized(8):
        y[e] = T.cast(xb[e], "float32")
    for e in T.unroll(8):
        y[e] = p * y[e]
    for e in T.vectorized(8):
        xb[e] = T.cast(y[e], "bfloat16")
    if has_norm:
        norm_row(xb, wb, w_at, rstd)


@T.macro
def norm_row(xb, wb, w_at, rstd):
    """xb = bf16(xb * rstd * weight), 8 columns."""
    y = T.alloc_local((8,), "float32")
    w = T.alloc_local((8,), "float32")
    for e in T.vectorized(8):
        y[e] = T.cast(xb[e], "float32")
    for e in T.vectorized(8):
        w[e] = T.cast(wb[w_at + e], "float32")
    for e in T.unroll(8):
        y[e] = y[e] * rstd * w[e]
    for e in T.vectorized(8):
        xb[e] = T.cast(y[e], "bfloat16")


@T.macro
def own_logits(plan, sums, mix_part, logits, weights, step, awaited, rank, lane):
    """logits[token, :] of the tokens of a tile that this block owns, by one warp: a lane an element.

    Their exponentials, where a row of comb is a power of two and so in reach of butterflies. `awaited` says whether
    anyone waits to overwrite the sums.
    """
    gate_part, arrived = sums
    scale, base, _ = weights
    hc = plan.config.hc_mult
    slot = step % SLOTS
    size = plan.owned * plan.comb
    bias = T.alloc_local((-(-size // 32),), "float32")
    factor = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    top = T.alloc_local((1,), "float32")
    square = T.alloc_local((1,), "float32")
    factor[0] = scale[2]
    for i in T.unroll(T.ceildiv(size, 32)):
        bias[i] = base[2 * hc + (i * 32 + lane) % plan.comb]
    T.mbarrier_wait_parity(arrived[slot], step // SLOTS % 2)
    # of all that a full tile would have: what there is no token for is never read
    for i in T.unroll(T.ceildiv(size, 32)):
        q = T.min(i * 32 + lane, size - 1)
        token = q // plan.comb
        total[0] = 0.0
        square[0] = 0.0
        for b in T.unroll(CLUSTER):
            at = ((slot * CLUSTER + b) * plan.commons + 2 * hc) * plan.token_pitch
            square[0] += gate_part[at + token * CLUSTER + rank]
            total[0] += mix_part[((slot * CLUSTER + b) * plan.owned + token) * plan.comb_sent + q % plan.comb]
        # m *= rsqrt(mean(x^2) + rms_eps)
        rstd = T.rsqrt(square[0] / plan.config.hidden_size + plan.config.rms_eps)
        total[0] = total[0] * rstd * factor[0] + bias[i]
        if in_reach(hc):
            top[0] = total[0]
            for k in T.unroll(hc.bit_length() - 1):
                top[0] = T.max(top[0], T.shfl_xor(top[0], 1 << k))
            total[0] = T.exp(total[0] - top[0])
        if i * 32 + lane < size:
            logits[step % plan.batch * plan.owned + token, q % plan.comb] = total[0]
    T.sync_warp()
    if awaited:
        if step % 2 == 0:
            T.named_barrier_arrive(2, plan.workers + 32)
        else:
            T.named_barrier_arrive(3, plan.workers + 32)


def in_reach(hc):
    """Whether a row of comb is a power of two."""
    return hc in (2, 4, 8)


@T.macro
def own_comb(plan, logits, comb, t, known, lane):
    """comb[t] = sinkhorn(logits[lane]) where `known`: a lane a token, by one warp."""
    hc = plan.config.hc_mult
    c = T.alloc_local((hc * hc,), "float32")
    if known:
        for i in T.unroll(hc):
            for e in T.vectorized(hc) if hc in (2, 4) else T.unroll(hc):
                c[i * hc + e] = logits[lane, i * hc + e]
        if in_reach(hc):
            balance(plan, c)
        else:
            sinkhorn(plan, c)
        for i in T.unroll(hc):
            for j in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                comb[t, i * hc + j] = c[i * hc + j]
    T.sync_warp()  # the logits are overwritten next
