"""The broadcast pre in one launch: `reference.pre_broadcast`, whole, collapsed, or as rows of a token table."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.gates import comb_step, finish_tile
from mhc.kernels.parts import CLUSTER, flat, send, store_bulk
from mhc.kernels.split import COMB_WARPS, PARTS, SLOTS, X_SLOTS, Slices, add_warps, cut_fn, dot_tile, load_fn


def fused(config: MHCConfig, tile: int, clusters: int, has_norm: bool, outputs: str):
    """x [T, H] -> the outputs of the first pre.

    A cluster takes an equal share of the tokens, in equal tiles. It sends the sums of one tile before it waits for
    those of the tile before, so that the exchange is off the chain. Four slots for them suffice: a block that sends
    step s has seen all sums of s - 2, and a peer sends those only after it has read all of s - 4.

    Args:
        config: shapes and constants.
        tile: most tokens a cluster works on at a time.
        clusters: most clusters launched.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        outputs: `all` is residual [T, hc, H], post [T, hc, 1], comb [T, hc, hc], layer_input [T, H]; `collapsed` is
            post [T, hc] and layer_input, from the first 2 hc rows of `fn` and `base`; `table` is post [T, hc], comb
            [T, hc * hc] and factor [T, 2], the layer input's `P` and `rsqrt(P^2 mean(x^2) + norm_eps)`.
    """
    hidden, hc = config.hidden_size, config.hc_mult
    plan = Slices(config, tile, 2 * hc if outputs == "collapsed" else config.mix_rows)
    tokens = T.dynamic("tokens")

    @T.macro
    def body(x, fn, scale, base, weight, residual, post, comb, layer_input, factor):
        with T.ClusterKernel(T.min(tokens, clusters) * CLUSTER, cluster_dims=CLUSTER, threads=plan.threads) as block:
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            x_tile = T.alloc_shared((X_SLOTS, tile, plan.pitch), "bfloat16")
            x_words = T.view(x_tile, (X_SLOTS, tile, plan.pitch // 2), "uint32")
            partial = T.alloc_shared((plan.warps, plan.token_tiles, plan.sums, 8), "float32")
            gate_part = T.alloc_shared((SLOTS, CLUSTER, tile, plan.gates), "float32")
            mix_stage = T.alloc_shared((SLOTS, CLUSTER, plan.mixes), "float32")
            mix_part = T.alloc_shared((SLOTS, CLUSTER, plan.mixes), "float32")
            mixes = T.alloc_shared((2, COMB_WARPS, plan.mixes), "float32")
            arrived = T.alloc_barrier([(CLUSTER - 1) * (2 if plan.comb else 1) + 1] * SLOTS)
            w = T.alloc_local((plan.steps_held * plan.row_tiles * 4,), "float32")
            pairs = T.alloc_local((max(plan.steps_held * PARTS * plan.pairs * 4, 1),), "uint32")
            odd = T.alloc_local((plan.steps_held * 4,), "uint32")
            top = T.alloc_local((plan.steps_held * 2,), "uint32")
            sums, weights, into = (gate_part, mix_part, arrived), (scale, base, weight), (post, layer_input, factor)

            # a peer may send here once every block has initialised its barriers and arrived
            T.cluster_arrive_relaxed()
            T.pdl_sync()
            T.pdl_trigger()
            if tid < plan.workers:
                load_fn(plan, fn, w, rank, tid)  # the longest of the loads
            # kept, or every address would divide anew: the first token, the end, and how many a step and one more
            share = T.alloc_local((4,), "int32")
            share[0] = shares_before(block // CLUSTER, tokens, clusters)
            share[1] = shares_before(block // CLUSTER + 1, tokens, clusters)
            steps = T.ceildiv(share[1] - share[0], tile)
            share[2] = (share[1] - share[0]) // steps
            share[3] = (share[1] - share[0]) % steps
            if tid >= plan.workers:
                T.cluster_wait()
                T.cluster_arrive_relaxed()
                if plan.comb:
                    warp = (tid - plan.workers) // 32
                    # barrier 2 + s % 2: the sums of s - 2 have been read
                    if warp == 0:
                        for s in T.unroll(2):
                            if s < steps:
                                T.named_barrier_arrive(2 + s, plan.workers + 32)
                    for turn in T.serial(T.ceildiv(steps - warp, COMB_WARPS)):
                        s = turn * COMB_WARPS + warp
                        t0, end = bounds(share, s)
                        comb_step(plan, sums, mixes, warp, weights, comb, s, s + 2 < steps, rank, t0, end, tid % 32)
            else:
                for s in T.unroll(2):
                    t0, end = bounds(share, s)
                    prefetch_x(plan, x, x_tile, s, rank, t0, end, tid)
                cut_fn(plan, w, pairs, odd, top)
                for s in T.serial(steps + 1):
                    t0, end = bounds(share, s)
                    if s < steps:
                        T.ptx_wait_group(1)
                        T.fence_proxy_async()  # the engine that copies reads x
                        T.sync_threads(1, plan.workers)
                        dot_tile(plan, x_words, s % X_SLOTS, fn, w, pairs, odd, top, partial, end - t0, rank, tid)
                        T.sync_threads(1, plan.workers)
                        add_warps(plan, partial, gate_part, mix_stage, mix_part, s % SLOTS, end - t0, rank, tid)
                        T.fence_proxy_async()
                        if plan.comb:
                            T.sync_threads(2 + s % 2, plan.workers + 32)
                        else:
                            T.sync_threads(1, plan.workers)
                        if s == 0:
                            T.cluster_wait()
                        send_sums(plan, gate_part, mix_stage, mix_part, arrived, s % SLOTS, end - t0, rank, tid)
                        if outputs == "all":
                            store_residual(plan, x_tile, residual, s % X_SLOTS, rank, t0, end, tid)
                    if s > 0:
                        last_t0, last_end = bounds(share, s - 1)
                        finish_tile(
                            plan, has_norm, outputs, sums, x_tile, weights, into, s - 1, rank, last_t0, last_end, tid
                        )
                    if outputs == "all":
                        # the residual of s - 1 has been read
                        if s < steps:
                            T.tma_store_wait(1)
                        else:
                            T.tma_store_wait(0)
                        T.sync_warp()
                    # into the slot of s - 1, of which this warp has read the tokens that it overwrites
                    next_t0, next_end = bounds(share, s + 2)
                    prefetch_x(plan, x, x_tile, (s + 2) % X_SLOTS, rank, next_t0, next_end, tid)
                T.cluster_arrive_relaxed()
            # a block outlives the copies that read its shared memory, and all have arrived when its peers say so
            T.cluster_wait()

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*shape, dtype="float32"):
        return lambda: T.Tensor(shape, dtype)

    row_type, weight_type = tensor(tokens, hidden, dtype="bfloat16"), tensor(hidden, dtype="bfloat16")
    fn_type, scale_type, base_type = tensor(config.mix_rows, hidden), tensor(3), tensor(config.mix_rows)

    if outputs == "table":

        @T.prim_func
        def table_kernel(
            x: row_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            post: T.Tensor((tokens, hc), "float32"),
            comb: T.Tensor((tokens, hc * hc), "float32"),
            factor: T.Tensor((tokens, 2), "float32"),
        ):
            body(x, fn, scale, base, None, None, post, comb, None, factor)

        return table_kernel
    if outputs == "collapsed":

        @T.prim_func
        def collapsed_kernel(
            x: row_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            weight: weight_type(),
            post: T.Tensor((tokens, hc), "float32"),
            layer_input: row_type(),
        ):
            body(x, fn, scale, base, weight, None, post, None, layer_input, None)

        return collapsed_kernel

    @T.prim_func
    def fused_kernel(
        x: row_type(),
        fn: fn_type(),
        scale: scale_type(),
        base: base_type(),
        weight: weight_type(),
        residual: T.Tensor((tokens, hc, hidden), "bfloat16"),
        post: T.Tensor((tokens, hc, 1), "float32"),
        comb: T.Tensor((tokens, hc, hc), "float32"),
        layer_input: row_type(),
    ):
        body(x, fn, scale, base, weight, residual, *flat(config, tokens, post, comb), layer_input, None)

    return fused_kernel


def shares_before(i, total, among):
    """Where the `i`th of `among` equal shares of `total` begins."""
    return i * (total // among) + T.min(i, total % among)


def bounds(share, step):
    """Of the tokens of a step: the first, and the one after the last; nothing after the last step."""
    t0, t1 = (share[0] + s * share[2] + T.min(s, share[3]) for s in (step, step + 1))
    return t0, T.min(t1, share[1])


@T.macro
def prefetch_x(plan, x, x_tile, slot, rank, t0, end, tid):
    """Start to copy x_tile[slot] = the block's columns of tokens t0 to end; a warp a token."""
    for i in T.unroll(plan.rounds):
        t = i * plan.warps + tid // 32
        if t0 + t < end:
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
def send_sums(plan, gate_part, mix_stage, mix_part, arrived, slot, count, rank, tid):
    """gate_part[slot, rank] goes to every other block, mix_stage[slot, peer] to mix_part[slot, rank] there."""
    peer = tid // 32 % CLUSTER
    if tid % 32 == 0 and peer != rank:
        if tid // 32 < CLUSTER:
            gates = (slot * CLUSTER + rank) * plan.tile * plan.gates
            send((gate_part, gate_part), count * plan.gates, gates, gates, arrived[slot], peer)
        if plan.comb and tid // 32 // CLUSTER == plan.warps // CLUSTER - 1:
            mixes = T.ceildiv(T.ceildiv(count, CLUSTER) * plan.comb, 4) * 4
            own, peers = (slot * CLUSTER + rank) * plan.mixes, (slot * CLUSTER + peer) * plan.mixes
            send((mix_stage, mix_part), mixes, own, peers, arrived[slot], peer)
    if tid == rank * 32:
        T.mbarrier_arrive(arrived[slot])  # the block's own are in place


@T.macro
def store_residual(plan, x_tile, residual, slot, rank, t0, end, tid):
    """residual[:, j] = x, by the engine that copies; the warp that loaded a token sends it off, a lane a stream."""
    stream = tid % 32
    for i in T.unroll(plan.rounds):
        t = i * plan.warps + tid // 32
        if t0 + t < end and stream < plan.config.hc_mult:
            store_bulk(
                T.access_ptr(residual[T.cast(t0 + t, "int64"), stream, rank * plan.cols], "w", extent=plan.cols),
                T.access_ptr(x_tile[slot, t, 0], "r", extent=plan.cols),
                plan.cols * 2,
            )
    T.tma_store_arrive()
