"""The broadcast pre in one launch: `reference.pre_broadcast`, whole, collapsed, or as rows of a token table."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import CLUSTER, send, sigmoid
from mhc.kernels.sinkhorn import sinkhorn
from mhc.kernels.split import PARTS, Slices, add_warps, dot_tile, load_fn, warps_of

SLOTS = 4  # of exchanged sums
X_SLOTS = 3  # tiles of x: one being projected, the one before, the one after


def fused(config: MHCConfig, tile: int, clusters: int, has_norm: bool, outputs: str = "all", warps: int = 0):
    """x [T, H] -> the outputs of the first pre.

    A cluster takes an equal share of the tokens, tile after tile. It sends the sums of one tile before it waits for
    those of the tile before, so that the exchange is off the chain. Four slots for them suffice: a block that sends
    step s has seen all sums of s - 2, and a peer sends those only after it has read all of s - 4.

    Args:
        config: shapes and constants.
        tile: tokens a cluster works on at a time.
        clusters: most clusters launched.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        outputs: `all` is residual [T, hc, H], post [T, hc], comb [T, hc * hc], layer_input [T, H]; `collapsed` is post
            and layer_input, from the first 2 hc rows of `fn` and `base`; `table` is post, comb and factor [T, 2], the
            layer input's `P` and `rsqrt(P^2 mean(x^2) + norm_eps)`.
        warps: that work on a tile, 0 for the usual number.
    """
    hidden, hc = config.hidden_size, config.hc_mult
    warps = warps or warps_of(config)
    plan = Slices(config, tile, 2 * hc if outputs == "collapsed" else config.mix_rows, warps)
    tokens = T.dynamic("tokens")

    @T.macro
    def body(x, fn, scale, base, weight, residual, post, comb, layer_input, factor):
        with T.ClusterKernel(T.min(tokens, clusters) * CLUSTER, cluster_dims=CLUSTER, threads=plan.threads) as block:
            if clusters > 16:
                T.annotate_min_blocks_per_sm(2)
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            x_tile = T.alloc_shared((X_SLOTS, tile, plan.pitch), "bfloat16")
            x_words = T.view(x_tile, (X_SLOTS, tile, plan.pitch // 2), "uint32")
            partial = T.alloc_shared((warps, plan.token_tiles, plan.sums, 8), "float32")
            gate_stage = T.alloc_shared((SLOTS, tile, plan.gates), "float32")
            gate_part = T.alloc_shared((SLOTS, CLUSTER, tile, plan.gates), "float32")
            mix_stage = T.alloc_shared((SLOTS, CLUSTER, plan.mixes), "float32")
            mix_part = T.alloc_shared((SLOTS, CLUSTER, plan.mixes), "float32")
            logits = T.alloc_shared((plan.mixes,), "float32")
            arrived = T.alloc_barrier([CLUSTER * (2 if plan.comb else 1)] * SLOTS)
            pairs = T.alloc_local((max(plan.steps_held * PARTS * plan.pairs * 4, 1),), "uint32")
            odd = T.alloc_local((plan.steps_held * 4,), "uint32")
            top = T.alloc_local((plan.steps_held * 2,), "uint32")

            # a peer may send here once every block has initialised its barriers and arrived
            T.cluster_arrive_relaxed()
            T.pdl_sync()
            T.pdl_trigger()
            # kept, or every address would divide anew
            own_tokens = T.alloc_local((2,), "int32")
            own_tokens[0] = share(tokens, clusters, block // CLUSTER)
            own_tokens[1] = share(tokens, clusters, block // CLUSTER + 1)
            begin, end = own_tokens[0], own_tokens[1]
            steps = T.ceildiv(end - begin, tile)
            if tid >= plan.workers:
                T.cluster_wait()
                if plan.comb:
                    # barrier 2 + s % 2: the sums of s - 2 have been read
                    T.named_barrier_arrive(2, plan.threads)
                    if steps > 1:
                        T.named_barrier_arrive(3, plan.threads)
                    for s in T.serial(steps):
                        comb_step(
                            plan,
                            gate_part,
                            mix_part,
                            logits,
                            arrived,
                            scale,
                            base,
                            comb,
                            s,
                            steps,
                            rank,
                            begin + s * tile,
                            end,
                            tid - plan.workers,
                        )
            else:
                prefetch_x(plan, x, x_tile, 0, rank, begin, end, tid)
                prefetch_x(plan, x, x_tile, 1, rank, begin + tile, end, tid)
                load_fn(plan, fn, pairs, odd, top, rank, tid)
                for s in T.serial(steps + 1):
                    t0 = begin + s * tile
                    if s < steps:
                        count = T.min(end - t0, tile)
                        T.ptx_wait_group(1)
                        T.sync_threads(1, plan.workers)
                        dot_tile(plan, x_words, s % X_SLOTS, fn, pairs, odd, top, partial, count, rank, tid)
                        T.sync_threads(1, plan.workers)
                        add_warps(plan, partial, gate_stage, mix_stage, s % SLOTS, count, tid)
                        T.fence_proxy_async()
                        if plan.comb:
                            T.sync_threads(2 + s % 2, plan.threads)
                        else:
                            T.sync_threads(1, plan.workers)
                        if s == 0:
                            T.cluster_wait()
                        send_sums(plan, gate_stage, gate_part, mix_stage, mix_part, arrived, s % SLOTS, rank, tid)
                        if outputs == "all":
                            store_residual(plan, x_tile, residual, s % X_SLOTS, rank, t0, end, tid)
                    if s > 0:
                        finish_tile(
                            plan,
                            has_norm,
                            outputs,
                            gate_part,
                            x_tile,
                            arrived,
                            scale,
                            base,
                            weight,
                            post,
                            layer_input,
                            factor,
                            s - 1,
                            rank,
                            t0 - tile,
                            end,
                            tid,
                        )
                    # into the slot of s - 1, of which this thread has read the bytes that it overwrites
                    prefetch_x(plan, x, x_tile, (s + 2) % X_SLOTS, rank, t0 + 2 * tile, end, tid)
            # a block outlives the copies that read its shared memory
            T.cluster_arrive_relaxed()
            T.cluster_wait()

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*shape, dtype="float32"):
        return lambda: T.Tensor(shape, dtype)

    row_type, weight_type = tensor(tokens, hidden, dtype="bfloat16"), tensor(hidden, dtype="bfloat16")
    fn_type, scale_type, base_type = tensor(config.mix_rows, hidden), tensor(3), tensor(config.mix_rows)
    post_type, comb_type = tensor(tokens, hc), tensor(tokens, hc * hc)

    if outputs == "table":

        @T.prim_func
        def table_kernel(
            x: row_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            post: post_type(),
            comb: comb_type(),
            factor: T.Tensor((tokens, 2), "float32"),
        ):
            body(x, fn, scale, base, x, x, post, comb, x, factor)

        return table_kernel
    if outputs == "collapsed":

        @T.prim_func
        def collapsed_kernel(
            x: row_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            weight: weight_type(),
            post: post_type(),
            layer_input: row_type(),
        ):
            body(x, fn, scale, base, weight, x, post, post, layer_input, post)

        return collapsed_kernel

    @T.prim_func
    def fused_kernel(
        x: row_type(),
        fn: fn_type(),
        scale: scale_type(),
        base: base_type(),
        weight: weight_type(),
        residual: T.Tensor((tokens, hc, hidden), "bfloat16"),
        post: post_type(),
        comb: comb_type(),
        layer_input: row_type(),
    ):
        body(x, fn, scale, base, weight, residual, post, comb, layer_input, post)

    return fused_kernel


def share(total, among, i):
    """Where the `i`th of `among` equal shares of `total` begins."""
    return i * (total // among) + T.min(i, total % among)


@T.macro
def prefetch_x(plan, x, x_tile, slot, rank, t0, end, tid):
    """Start to copy x_tile[slot] = the block's columns of the tile that begins at token t0; a warp a token."""
    for i in T.unroll(plan.rounds):
        t = i * plan.warps + tid // 32
        if t < plan.tile and t0 + t < end:
            for v in T.unroll(plan.vecs):
                col = (v * 32 + tid % 32) * 8
                if col < plan.cols:
                    T.ptx_cp_async(
                        T.access_ptr(x_tile[slot, t, col], "w", extent=8),
                        T.access_ptr(x[T.cast(t0 + t, "int64"), rank * plan.cols + col], "r", extent=8),
                        8,
                    )
    T.ptx_commit_group()


@T.macro
def send_sums(plan, gate_stage, gate_part, mix_stage, mix_part, arrived, slot, rank, tid):
    """gate_part[slot, rank] on every block = gate_stage[slot]; mix_part[slot, rank] on each = its mix_stage[slot]."""
    peer = tid // 32
    gate_size = plan.tile * plan.gates
    if tid % 32 == 0 and peer < CLUSTER:
        send(
            (gate_stage, gate_part),
            gate_size,
            (slot * CLUSTER + rank) * gate_size,
            slot * gate_size,
            arrived[slot],
            peer,
        )
        if plan.comb:
            send(
                (mix_stage, mix_part),
                plan.mixes,
                (slot * CLUSTER + rank) * plan.mixes,
                (slot * CLUSTER + peer) * plan.mixes,
                arrived[slot],
                peer,
            )


@T.macro
def store_residual(plan, x_tile, residual, slot, rank, t0, end, tid):
    """residual[:, j] = x"""
    xb = T.alloc_local((8,), "bfloat16")
    for i in T.unroll(plan.rounds):
        t = i * plan.warps + tid // 32
        if t < plan.tile and t0 + t < end:
            for v in T.unroll(plan.vecs):
                col = (v * 32 + tid % 32) * 8
                if col < plan.cols:
                    for e in T.vectorized(8):
                        xb[e] = x_tile[slot, t, col + e]
                    for j in T.unroll(plan.config.hc_mult):
                        for e in T.vectorized(8):
                            residual[t0 + t, j, rank * plan.cols + col + e] = xb[e]


@T.macro
def finish_tile(
    plan,
    has_norm,
    outputs,
    gate_part,
    x_tile,
    arrived,
    scale,
    base,
    weight,
    post,
    layer_input,
    factor,
    step,
    rank,
    t0,
    end,
    tid,
):
    """post and layer_input (or factor) of a tile once its sums are there; a warp a token, which every block gates."""
    lane = tid % 32
    hc = plan.config.hc_mult
    slot = step % SLOTS
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
        if t < plan.tile and t0 + t < end:
            total[0] = 0.0
            if lane <= 2 * hc:
                for b in T.unroll(CLUSTER):
                    total[0] += gate_part[slot, b, t, lane]
            # m *= rsqrt(mean(x^2) + rms_eps)
            mean_square = T.shfl_sync(total[0], 2 * hc) / plan.config.hidden_size
            total[0] = sigmoid(total[0] * T.rsqrt(mean_square + plan.config.rms_eps) * factor_of[0] + bias[0])
            if t % CLUSTER == rank and lane >= hc and lane < 2 * hc:
                post[t0 + t, lane - hc] = plan.config.post_mult * total[0]
            # P = sum_j pre_j;  mean((P * x)^2) = P^2 * mean(x^2)
            total[0] = total[0] + plan.config.pre_eps
            p[0] = 0.0
            for j in T.unroll(hc):
                p[0] += T.shfl_sync(total[0], j)
            rstd = T.rsqrt(p[0] * p[0] * mean_square + plan.config.norm_eps)
            if outputs == "table":
                if t % CLUSTER == rank and lane < 2:
                    factor[t0 + t, lane] = T.if_then_else(lane == 0, p[0], rstd)
            else:
                for v in T.unroll(plan.vecs):
                    col = (v * 32 + lane) * 8
                    if col < plan.cols:
                        for e in T.vectorized(8):
                            xb[e] = x_tile[step % X_SLOTS, t, col + e]
                        scale_row(has_norm, xb, wb, v * 8, p[0], rstd)
                        for e in T.vectorized(8):
                            layer_input[t0 + t, rank * plan.cols + col + e] = xb[e]


@T.macro
def scale_row(has_norm, xb, wb, w_at, p, rstd):
    """xb = bf16(P * x), then bf16(that * rstd * weight) if normed: 8 columns of the layer input."""
    y = T.alloc_local((8,), "float32")
    w = T.alloc_local((8,), "float32")
    # casts of whole vectors become packed conversions, at four times the rate
    for e in T.vectorized(8):
        y[e] = T.cast(xb[e], "float32")
    for e in T.unroll(8):
        y[e] = p * y[e]
    for e in T.vectorized(8):
        xb[e] = T.cast(y[e], "bfloat16")
    if has_norm:
        for e in T.vectorized(8):
            y[e] = T.cast(xb[e], "float32")
        for e in T.vectorized(8):
            w[e] = T.cast(wb[w_at + e], "float32")
        for e in T.unroll(8):
            y[e] = y[e] * rstd * w[e]
        for e in T.vectorized(8):
            xb[e] = T.cast(y[e], "bfloat16")


@T.macro
def comb_step(plan, gate_part, mix_part, logits, arrived, scale, base, comb, step, steps, rank, t0, end, lane):
    """comb = sinkhorn(m * scale[2] + base) of the tokens this block owns, by the last warp: one lane a token."""
    hc = plan.config.hc_mult
    slot = step % SLOTS
    rounds = -(-plan.owned * plan.comb // 32)
    c = T.alloc_local((hc * hc,), "float32")
    bias = T.alloc_local((rounds,), "float32")
    factor = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    square = T.alloc_local((1,), "float32")
    factor[0] = scale[2]
    for i in T.unroll(rounds):
        bias[i] = base[2 * hc + (i * 32 + lane) % plan.comb]
    T.mbarrier_wait_parity(arrived[slot], step // SLOTS % 2)
    # logits [owned, hc^2], a lane each
    for i in T.unroll(rounds):
        q = i * 32 + lane
        t = q // plan.comb * CLUSTER + rank
        if t < plan.tile and t0 + t < end:
            total[0] = 0.0
            square[0] = 0.0
            for b in T.unroll(CLUSTER):
                square[0] += gate_part[slot, b, t, 2 * hc]
                total[0] += mix_part[slot, b, q]
            # m *= rsqrt(mean(x^2) + rms_eps)
            rstd = T.rsqrt(square[0] / plan.config.hidden_size + plan.config.rms_eps)
            logits[q] = total[0] * rstd * factor[0] + bias[i]
    if step + 2 < steps:
        T.named_barrier_arrive(2 + step % 2, plan.threads)
    T.sync_warp()
    t = lane * CLUSTER + rank
    if t < plan.tile and t0 + t < end:
        for q in T.unroll(hc * hc):
            c[q] = logits[lane * plan.comb + q]
        sinkhorn(plan, c)
        for i in T.unroll(hc):
            for j in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                comb[t0 + t, i * hc + j] = c[i * hc + j]
    T.sync_warp()  # the logits are overwritten next
