"""Around `quad`'s projection: helpers make gates, post and comb of a tile's sums, workers load and collapse it."""

import tilelang.language as T

from mhc.kernels.parts import copy_async, sigmoid
from mhc.kernels.quad_dot import BARRIERS, CLUSTER, GRAM, STREAMS, TILE, WORKERS
from mhc.kernels.quad_sums import gate_at
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


@T.macro
def wait(barriers, step):
    T.mbarrier_wait_parity(barriers[step % BARRIERS], step // BARRIERS % 2)


def helper(tid):
    return (tid - WORKERS) // 32


def first_gated(tid):
    """The first of the tokens of a tile that a helper gates."""
    return helper(tid) * (TILE // HELPERS)


def rows_of(tensor):
    """A tensor without its shape, so that what is alike in the addresses of its rows is worked out once."""
    size = 1
    for dim in tensor.shape:
        size = size * dim
    return T.reshape(tensor, (size,))


@T.macro
def prefetch(plan, sources, x_tile, map_gates, loaded, share, step, slot, rank, tid):
    """Start to copy what the tokens of a step are made of, the block's columns, by half of the workers: a warp a token.

    `loaded` counts a lane when its copies have landed.
    """
    o, r, old_post, old_comb = sources
    t0, end = bounds(share, step)
    lane = tid % 32
    col = lane * 8
    t = tid // 32 % TILE
    # kept, or every address would be multiplied out anew
    at = T.alloc_local((1,), "int64")
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
                copy_async(x_tile[slot, t, STREAMS * plan.cols + col], rows_of(o)[at[0]], 8)
            if plan.sources == STREAMS:
                at[0] = at[0] + T.cast(t0 + t, "int64") * ((STREAMS - 1) * plan.config.hidden_size)
            for j in T.unroll(plan.sources):
                copy_async(x_tile[slot, t, j * plan.cols + col], rows_of(r)[at[0] + j * plan.config.hidden_size], 8)
    T.cp_async_barrier_noinc(loaded[step % BARRIERS])


@T.macro
def load_weights(plan, scale, base, affine, tid):
    """affine = scale and base of the gate that a helper's lane holds in `gate_tile`, then of its in `own_step`.

    Once, or they would be on their way when the sums have arrived.
    """
    lane = tid % 32
    affine[0] = scale[0]
    affine[1] = base[T.min(lane % 16, STREAMS - 1)]
    affine[2] = scale[T.if_then_else(lane < STREAMS, 1, 2)]
    affine[3] = base[STREAMS + T.min(lane, plan.mixes - 1)]


@T.macro
def gate_tile(plan, has_norm, sums, gates, affine, slot, tid):
    """gates[slot, t] = pre of a helper's tokens, and the factor of their norm: every block gates all tokens.

    Half a warp takes a token. y = sum_j pre_j r_j has mean(y^2) = pre' G pre / H, G being the streams' inner products:
    no second exchange.
    """
    gate_part = sums[0]
    lane = tid % 32
    # lane j < 4 of 16 holds pre_j, the next ten an inner product each
    place = lane % 16
    half = lane // 16 * 16
    total = T.alloc_local((1,), "float32")
    gate = T.alloc_local((1,), "float32")
    for i in T.unroll(TILE // HELPERS // 2):
        t = first_gated(tid) + i * 2 + lane // 16
        total[0] = 0.0
        if place < plan.gates:
            for b in T.unroll(CLUSTER):
                total[0] += gate_part[gate_at(plan, slot, b, place, t)]
        # m *= rsqrt(mean(flat(r)^2) + rms_eps);  pre = sigmoid(m * scale[0] + base) + pre_eps
        rstd = T.rsqrt(mean_square(plan, total, half + STREAMS) + plan.config.rms_eps)
        gate[0] = sigmoid(total[0] * rstd * affine[0] + affine[1]) + plan.config.pre_eps
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
def collapse_tile(plan, has_norm, gates, gated, x_tile, into, share, step, slot, rank, tid):
    """layer_input of a tile once it is gated, and its new streams, by half of the workers: a warp a token, 8 columns a
    lane.
    """
    weight, out, layer_input = into
    t0, end = bounds(share, step)
    t = tid // 32 % TILE
    col = tid % 32 * 8
    wb = T.alloc_local((8,), "bfloat16")
    rb = T.alloc_local((8,), "bfloat16")
    r = T.alloc_local((8,), "float32")
    y = T.alloc_local((8,), "float32")
    pre = T.alloc_local((STREAMS + 1,), "float32")
    if has_norm and col < plan.cols:
        # on its way while the gates are waited for
        for e in T.vectorized(8):
            wb[e] = weight[rank * plan.cols + col + e]
    wait(gated, step)
    if t0 + t < end and col < plan.cols:
        # kept, or every address would be multiplied out anew
        at = T.alloc_local((1,), "int64")
        if has_norm:
            pre[STREAMS] = gates[slot, t, STREAMS]
        for e in T.vectorized(STREAMS):
            pre[e] = gates[slot, t, e]
        for e in T.unroll(8):
            y[e] = 0.0
        # in units of 8 columns, a lane's
        at[0] = T.cast(t0 + t, "int64") * (STREAMS * plan.config.hidden_size // 8) + (rank * plan.cols + col) // 8
        for j in T.unroll(STREAMS):
            for e in T.vectorized(8):
                rb[e] = x_tile[slot, t, j * plan.cols + col + e]
            if plan.is_post:
                for e in T.vectorized(8):
                    rows_of(out)[(at[0] + j * (plan.config.hidden_size // 8)) * 8 + e] = rb[e]
            unpack(rb, r)
            for e in T.unroll(8):
                y[e] += pre[j] * r[e]
        for e in T.vectorized(8):
            rb[e] = T.cast(y[e], "bfloat16")
        if has_norm:
            # layer_input = y * rsqrt(mean(y^2) + norm_eps) * weight
            unpack(rb, y)
            unpack(wb, r)
            for e in T.unroll(8):
                y[e] = y[e] * pre[STREAMS] * r[e]
            for e in T.vectorized(8):
                rb[e] = T.cast(y[e], "bfloat16")
        for e in T.vectorized(8):
            layer_input[t0 + t, rank * plan.cols + col + e] = rb[e]


@T.macro
def unpack(pairs, f):
    """f = the fp32 values of 8 bf16; a cast takes three instructions for two."""
    for i in T.unroll(4):
        two = T.reinterpret(pairs[T.Ramp(i * 2, 1, 2)], "uint32")
        f[i * 2] = T.reinterpret(two << T.uint32(16), "float32")
        f[i * 2 + 1] = T.reinterpret(T.bitwise_and(two, T.uint32(0xFFFF0000)), "float32")


def stream_at(streams, place):
    return T.cast(T.bitwise_and(T.shift_right(T.uint32(streams), place), T.uint32(3)), "int32")


def mean_square(plan, total, lane):
    """mean(flat(r)^2) of the squares that four lanes hold, from `lane` on."""
    squares = [T.shfl_sync(total[0], lane + j) for j in range(STREAMS)]
    return (squares[0] + squares[1] + squares[2] + squares[3]) / (STREAMS * plan.config.hidden_size)


@T.macro
def own_step(plan, sums, softmax, affine, post, share, step, slot, rank, tid):
    """post of the token of a tile that this block owns, its `rank`th, and exp(logits of comb - their row's largest)."""
    gate_part, mix_part = sums[:2]
    t0, end = bounds(share, step)
    lane = tid % 32
    total = T.alloc_local((1,), "float32")
    top = T.alloc_local((1,), "float32")
    # lane j < 4 holds post_j, the next 16 comb, the next 4 the squares
    if t0 + rank < end:
        total[0] = 0.0
        if lane < plan.mixes:
            for b in T.unroll(CLUSTER):
                total[0] += mix_part[(slot * CLUSTER + b) * plan.mixes + lane]
        elif lane < plan.mixes + STREAMS:
            for b in T.unroll(CLUSTER):
                total[0] += gate_part[gate_at(plan, slot, b, STREAMS + lane - plan.mixes, rank)]
        # m *= rsqrt(mean(flat(r)^2) + rms_eps)
        rstd = T.rsqrt(mean_square(plan, total, plan.mixes) + plan.config.rms_eps)
        total[0] = total[0] * rstd * affine[2] + affine[3]
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
