"""Around `quad`'s projection: helpers load a tile and make gates, post and comb of its sums, workers collapse it."""

import tilelang.language as T

from mhc.kernels.parts import copy_async, sigmoid
from mhc.kernels.quad_dot import CLUSTER, GRAM, STREAMS, TILE, WORKERS
from mhc.kernels.quad_sums import GATE_PITCH
from mhc.kernels.sinkhorn import balance

HELPERS = 4  # warps
THREADS = WORKERS + HELPERS * 32
BATCH = 16  # steps of a helper whose comb is computed at once: it takes as long for many tokens as for one
# The two streams of the inner product that a lane holds, 2 bits a lane; lanes that hold none read stream 0.
FIRST, SECOND = (sum(pair[k] << 2 * (STREAMS + i) for i, pair in enumerate(GRAM)) for k in range(2))


def bounds(share, step):
    """Of the tokens of a step: the first, and the one after the last; nothing after the last step."""
    t0 = share[0] + step * TILE
    return t0, T.min(t0 + TILE, share[1])


def helper(tid):
    return (tid - WORKERS) // 32


def rows_of(tensor):
    """A tensor without its shape, so that what is alike in the addresses of its rows is worked out once."""
    size = 1
    for dim in tensor.shape:
        size = size * dim
    return T.reshape(tensor, (size,))


@T.macro
def prefetch(plan, sources, tiles, loaded, share, step, slot, rank, tid):
    """Start to copy what the tokens of a step are made of, the block's columns; a helper takes every fourth token.

    `loaded` counts a lane when its copies have landed.
    """
    o, r, old_post, old_comb = sources
    o_tile, x_tile, map_gates = tiles
    t0, end = bounds(share, step)
    lane = tid % 32
    col = lane * 8
    # kept, or every address would be multiplied out anew
    at = T.alloc_local((1,), "int64")
    for i in T.unroll(TILE // HELPERS):
        t = i * HELPERS + helper(tid)
        if t0 + t < end:
            at[0] = T.cast(t0 + t, "int64")
            if plan.is_post:
                if lane == 0:
                    copy_async(map_gates[slot, t, 0], old_post[at[0], 0], STREAMS)
                elif plan.sources == STREAMS:  # noqa: SIM102 (known to the compiler, unlike the next)
                    if lane <= STREAMS:
                        copy_async(map_gates[slot, t, lane * STREAMS], old_comb[at[0], (lane - 1) * STREAMS], STREAMS)
            if col < plan.cols:
                at[0] = at[0] * plan.config.hidden_size + rank * plan.cols + col
                if plan.is_post:
                    copy_async(o_tile[slot, t, col], rows_of(o)[at[0]], 8)
                if plan.sources == STREAMS:
                    at[0] = at[0] + T.cast(t0 + t, "int64") * ((STREAMS - 1) * plan.config.hidden_size)
                for j in T.unroll(plan.sources):
                    copy_async(x_tile[slot, t, j * plan.cols + col], rows_of(r)[at[0] + j * plan.config.hidden_size], 8)
    T.cp_async_barrier_noinc(loaded[slot])


@T.macro
def gate_tile(plan, has_norm, sums, gates, weights, slot, tid):
    """gates[slot, t] = pre of a token, and the factor of its norm: every block gates all, half a warp a token.

    y = sum_j pre_j r_j has mean(y^2) = pre' G pre / H, G being the streams' inner products: no second exchange.
    """
    gate_part = sums[0]
    scale, base = weights
    lane = tid % 32
    # lane j < 4 of 16 holds pre_j, the next ten an inner product each
    place = lane % 16
    half = lane // 16 * 16
    factor = T.alloc_local((1,), "float32")
    bias = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    gate = T.alloc_local((1,), "float32")
    factor[0] = scale[0]
    bias[0] = base[T.min(place, STREAMS - 1)]
    for i in T.unroll(TILE // HELPERS // 2):
        t = (i * 2 + lane // 16) * HELPERS + helper(tid)
        total[0] = 0.0
        if place < plan.gates:
            for b in T.unroll(CLUSTER):
                total[0] += gate_part[((slot * CLUSTER + b) * plan.gates + place) * GATE_PITCH + t]
        # m *= rsqrt(mean(flat(r)^2) + rms_eps);  pre = sigmoid(m * scale[0] + base) + pre_eps
        rstd = T.rsqrt(mean_square(plan, total, half + STREAMS) + plan.config.rms_eps)
        gate[0] = sigmoid(total[0] * rstd * factor[0] + bias[0]) + plan.config.pre_eps
        if place < STREAMS:
            gates[slot, t, place] = gate[0]
        if has_norm:
            two = T.cast(T.min(place, plan.gates - 1) * 2, "uint32")
            total[0] = total[0] * T.shfl_sync(gate[0], half + stream_at(FIRST, two))
            total[0] = total[0] * T.shfl_sync(gate[0], half + stream_at(SECOND, two))
            # products of two streams count twice, pre not at all
            total[0] = T.if_then_else(place < STREAMS, 0.0, T.if_then_else(place < 2 * STREAMS, 1.0, 2.0)) * total[0]
            for k in T.unroll(4):
                total[0] = total[0] + T.shfl_xor(total[0], 8 >> k)
            if place == STREAMS:
                # rounding may leave less than nothing of streams that cancel
                mean = T.max(total[0], 0.0) / plan.config.hidden_size
                gates[slot, t, STREAMS] = T.rsqrt(mean + plan.config.norm_eps)


@T.macro
def collapse_tile(plan, has_norm, gates, x_tile, weight, out, layer_input, share, step, slot, rank, tid):
    """layer_input of a tile, and its new streams; a worker takes half of a token's columns."""
    t0, end = bounds(share, step)
    t = tid // 64
    part = tid % 32 * 4
    col = tid // 32 % 2 * (plan.cols // 2) + part
    wb = T.alloc_local((4,), "bfloat16")
    rb = T.alloc_local((4,), "bfloat16")
    r = T.alloc_local((4,), "float32")
    y = T.alloc_local((4,), "float32")
    pre = T.alloc_local((STREAMS,), "float32")
    if t0 + t < end and part < plan.cols // 2:
        # kept, or every address would be multiplied out anew
        at = T.alloc_local((1,), "int64")
        if has_norm:
            for e in T.vectorized(4):
                wb[e] = weight[rank * plan.cols + col + e]
        for e in T.vectorized(STREAMS):
            pre[e] = gates[slot, t, e]
        for e in T.unroll(4):
            y[e] = 0.0
        # in units of 4 columns, a lane's
        at[0] = T.cast(t0 + t, "int64") * plan.config.hidden_size + (rank * plan.cols + col) // 4
        for j in T.unroll(STREAMS):
            for e in T.vectorized(4):
                rb[e] = x_tile[slot, t, j * plan.cols + col + e]
            if plan.is_post:
                for e in T.vectorized(4):
                    rows_of(out)[(at[0] + j * (plan.config.hidden_size // 4)) * 4 + e] = rb[e]
            for e in T.vectorized(4):
                r[e] = T.cast(rb[e], "float32")
            for e in T.unroll(4):
                y[e] += pre[j] * r[e]
        for e in T.vectorized(4):
            rb[e] = T.cast(y[e], "bfloat16")
        if has_norm:
            # layer_input = y * rsqrt(mean(y^2) + norm_eps) * weight
            for e in T.vectorized(4):
                y[e] = T.cast(rb[e], "float32")
            for e in T.vectorized(4):
                r[e] = T.cast(wb[e], "float32")
            for e in T.unroll(4):
                y[e] = y[e] * gates[slot, t, STREAMS] * r[e]
            for e in T.vectorized(4):
                rb[e] = T.cast(y[e], "bfloat16")
        for e in T.vectorized(4):
            layer_input[t0 + t, rank * plan.cols + col + e] = rb[e]


def stream_at(streams, place):
    return T.cast(T.bitwise_and(T.shift_right(T.uint32(streams), place), T.uint32(3)), "int32")


def mean_square(plan, total, lane):
    """mean(flat(r)^2) of the squares that four lanes hold, from `lane` on."""
    squares = [T.shfl_sync(total[0], lane + j) for j in range(STREAMS)]
    return (squares[0] + squares[1] + squares[2] + squares[3]) / (STREAMS * plan.config.hidden_size)


@T.macro
def own_step(plan, sums, softmax, weights, post, share, step, slot, rank, tid):
    """post of the token of a tile that this block owns, its `rank`th, and exp(logits of comb - their row's largest)."""
    gate_part, mix_part = sums[:2]
    scale, base = weights
    t0, end = bounds(share, step)
    lane = tid % 32
    factor = T.alloc_local((1,), "float32")
    bias = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    top = T.alloc_local((1,), "float32")
    # lane j < 4 holds post_j, the next 16 comb, the next 4 the squares
    factor[0] = scale[T.if_then_else(lane < STREAMS, 1, 2)]
    bias[0] = base[STREAMS + T.min(lane, plan.mixes - 1)]
    if t0 + rank < end:
        total[0] = 0.0
        if lane < plan.mixes:
            for b in T.unroll(CLUSTER):
                total[0] += mix_part[(slot * CLUSTER + b) * plan.mixes + lane]
        elif lane < plan.mixes + STREAMS:
            for b in T.unroll(CLUSTER):
                m = STREAMS + lane - plan.mixes
                total[0] += gate_part[((slot * CLUSTER + b) * plan.gates + m) * GATE_PITCH + rank]
        # m *= rsqrt(mean(flat(r)^2) + rms_eps)
        rstd = T.rsqrt(mean_square(plan, total, plan.mixes) + plan.config.rms_eps)
        total[0] = total[0] * rstd * factor[0] + bias[0]
        if lane < STREAMS:
            post[t0 + rank, lane] = plan.config.post_mult * sigmoid(total[0])
        top[0] = T.max(total[0], T.shfl_xor(total[0], 1))
        top[0] = T.max(top[0], T.shfl_xor(top[0], 2))
        if lane >= STREAMS and lane < plan.mixes:
            softmax[helper(tid), step // HELPERS % BATCH, lane - STREAMS] = T.exp(total[0] - top[0])
    T.sync_warp()


@T.macro
def own_comb(plan, softmax, comb, share, step, rank, tid):
    """comb = sinkhorn(m * scale[2] + base) of the helper's steps of a batch up to this one, one lane a token."""
    lane = tid % 32
    c = T.alloc_local((STREAMS * STREAMS,), "float32")
    ago = step // HELPERS % BATCH - lane
    t0, end = bounds(share, step - ago * HELPERS)
    if ago >= 0 and t0 + rank < end:
        for i in T.unroll(STREAMS):
            for e in T.vectorized(STREAMS):
                c[i * STREAMS + e] = softmax[helper(tid), lane, i * STREAMS + e]
        balance(plan, c)
        for i in T.unroll(STREAMS):
            for e in T.vectorized(STREAMS):
                comb[t0 + rank, i * STREAMS + e] = c[i * STREAMS + e]
    T.sync_warp()  # the batch is overwritten next
