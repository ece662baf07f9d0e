"""The broadcast pre in one launch: `reference.pre_broadcast`, whole, collapsed, or as rows of a token table."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import CLUSTER, THREADS, Plan, mix, project, write_comb


def fused(config: MHCConfig, tile: int, clusters: int, has_norm: bool, outputs: str = "all"):
    """x [T, H] -> the outputs of the first pre.

    Args:
        config: shapes and constants.
        tile: tokens a cluster works on at a time.
        clusters: most clusters launched; they stride over the tiles.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        outputs: `all` is residual [T, hc, H], post [T, hc], comb [T, hc * hc], layer_input [T, H]; `collapsed` is post
            and layer_input, from the 2 hc rows of `fn` that they need; `table` is post, comb and factor [T, 2], the
            layer input's `P` and `rsqrt(P^2 mean(x^2) + norm_eps)`.
    """
    hidden, hc = config.hidden_size, config.hc_mult
    rows = 2 * hc if outputs == "collapsed" else config.mix_rows
    plan = Plan(config, tile, 1, rows, clusters)
    cols, vecs = plan.cols, plan.vecs
    tokens = T.dynamic("tokens")

    @T.macro
    def body(x, fn, scale, base, weight, residual, post, comb, layer_input, factor):
        with T.ClusterKernel(
            T.min(T.ceildiv(tokens, tile), clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS
        ) as block:
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            x_tile = T.alloc_shared((tile, cols), "bfloat16")
            part = T.alloc_shared((2, CLUSTER, tile, plan.sums), "float32")
            sums = T.alloc_shared((tile, plan.sums), "float32")
            pre = T.alloc_shared((tile, hc), "float32")
            mean = T.alloc_shared((tile,), "float32")
            xb = T.alloc_local((8,), "bfloat16")
            wb = T.alloc_local((8,), "bfloat16")
            p = T.alloc_local((1,), "float32")

            T.pdl_sync()
            T.pdl_trigger()
            T.cluster_arrive()
            T.cluster_wait()  # every block runs before any writes into another's shared memory
            for step in T.serial(T.ceildiv(T.ceildiv(tokens, tile) - block // CLUSTER, clusters)):
                t0 = (block // CLUSTER + step * clusters) * tile
                parity = step % 2
                for i in T.serial(T.ceildiv(tile * vecs, THREADS)):
                    t = (i * THREADS + tid) // vecs
                    col = (i * THREADS + tid) % vecs * 8
                    if t < tile and t0 + t < tokens:
                        for e in T.vectorized(8):
                            xb[e] = x[t0 + t, rank * cols + col + e]
                        for e in T.vectorized(8):
                            x_tile[t, col + e] = xb[e]
                        if outputs == "all":
                            # residual[:, j] = x
                            for j in T.unroll(hc):
                                for e in T.vectorized(8):
                                    residual[t0 + t, j, rank * cols + col + e] = xb[e]
                T.sync_threads()
                project(plan, x_tile, fn, part, parity, rank, tid)
                T.cluster_arrive()
                T.cluster_wait()
                mix(plan, part, sums, pre, mean, scale, base, post, parity, rank, t0, tokens, tid)
                T.sync_threads()
                if tid < 32:
                    if outputs != "collapsed":
                        write_comb(plan, sums, mean, scale, base, comb, rank, t0, tokens, tid)
                elif outputs == "table":
                    if tid - 32 < tile and (tid - 32) % CLUSTER == rank and t0 + tid - 32 < tokens:
                        p[0] = 0.0
                        for j in T.unroll(hc):
                            p[0] += pre[tid - 32, j]
                        factor[t0 + tid - 32, 0] = p[0]
                        factor[t0 + tid - 32, 1] = T.rsqrt(p[0] * p[0] * mean[tid - 32] + config.norm_eps)
                else:
                    for i in T.serial(T.ceildiv(tile * vecs, THREADS - 32)):
                        t = (i * (THREADS - 32) + tid - 32) // vecs
                        col = (i * (THREADS - 32) + tid - 32) % vecs * 8
                        if t < tile and t0 + t < tokens:
                            # P = sum_j pre_j;  mean((P * x)^2) = P^2 * mean(x^2)
                            p[0] = 0.0
                            for j in T.unroll(hc):
                                p[0] += pre[t, j]
                            rstd = T.rsqrt(p[0] * p[0] * mean[t] + config.norm_eps)
                            for e in T.vectorized(8):
                                xb[e] = x_tile[t, col + e]
                            if has_norm:
                                for e in T.vectorized(8):
                                    wb[e] = weight[rank * cols + col + e]
                            scale_row(has_norm, xb, wb, p[0], rstd)
                            for e in T.vectorized(8):
                                layer_input[t0 + t, rank * cols + col + e] = xb[e]
                T.sync_threads()  # the tile is overwritten next

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*shape, dtype="float32"):
        return lambda: T.Tensor(shape, dtype)

    row_type, weight_type = tensor(tokens, hidden, dtype="bfloat16"), tensor(hidden, dtype="bfloat16")
    fn_type, scale_type, base_type = tensor(rows, hidden), tensor(3), tensor(rows)
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
def scale_row(has_norm, xb, wb, p, rstd):
    """xb = bf16(P * x), then bf16(that * rstd * weight) if normed: the layer input of 8 columns."""
    for e in T.unroll(8):
        xb[e] = T.cast(p * T.cast(xb[e], "float32"), "bfloat16")
    if has_norm:
        for e in T.unroll(8):
            xb[e] = T.cast(T.cast(xb[e], "float32") * rstd * T.cast(wb[e], "float32"), "bfloat16")
