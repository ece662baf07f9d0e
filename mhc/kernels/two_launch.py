"""The broadcast pre in two launches: the baseline that needs no clusters, on fp32 FMAs."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.fma import dot_tile_fma, load_resident_fn
from mhc.kernels.parts import CLUSTER, WORKERS, Plan, add_parts, sigmoid, sync_workers
from mhc.kernels.sinkhorn import sinkhorn


def project_slices(config: MHCConfig, tile: int):
    """x [T, H], fn [M, H] -> part [1, 8, T, M + 1]: dots and sum of squares over each of 8 column slices.

    Args:
        config: shapes and constants.
        tile: tokens a block works on, a power of two up to 8.
    """
    hidden, rows = config.hidden_size, config.mix_rows
    plan = Plan(config, tile, 1, rows)
    tokens = T.dynamic("tokens")

    @T.prim_func
    def project_kernel(
        x: T.Tensor((tokens, hidden), "bfloat16"),
        fn: T.Tensor((rows, hidden), "float32"),
        part: T.Tensor((1, CLUSTER, tokens, plan.sums), "float32"),
    ):
        with T.Kernel(T.ceildiv(tokens, tile), CLUSTER, threads=WORKERS) as (block, rank):
            tid = T.get_thread_binding()
            t0 = block * tile
            x_tile = T.alloc_shared((tile, plan.cols), "bfloat16")
            w = T.alloc_local((plan.registers,), "float32")
            stage = T.alloc_shared((1, tile, plan.sums), "float32")
            for i in T.unroll(T.ceildiv(tile * plan.vecs, WORKERS)):
                t = (i * WORKERS + tid) // plan.vecs
                col = (i * WORKERS + tid) % plan.vecs * 8
                if t < tile and t0 + t < tokens:
                    for e in T.vectorized(8):
                        x_tile[t, col + e] = x[t0 + t, rank * plan.cols + col + e]
            sync_workers()
            load_resident_fn(plan, fn, w, rank, tid)
            dot_tile_fma(plan, x_tile, fn, w, stage, 0, rank, tid)
            for i in T.unroll(T.ceildiv(tile * plan.sums, WORKERS)):
                q = i * WORKERS + tid
                if q < tile * plan.sums and t0 + q // plan.sums < tokens:
                    part[0, rank, t0 + q // plan.sums, q % plan.sums] = stage[0, q // plan.sums, q % plan.sums]

    return project_kernel


def finish(config: MHCConfig, has_norm: bool):
    """x [T, H], part [1, 8, T, M + 1] -> residual [T, hc, H], post [T, hc, 1], comb [T, hc, hc], layer_input [T, H]."""
    hidden, hc, rows = config.hidden_size, config.hc_mult, config.mix_rows
    plan = Plan(config, 1, 1, rows)
    threads = 128
    tokens = T.dynamic("tokens")

    @T.prim_func
    def finish_kernel(
        x: T.Tensor((tokens, hidden), "bfloat16"),
        part: T.Tensor((1, CLUSTER, tokens, plan.sums), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((rows,), "float32"),
        weight: T.Tensor((hidden,), "bfloat16"),
        residual: T.Tensor((tokens, hc, hidden), "bfloat16"),
        post: T.Tensor((tokens, hc, 1), "float32"),
        comb: T.Tensor((tokens, hc, hc), "float32"),
        layer_input: T.Tensor((tokens, hidden), "bfloat16"),
    ):
        with T.Kernel(tokens, threads=threads) as token:
            tid = T.get_thread_binding()
            sums = T.alloc_shared((1, plan.sums), "float32")
            xb = T.alloc_local((8,), "bfloat16")
            wb = T.alloc_local((8,), "bfloat16")
            c = T.alloc_local((hc * hc,), "float32")
            p = T.alloc_local((1,), "float32")
            if tid < 32:
                add_parts(plan, part, sums, 0, 0, token, tid)
            T.sync_threads()
            # m *= rsqrt(mean(x^2) + rms_eps)
            mean = sums[0, rows] / hidden
            rstd = T.rsqrt(mean + config.rms_eps)
            if tid < hc:
                # post = post_mult * sigmoid(m * scale[1] + base)
                z = sums[0, hc + tid] * rstd * scale[1] + base[hc + tid]
                post[token, tid, 0] = config.post_mult * sigmoid(z)
            if tid == 0:
                # comb = sinkhorn(m * scale[2] + base)
                for q in T.unroll(hc * hc):
                    c[q] = sums[0, 2 * hc + q] * rstd * scale[2] + base[2 * hc + q]
                sinkhorn(plan, c)
                for q in T.unroll(hc * hc):
                    comb[token, q // hc, q % hc] = c[q]
            # P = sum_j sigmoid(m * scale[0] + base) + pre_eps;  mean((P * x)^2) = P^2 * mean(x^2)
            p[0] = 0.0
            for j in T.unroll(hc):
                p[0] += sigmoid(sums[0, j] * rstd * scale[0] + base[j]) + config.pre_eps
            norm = T.rsqrt(p[0] * p[0] * mean + config.norm_eps)
            for i in T.serial(T.ceildiv(hidden, threads * 8)):
                col = (i * threads + tid) * 8
                if col < hidden:
                    for e in T.vectorized(8):
                        xb[e] = x[token, col + e]
                    for j in T.unroll(hc):
                        for e in T.vectorized(8):
                            residual[token, j, col + e] = xb[e]
                    # layer_input = bf16(P * x) * rsqrt(...) * weight
                    for e in T.unroll(8):
                        xb[e] = T.cast(p[0] * T.cast(xb[e], "float32"), "bfloat16")
                    if has_norm:
                        for e in T.vectorized(8):
                            wb[e] = weight[col + e]
                        for e in T.unroll(8):
                            xb[e] = T.cast(T.cast(xb[e], "float32") * norm * T.cast(wb[e], "float32"), "bfloat16")
                    for e in T.vectorized(8):
                        layer_input[token, col + e] = xb[e]

    return finish_kernel
