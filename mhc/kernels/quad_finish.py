"""From the exchanged sums of a tile of four streams to its layer input, post and comb."""

import tilelang.language as T

from mhc.kernels.gates import norm_row
from mhc.kernels.parts import sigmoid
from mhc.kernels.quad_dot import CLUSTER, GRAM, STREAMS
from mhc.kernels.sinkhorn import balance
from mhc.kernels.split import SLOTS, X_SLOTS

BATCH = 16  # steps whose comb is computed at once: it takes as long for many tokens as for one
# The two streams of the inner product that a lane holds, 2 bits a lane; lanes that hold none read stream 0.
FIRST, SECOND = (sum(pair[k] << 2 * (STREAMS + i) for i, pair in enumerate(GRAM)) for k in range(2))


@T.macro
def finish_tile(plan, has_norm, sums, x_tile, weights, layer_input, step, rank, t0, end, tid):
    """layer_input of a tile once its sums are there; a warp a token, which every block gates.

    y = sum_j pre_j r_j has mean(y^2) = pre' G pre / H, G being the streams' inner products: no second exchange.
    """
    gate_part, _, arrived = sums
    scale, base, weight = weights
    lane = tid % 32
    t = tid // 32
    col = lane * 8
    slot = step % SLOTS
    factor = T.alloc_local((1,), "float32")
    bias = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    gate = T.alloc_local((1,), "float32")
    wb = T.alloc_local((8,), "bfloat16")
    rb = T.alloc_local((8,), "bfloat16")
    r = T.alloc_local((8,), "float32")
    y = T.alloc_local((8,), "float32")
    pre = T.alloc_local((STREAMS,), "float32")
    if has_norm:  # noqa: SIM102 (known to the compiler, unlike the next)
        if col < plan.cols:
            for e in T.vectorized(8):
                wb[e] = weight[rank * plan.cols + col + e]
    # lane j < 4 holds pre_j, the next ten an inner product each
    factor[0] = scale[0]
    bias[0] = base[T.min(lane, STREAMS - 1)]
    T.mbarrier_wait_parity(arrived[slot], step // SLOTS % 2)
    if t0 + t < end:
        total[0] = 0.0
        if lane < STREAMS + len(GRAM):
            for b in T.unroll(CLUSTER):
                total[0] += gate_part[slot, b, t, lane]
        # m *= rsqrt(mean(flat(r)^2) + rms_eps);  pre = sigmoid(m * scale[0] + base) + pre_eps
        rstd = T.rsqrt(mean_square(plan, total, STREAMS) + plan.config.rms_eps)
        gate[0] = sigmoid(total[0] * rstd * factor[0] + bias[0]) + plan.config.pre_eps
        for j in T.unroll(STREAMS):
            pre[j] = T.shfl_sync(gate[0], j)
        if has_norm:
            place = T.cast(T.min(lane, STREAMS + len(GRAM) - 1) * 2, "uint32")
            total[0] = total[0] * T.shfl_sync(gate[0], stream_at(FIRST, place))
            total[0] = total[0] * T.shfl_sync(gate[0], stream_at(SECOND, place))
            # products of two streams count twice, pre not at all
            total[0] = T.if_then_else(lane < STREAMS, 0.0, T.if_then_else(lane < 2 * STREAMS, 1.0, 2.0)) * total[0]
            for i in T.unroll(4):
                total[0] = total[0] + T.shfl_xor(total[0], 8 >> i)
            # lanes of the upper half hold nothing; rounding may leave less than nothing of streams that cancel
            total[0] = T.max(T.shfl_sync(total[0], 0), 0.0) / plan.config.hidden_size
        if col < plan.cols:
            for e in T.unroll(8):
                y[e] = 0.0
            for j in T.unroll(STREAMS):
                for e in T.vectorized(8):
                    rb[e] = x_tile[step % X_SLOTS, t, j * plan.cols + col + e]
                for e in T.vectorized(8):
                    r[e] = T.cast(rb[e], "float32")
                for e in T.unroll(8):
                    y[e] += pre[j] * r[e]
            for e in T.vectorized(8):
                rb[e] = T.cast(y[e], "bfloat16")
            if has_norm:
                norm_row(rb, wb, 0, T.rsqrt(total[0] + plan.config.norm_eps))
            for e in T.vectorized(8):
                layer_input[t0 + t, rank * plan.cols + col + e] = rb[e]


def bounds(plan, share, step):
    """Of the tokens of a step: the first, and the one after the last; nothing after the last step."""
    t0 = share[0] + step * plan.tile
    return t0, T.min(t0 + plan.tile, share[1])


def stream_at(streams, place):
    return T.cast(T.bitwise_and(T.shift_right(T.uint32(streams), place), T.uint32(3)), "int32")


def mean_square(plan, total, lane):
    """mean(flat(r)^2) of the squares that four lanes hold, from `lane` on."""
    squares = [T.shfl_sync(total[0], lane + j) for j in range(STREAMS)]
    return (squares[0] + squares[1] + squares[2] + squares[3]) / (STREAMS * plan.config.hidden_size)


@T.macro
def own_step(plan, sums, softmax, weights, post, step, rank, t0, end, lane):
    """post of the token of a tile that this block owns, its `rank`th, and exp(logits of comb - their row's largest)."""
    gate_part, mix_part, arrived = sums
    scale, base, _ = weights
    slot = step % SLOTS
    factor = T.alloc_local((1,), "float32")
    bias = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    top = T.alloc_local((1,), "float32")
    # lane j < 4 holds post_j, the next 16 comb, the next 4 the squares
    factor[0] = scale[T.if_then_else(lane < STREAMS, 1, 2)]
    bias[0] = base[STREAMS + T.min(lane, plan.mixes - 1)]
    T.mbarrier_wait_parity(arrived[slot], step // SLOTS % 2)
    if t0 + rank < end:
        total[0] = 0.0
        if lane < plan.mixes:
            for b in T.unroll(CLUSTER):
                total[0] += mix_part[slot, b, lane]
        elif lane < plan.mixes + STREAMS:
            for b in T.unroll(CLUSTER):
                total[0] += gate_part[slot, b, rank, STREAMS + lane - plan.mixes]
        # m *= rsqrt(mean(flat(r)^2) + rms_eps)
        rstd = T.rsqrt(mean_square(plan, total, plan.mixes) + plan.config.rms_eps)
        total[0] = total[0] * rstd * factor[0] + bias[0]
        if lane < STREAMS:
            post[t0 + rank, lane] = plan.config.post_mult * sigmoid(total[0])
        top[0] = T.max(total[0], T.shfl_xor(total[0], 1))
        top[0] = T.max(top[0], T.shfl_xor(top[0], 2))
        if lane >= STREAMS and lane < plan.mixes:
            softmax[step % BATCH, lane - STREAMS] = T.exp(total[0] - top[0])
    T.sync_warp()


@T.macro
def own_comb(plan, softmax, comb, share, step, rank, lane):
    """comb = sinkhorn(m * scale[2] + base) of the steps of a batch up to this one, one lane a token."""
    c = T.alloc_local((STREAMS * STREAMS,), "float32")
    ago = step % BATCH - lane
    t0, end = bounds(plan, share, step - ago)
    if ago >= 0 and t0 + rank < end:
        for i in T.unroll(STREAMS):
            for e in T.vectorized(STREAMS):
                c[i * STREAMS + e] = softmax[lane, i * STREAMS + e]
        balance(plan, c)
        for i in T.unroll(STREAMS):
            for e in T.vectorized(STREAMS):
                comb[t0 + rank, i * STREAMS + e] = c[i * STREAMS + e]
    T.sync_warp()  # the batch is overwritten next
