"""The pre on materialised streams in one launch, alone or behind a post: `pre`, `post_pre`, the head.

One body, three ways to fill the tile: streams as they are, `post` of the finished sub-layer, or `post` of the first
sub-layer whose streams are all one embedding (`collapsed`). The new streams stay in shared memory between the
projection and the collapse; the norm needs `sum(y^2)` over the whole row, a second exchange that hides behind Sinkhorn.
"""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import CLUSTER, THREADS, WARPS, Plan, mix, project, remote_store, write_comb


@T.macro
def load_streams(plan, r, tile_smem, rank, t0, tokens, tid):
    """tile[t, j * S + c] = r[t, j, rank * S + c]."""
    for i in T.serial(T.ceildiv(plan.tile * plan.vecs, THREADS)):
        t = (i * THREADS + tid) // plan.vecs
        col = (i * THREADS + tid) % plan.vecs * 8
        if t < plan.tile and t0 + t < tokens:
            for j in T.unroll(plan.streams):
                for e in T.vectorized(8):
                    tile_smem[t, j * plan.cols + col + e] = r[t0 + t, j, rank * plan.cols + col + e]


@T.macro
def load_post(plan, collapsed, o, r, post, comb, out, tile_smem, rank, t0, tokens, tid):
    """tile and `out` = bf16(post_k * o + sum_j comb[j, k] * r[j]); `collapsed`: bf16(post_k * o + x), r being x [T, 1, H]."""
    hc = plan.streams
    ob = T.alloc_local((8,), "bfloat16")
    rb = T.alloc_local(((1 if collapsed else hc) * 8,), "bfloat16")
    p = T.alloc_local((hc,), "float32")
    c = T.alloc_local((hc * hc,), "float32")
    for i in T.serial(T.ceildiv(plan.tile * plan.vecs, THREADS)):
        t = (i * THREADS + tid) // plan.vecs
        col = (i * THREADS + tid) % plan.vecs * 8
        if t < plan.tile and t0 + t < tokens:
            for e in T.vectorized(8):
                ob[e] = o[t0 + t, rank * plan.cols + col + e]
            for j in T.unroll(1 if collapsed else hc):
                for e in T.vectorized(8):
                    rb[j * 8 + e] = r[t0 + t, j, rank * plan.cols + col + e]
            for j in T.unroll(hc):
                p[j] = post[t0 + t, j]
            if not collapsed:
                for q in T.unroll(hc * hc):
                    c[q] = comb[t0 + t, q]
            for k in T.unroll(hc):
                kb = T.alloc_local((8,), "bfloat16")
                for e in T.unroll(8):
                    value = T.alloc_var("float32")
                    value = p[k] * T.cast(ob[e], "float32")
                    if collapsed:
                        value = value + T.cast(rb[e], "float32")
                    else:
                        for j in T.unroll(hc):
                            value = value + c[j * hc + k] * T.cast(rb[j * 8 + e], "float32")
                    kb[e] = T.cast(value, "bfloat16")
                for e in T.vectorized(8):
                    out[t0 + t, k, rank * plan.cols + col + e] = kb[e]
                for e in T.vectorized(8):
                    tile_smem[t, k * plan.cols + col + e] = kb[e]


@T.macro
def collapse_tile(plan, tile_smem, pre, square, parity, rank, tid):
    """Stream 0's place in the tile = bf16(sum_j pre_j * r_j), and this block's `sum(y^2)` to every block. Warps 1 to 7."""
    lane = tid % 32
    rb = T.alloc_local((8,), "bfloat16")
    y = T.alloc_local((8,), "float32")
    total = T.alloc_local((1,), "float32")
    for i in T.serial(T.ceildiv(plan.tile, WARPS - 1)):
        t = i * (WARPS - 1) + tid // 32 - 1
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
                        for e in T.unroll(8):
                            y[e] += pre[t, j] * T.cast(rb[e], "float32")
                    for e in T.unroll(8):
                        rb[e] = T.cast(y[e], "bfloat16")
                        total[0] += T.cast(rb[e], "float32") * T.cast(rb[e], "float32")
                    for e in T.vectorized(8):
                        tile_smem[t, col + e] = rb[e]
            total[0] = T.warp_reduce_sum(total[0])
            if lane < CLUSTER:
                remote_store(square, (parity * CLUSTER + rank) * plan.tile + t, total[0], lane)


@T.macro
def write_layer_input(plan, has_norm, tile_smem, square, weight, layer_input, parity, rank, t0, tokens, tid):
    """layer_input = y * rsqrt(mean(y^2) + norm_eps) * weight. Warps 1 to 7."""
    lane = tid % 32
    yb = T.alloc_local((8,), "bfloat16")
    wb = T.alloc_local((8,), "bfloat16")
    total = T.alloc_local((1,), "float32")
    for i in T.serial(T.ceildiv(plan.tile, WARPS - 1)):
        t = i * (WARPS - 1) + tid // 32 - 1
        if t < plan.tile and t0 + t < tokens:
            if has_norm:
                total[0] = 0.0
                for b in T.unroll(CLUSTER):
                    total[0] += square[parity, b, t]
                total[0] = T.rsqrt(total[0] / plan.config.hidden_size + plan.config.norm_eps)
            for v in T.serial(T.ceildiv(plan.vecs, 32)):
                col = (v * 32 + lane) * 8
                if col < plan.cols:
                    for e in T.vectorized(8):
                        yb[e] = tile_smem[t, col + e]
                    if has_norm:
                        for e in T.vectorized(8):
                            wb[e] = weight[rank * plan.cols + col + e]
                        for e in T.unroll(8):
                            yb[e] = T.cast(T.cast(yb[e], "float32") * total[0] * T.cast(wb[e], "float32"), "bfloat16")
                    for e in T.vectorized(8):
                        layer_input[t0 + t, rank * plan.cols + col + e] = yb[e]


def streams(config: MHCConfig, tile: int, clusters: int, has_norm: bool, source: str):
    """Streams -> (new streams, post [T, hc], comb [T, hc * hc],) layer_input [T, H].

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
    plan = Plan(config, tile, hc, rows, clusters)
    scales = 1 if source == "head" else 3
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        with T.ClusterKernel(
            T.min(T.ceildiv(tokens, tile), clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS
        ) as block:
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            r_tile = T.alloc_shared((tile, hc * plan.cols), "bfloat16")
            part = T.alloc_shared((2, CLUSTER * plan.col_groups, tile, plan.sums), "float32")
            square = T.alloc_shared((2, CLUSTER, tile), "float32")
            sums = T.alloc_shared((tile, plan.sums), "float32")
            pre = T.alloc_shared((tile, hc), "float32")
            mean = T.alloc_shared((tile,), "float32")

            T.pdl_sync()
            T.pdl_trigger()
            T.cluster_arrive()
            T.cluster_wait()  # every block runs before any writes into another's shared memory
            for step in T.serial(T.ceildiv(T.ceildiv(tokens, tile) - block // CLUSTER, clusters)):
                t0 = (block // CLUSTER + step * clusters) * tile
                parity = step % 2
                if is_post:
                    load_post(plan, collapsed, o, r, old_post, old_comb, out, r_tile, rank, t0, tokens, tid)
                else:
                    load_streams(plan, r, r_tile, rank, t0, tokens, tid)
                T.sync_threads()
                project(plan, r_tile, fn, part, parity, rank, tid)
                T.cluster_arrive()
                T.cluster_wait()
                mix(plan, part, sums, pre, mean, scale, base, post, parity, rank, t0, tokens, tid)
                T.sync_threads()
                if tid < 32:
                    T.cluster_arrive()
                    if source != "head":
                        write_comb(plan, sums, mean, scale, base, comb, rank, t0, tokens, tid)
                    T.cluster_wait()
                else:
                    collapse_tile(plan, r_tile, pre, square, parity, rank, tid)
                    T.cluster_arrive()
                    T.cluster_wait()
                    write_layer_input(
                        plan, has_norm, r_tile, square, weight, layer_input, parity, rank, t0, tokens, tid
                    )
                T.sync_threads()  # the tile is overwritten next

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*shape, dtype="float32"):
        return lambda: T.Tensor(shape, dtype)

    stream_type, row_type = tensor(tokens, hc, hidden, dtype="bfloat16"), tensor(tokens, hidden, dtype="bfloat16")
    post_type, comb_type = tensor(tokens, hc), tensor(tokens, hc * hc)
    fn_type, weight_type = tensor(rows, hc * hidden), tensor(hidden, dtype="bfloat16")
    scale_type, base_type = tensor(scales), tensor(rows)

    if source == "head":

        @T.prim_func
        def head_kernel(r: stream_type(), fn: fn_type(), scale: scale_type(), base: base_type(), layer_input: row_type()):
            body(r, r, base, base, fn, scale, base, r, r, base, base, layer_input)

        return head_kernel
    if source == "pre":

        @T.prim_func
        def pre_kernel(
            r: stream_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            weight: weight_type(),
            post: post_type(),
            comb: comb_type(),
            layer_input: row_type(),
        ):
            body(r, r, base, base, fn, scale, base, weight, r, post, comb, layer_input)

        return pre_kernel

    if collapsed:

        @T.prim_func
        def post_pre_collapsed_kernel(
            o: row_type(),
            x: T.Tensor((tokens, 1, hidden), "bfloat16"),
            old_post: post_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            weight: weight_type(),
            out: stream_type(),
            post: post_type(),
            comb: comb_type(),
            layer_input: row_type(),
        ):
            body(o, x, old_post, base, fn, scale, base, weight, out, post, comb, layer_input)

        return post_pre_collapsed_kernel

    @T.prim_func
    def post_pre_kernel(
        o: row_type(),
        r: stream_type(),
        old_post: post_type(),
        old_comb: comb_type(),
        fn: fn_type(),
        scale: scale_type(),
        base: base_type(),
        weight: weight_type(),
        out: stream_type(),
        post: post_type(),
        comb: comb_type(),
        layer_input: row_type(),
    ):
        body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input)

    return post_pre_kernel
