"""The broadcast pre in one launch: `reference.pre_broadcast`, whole, collapsed, or as rows of a token table."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.fma import dot_tile_fma, load_resident_fn
from mhc.kernels.parts import CLUSTER, THREADS, WORKERS, Plan, comb_warp, exchange, mix, sync_workers


def fused(config: MHCConfig, tile: int, clusters: int, has_norm: bool, outputs: str = "all"):
    """x [T, H] -> the outputs of the first pre.

    Args:
        config: shapes and constants.
        tile: tokens a cluster works on at a time.
        clusters: most clusters launched; they stride over the tiles.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        outputs: `all` is residual [T, hc, H], post [T, hc], comb [T, hc * hc], layer_input [T, H]; `collapsed` is post
            and layer_input, from the first 2 hc rows of `fn` and `base`; `table` is post, comb and factor [T, 2], the
            layer input's `P` and `rsqrt(P^2 mean(x^2) + norm_eps)`.
    """
    hidden, hc = config.hidden_size, config.hc_mult
    rows = 2 * hc if outputs == "collapsed" else config.mix_rows
    plan = Plan(config, tile, 1, rows, clusters)
    cols, vecs = plan.cols, plan.vecs
    loads = -(-tile * vecs // WORKERS)
    tokens = T.dynamic("tokens")

    @T.macro
    def body(x, fn, scale, base, weight, residual, post, comb, layer_input, factor):
        with T.ClusterKernel(
            T.min(T.ceildiv(tokens, tile), clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS
        ) as block:
            if clusters > 16:
                T.annotate_min_blocks_per_sm(2)
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            x_tile = T.alloc_shared((tile, cols), "bfloat16")
            stage = T.alloc_shared((2, tile, plan.width), "float32")
            part = T.alloc_shared((2, CLUSTER, tile, plan.width), "float32")
            arrived = T.alloc_cluster_barrier([CLUSTER, CLUSTER])
            sums = T.alloc_shared((tile, plan.sums), "float32")
            own = T.alloc_shared((-(-tile // CLUSTER), plan.sums), "float32")
            pre = T.alloc_shared((tile, hc), "float32")
            factors = T.alloc_shared((tile, 2), "float32")
            w = T.alloc_local((plan.registers,), "float32")
            xb = T.alloc_local((loads * 8,), "bfloat16")
            yb = T.alloc_local((8,), "bfloat16")
            wb = T.alloc_local((8,), "bfloat16")

            T.pdl_sync()
            T.pdl_trigger()
            if tid < WORKERS:
                load_resident_fn(plan, fn, w, rank, tid)
            for step in T.serial(T.ceildiv(T.ceildiv(tokens, tile) - block // CLUSTER, clusters)):
                t0 = (block // CLUSTER + step * clusters) * tile
                parity = step % 2
                if tid >= WORKERS:
                    if outputs == "collapsed":
                        T.sync_threads(2, THREADS)
                    else:
                        comb_warp(plan, part, own, arrived, scale, base, comb, step, rank, t0, tokens, tid - WORKERS)
                else:
                    load_x(plan, x, xb, rank, t0, tokens, tid)
                    for i in T.unroll(loads):
                        t = (i * WORKERS + tid) // vecs
                        col = (i * WORKERS + tid) % vecs * 8
                        if t < tile:
                            for e in T.vectorized(8):
                                x_tile[t, col + e] = xb[i * 8 + e]
                            if outputs == "all" and t0 + t < tokens:
                                # residual[:, j] = x
                                for j in T.unroll(hc):
                                    for e in T.vectorized(8):
                                        residual[t0 + t, j, rank * cols + col + e] = xb[i * 8 + e]
                    sync_workers()
                    dot_tile_fma(plan, x_tile, fn, w, stage, parity, rank, tid)
                    exchange(plan, plan.width, stage, part, arrived, step, rank, tid)
                    mix(plan, part, sums, pre, factors, scale, base, post, parity, rank, t0, tokens, tid)
                    T.sync_threads(2, THREADS)
                    if outputs == "table":
                        if tid < tile and tid % CLUSTER == rank and t0 + tid < tokens:
                            for e in T.vectorized(2):
                                factor[t0 + tid, e] = factors[tid, e]
                    else:
                        for i in T.serial(loads):
                            t = (i * WORKERS + tid) // vecs
                            col = (i * WORKERS + tid) % vecs * 8
                            if t < tile and t0 + t < tokens:
                                for e in T.vectorized(8):
                                    yb[e] = x_tile[t, col + e]
                                if has_norm:
                                    for e in T.vectorized(8):
                                        wb[e] = weight[rank * cols + col + e]
                                scale_row(has_norm, yb, wb, factors[t, 0], factors[t, 1])
                                for e in T.vectorized(8):
                                    layer_input[t0 + t, rank * cols + col + e] = yb[e]
                    sync_workers()  # the tile and its gates are overwritten next
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


@T.macro
def load_x(plan, x, xb, rank, t0, tokens, tid):
    """xb = this thread's 16-byte pieces of the tile that begins at token t0, zeros past the last token."""
    for i in T.unroll(T.ceildiv(plan.tile * plan.vecs, WORKERS)):
        t = (i * WORKERS + tid) // plan.vecs
        col = (i * WORKERS + tid) % plan.vecs * 8
        if t < plan.tile and t0 + t < tokens:
            for e in T.vectorized(8):
                xb[i * 8 + e] = x[t0 + t, rank * plan.cols + col + e]
        else:
            for e in T.vectorized(8):
                xb[i * 8 + e] = T.cast(0.0, "bfloat16")


@T.macro
def scale_row(has_norm, xb, wb, p, rstd):
    """xb = bf16(P * x), then bf16(that * rstd * weight) if normed: the layer input of 8 columns."""
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
            w[e] = T.cast(wb[e], "float32")
        for e in T.unroll(8):
            y[e] = y[e] * rstd * w[e]
        for e in T.vectorized(8):
            xb[e] = T.cast(y[e], "bfloat16")
