"""The pre on materialised streams in one launch, alone or behind a post: `pre`, `post_pre`, the head.

For the sizes that `quad` is not made for, and the head of all sizes. One body, three ways to fill the tile: streams as
they are, `post` of the finished sub-layer, or `post` of the first sub-layer, whose streams are all one embedding
(`collapsed`). The new streams stay in shared memory between the projection and the collapse; the norm needs `sum(y^2)`
over the whole row, a second exchange that hides behind Sinkhorn.
"""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.fill import load_post, load_streams, prefetch_post
from mhc.kernels.parts import (
    ARRIVALS,
    CLUSTER,
    THREADS,
    WARPS,
    WORKERS,
    Plan,
    comb_warp,
    exchange,
    mix,
    sync_workers,
)
from mhc.kernels.signatures import of_streams
from mhc.kernels.tensor import dot_tile_tensor


@T.macro
def collapse_tile(plan, tile_smem, pre, own_square, parity, tid):
    """Stream 0's place in the tile = bf16(sum_j pre_j * r_j), own_square = this block's `sum(y^2)`."""
    lane = tid % 32
    rb = T.alloc_local((8,), "bfloat16")
    y = T.alloc_local((8,), "float32")
    rf = T.alloc_local((8,), "float32")
    total = T.alloc_local((1,), "float32")
    for i in T.serial(T.ceildiv(plan.tile, WARPS)):
        t = i * WARPS + tid // 32
        if t < plan.tile:
            total[0] = 0.0
            for v in T.serial(T.ceildiv(plan.vecs, 32)):
                col = (v * 32 + lane) * 8
                if col < plan.cols:
                    for e in T.unroll(8):
                        y[e] = 0.0
                    for j in T.unroll(plan.streams):
                        for e in T.vectorized(8):
                            rb[e] = tile_smem[t, j * plan.cols + col + e]
                        for e in T.vectorized(8):
                            rf[e] = T.cast(rb[e], "float32")
                        for e in T.unroll(8):
                            y[e] += pre[t, j] * rf[e]
                    for e in T.vectorized(8):
                        rb[e] = T.cast(y[e], "bfloat16")
                    for e in T.vectorized(8):
                        rf[e] = T.cast(rb[e], "float32")
                    for e in T.unroll(8):
                        total[0] += rf[e] * rf[e]
                    for e in T.vectorized(8):
                        tile_smem[t, col + e] = rb[e]
            total[0] = T.warp_reduce_sum(total[0])
            if lane == 0:
                own_square[parity, t, 0] = total[0]
    T.fence_proxy_async()
    sync_workers()


@T.macro
def write_layer_input(plan, has_norm, tile_smem, square, weight, layer_input, parity, rank, t0, tokens, tid):
    """layer_input = y * rsqrt(mean(y^2) + norm_eps) * weight."""
    lane = tid % 32
    yb = T.alloc_local((8,), "bfloat16")
    wb = T.alloc_local((8,), "bfloat16")
    y = T.alloc_local((8,), "float32")
    w = T.alloc_local((8,), "float32")
    total = T.alloc_local((1,), "float32")
    for i in T.serial(T.ceildiv(plan.tile, WARPS)):
        t = i * WARPS + tid // 32
        if t < plan.tile and t0 + t < tokens:
            if has_norm:
                total[0] = 0.0
                for b in T.unroll(CLUSTER):
                    total[0] += square[parity, b, t, 0]
                total[0] = T.rsqrt(total[0] / plan.config.hidden_size + plan.config.norm_eps)
            for v in T.serial(T.ceildiv(plan.vecs, 32)):
                col = (v * 32 + lane) * 8
                if col < plan.cols:
                    for e in T.vectorized(8):
                        yb[e] = tile_smem[t, col + e]
                    if has_norm:
                        for e in T.vectorized(8):
                            wb[e] = weight[rank * plan.cols + col + e]
                        for e in T.vectorized(8):
                            y[e] = T.cast(yb[e], "float32")
                        for e in T.vectorized(8):
                            w[e] = T.cast(wb[e], "float32")
                        for e in T.unroll(8):
                            y[e] = y[e] * total[0] * w[e]
                        for e in T.vectorized(8):
                            yb[e] = T.cast(y[e], "bfloat16")
                    for e in T.vectorized(8):
                        layer_input[t0 + t, rank * plan.cols + col + e] = yb[e]


def streams(config: MHCConfig, tile: int, clusters: int, has_norm: bool, source: str):
    """Streams -> (new streams, post [T, hc, 1], comb [T, hc, hc],) layer_input [T, H].

    Args:
        config: shapes and constants.
        tile: tokens a cluster works on at a time.
        clusters: most clusters launched.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        source: `pre` reads streams; `post_pre` makes them from (o, r, post, comb) and writes them; `post_pre_collapsed`
            makes them from (o, x, post); `head` reads streams and returns only the un-normed collapse.
    """
    hidden, hc = config.hidden_size, config.hc_mult
    rows = hc if source == "head" else config.mix_rows
    is_post = source.startswith("post_pre")
    collapsed = source == "post_pre_collapsed"
    sources = 1 if collapsed else hc
    plan = Plan(config, tile, hc, rows)
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        with T.ClusterKernel(
            T.min(T.ceildiv(tokens, tile), clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS
        ) as block:
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            # 16 columns of padding put the 8 rows of a tensor core fragment into different banks
            r_tile = T.alloc_shared((tile, hc * plan.cols + 16), "bfloat16")
            raw = T.alloc_shared((tile, 1 + sources, plan.cols) if is_post else (1, 1, 8), "bfloat16")
            coefficients = T.alloc_shared((tile, hc + hc * hc), "float32")
            partial = T.alloc_shared((WARPS, tile, rows), "float32")
            stage = T.alloc_shared((2, tile, plan.width), "float32")
            part = T.alloc_shared((2, CLUSTER, tile, plan.width), "float32")
            own_square = T.alloc_shared((2, tile, 4), "float32")
            square = T.alloc_shared((2, CLUSTER, tile, 4), "float32")
            arrived = T.alloc_cluster_barrier([ARRIVALS, ARRIVALS])
            squared = T.alloc_cluster_barrier([ARRIVALS, ARRIVALS])
            sums = T.alloc_shared((tile, plan.sums), "float32")
            own = T.alloc_shared((-(-tile // CLUSTER), plan.sums), "float32")
            pre = T.alloc_shared((tile, hc), "float32")

            T.pdl_sync()
            T.pdl_trigger()
            if is_post and tid < WORKERS:
                prefetch_post(
                    plan,
                    sources,
                    o,
                    r,
                    old_post,
                    old_comb,
                    raw,
                    coefficients,
                    rank,
                    block // CLUSTER * tile,
                    tokens,
                    tid,
                )
            for step in T.serial(T.ceildiv(T.ceildiv(tokens, tile) - block // CLUSTER, clusters)):
                t0 = (block // CLUSTER + step * clusters) * tile
                parity = step % 2
                if tid >= WORKERS:
                    if source == "head":
                        T.sync_threads(2, THREADS)
                    else:
                        comb_warp(plan, part, own, arrived, scale, base, comb, step, rank, t0, tokens, tid - WORKERS)
                else:
                    if is_post:
                        T.ptx_wait_group(0)
                        sync_workers()
                        load_post(plan, collapsed, raw, coefficients, out, r_tile, rank, t0, tokens, tid)
                        sync_workers()
                        prefetch_post(
                            plan,
                            sources,
                            o,
                            r,
                            old_post,
                            old_comb,
                            raw,
                            coefficients,
                            rank,
                            t0 + clusters * tile,
                            tokens,
                            tid,
                        )
                    else:
                        load_streams(plan, r, r_tile, rank, t0, tokens, tid)
                        sync_workers()
                    dot_tile_tensor(plan, r_tile, fn, partial, stage, parity, rank, tid)
                    exchange(plan, plan.width, stage, part, arrived, step, rank, tid)
                    mix(plan, part, sums, pre, scale, base, post, parity, rank, t0, tokens, tid)
                    T.sync_threads(2, THREADS)
                    collapse_tile(plan, r_tile, pre, own_square, parity, tid)
                    if has_norm:
                        exchange(plan, 4, own_square, square, squared, step, rank, tid)
                    write_layer_input(
                        plan, has_norm, r_tile, square, weight, layer_input, parity, rank, t0, tokens, tid
                    )
                    sync_workers()  # the tile and its gates are overwritten next
            # a block outlives the copies that read its shared memory
            T.cluster_arrive_relaxed()
            T.cluster_wait()

    @T.macro
    def collapsed_body(o, x, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        body(
            o,
            T.reshape(x, (tokens, 1, hidden)),
            old_post,
            old_comb,
            fn,
            scale,
            base,
            weight,
            out,
            post,
            comb,
            layer_input,
        )

    if source != "head":
        return of_streams(config, tokens, source, collapsed_body if collapsed else body)

    @T.prim_func
    def head_kernel(
        r: T.Tensor((tokens, hc, hidden), "bfloat16"),
        fn: T.Tensor((hc, hc * hidden), "float32"),
        scale: T.Tensor((1,), "float32"),
        base: T.Tensor((hc,), "float32"),
        layer_input: T.Tensor((tokens, hidden), "bfloat16"),
    ):
        body(None, r, None, None, fn, scale, base, None, None, None, None, layer_input)

    return head_kernel
