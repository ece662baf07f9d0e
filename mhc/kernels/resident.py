"""The pre on materialised streams in one launch, alone or behind a post, with `fn` resident in shared memory.

For H up to 4096 and hc up to 4; `streams` does the same for others. A block copies its slice of `fn` into shared
memory once. The streams live in the registers of the lanes that feed them to the tensor cores: a lane holds 8 adjacent
columns of one token in every stream, so the post map before and the collapse behind need no other lane.

Exchanges between the blocks of a cluster are off the chain. A step projects tile s, then collapses tile s - 1, whose
sums have arrived since, and writes tile s - 2, whose norm has. The streams are read again for the collapse, from the L2
cache: the registers are not many enough for two tiles. The last warp also computes post and comb, comb of many steps at
once: it takes as long for 32 tokens as for one.

The stages: `resident_post` fills the registers, `resident_dot` projects and sends, `resident_finish` does what follows
from the sums; `resident_parts` holds what they share.
"""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels import remote
from mhc.kernels.parts import CLUSTER, flat, shares_before
from mhc.kernels.resident_dot import add_own, dot, hand_over, send_sums
from mhc.kernels.resident_finish import collapse, own_comb, own_mixes, pre_gates, send_squares, write
from mhc.kernels.resident_parts import BATCH, PRELUDE, SLOTS, THREADS, TILE, WARPS, Shape, sync
from mhc.kernels.resident_post import fetch_fn, load, load_gates, load_row, post_map, prefetch

LEAST_TOKENS = 4  # of a cluster: fewer would have more clusters fetch `fn`, and gain little


def resident(config: MHCConfig, clusters: int, has_norm: bool, source: str):
    """Streams -> (new streams, post [T, hc, 1], comb [T, hc, hc],) layer_input [T, H].

    A block sends the sums of step s after it has read those of s - 1, so two buffers suffice: its peers have then read
    those of s - 2. The squares of s - 2 are read before the sums of s are sent, so two suffice for them too.

    Args:
        config: shapes and constants; H at most 4096, hc at most 4.
        clusters: most clusters launched; they share the tokens equally, tile after tile.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        source: `pre` reads streams; `post_pre` makes them from (o, r, post, comb) and writes them.
    """
    hidden, hc = config.hidden_size, config.hc_mult
    shape = Shape(config, source)
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        with T.ClusterKernel(
            T.min(T.ceildiv(tokens, LEAST_TOKENS), clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS
        ) as block:
            T.import_source(remote.PRELUDE + PRELUDE)
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            # 4 floats of padding put the 8 rows of a tensor core fragment into different banks
            fn_smem = T.alloc_shared((hc, shape.rows, shape.cols + 4), "float32")
            partial = T.alloc_shared((SLOTS, shape.row_tiles * 8, TILE), "float32")
            at_all = T.alloc_shared((2 * CLUSTER * shape.common * TILE,), "float32")
            at_owner = T.alloc_shared((2 * CLUSTER * shape.mixes_sent,), "float32")
            logits = T.alloc_shared((BATCH, hc * hc), "float32")
            gates = T.alloc_shared((2, TILE, max(shape.gates, 4)), "float32")
            pre = T.alloc_shared((TILE, hc), "float32")
            row_square = T.alloc_shared((WARPS, TILE), "float32")
            y_square = T.alloc_shared((WARPS, TILE), "float32")
            square = T.alloc_shared((2 * CLUSTER * TILE,), "float32")
            arrived = T.alloc_barrier([shape.senders, shape.senders])
            squared = T.alloc_barrier([1, 1])
            taken = T.alloc_barrier([WARPS])
            x = T.alloc_local((hc * 4,), "uint32")
            ob = T.alloc_local((4,), "uint32")
            y = T.alloc_local((4,), "uint32")
            total = T.alloc_local((shape.row_tiles * 2,), "float32")
            row_total = T.alloc_local((1,), "float32")

            # a peer may send here once every block has initialised its barriers and arrived
            T.cluster_arrive_relaxed()
            T.pdl_sync()
            T.pdl_trigger()
            # kept, or every address would divide anew
            own_tokens = T.alloc_local((2,), "int32")
            launched = T.min(T.ceildiv(tokens, LEAST_TOKENS), clusters)
            own_tokens[0] = shares_before(block // CLUSTER, tokens, launched)
            own_tokens[1] = shares_before(block // CLUSTER + 1, tokens, launched)
            begin, end = own_tokens[0], own_tokens[1]
            steps = T.ceildiv(end - begin, TILE)
            if shape.is_post:
                load_gates(shape, old_post, old_comb, gates, 0, begin, end, tid)
                load_row(shape, o, ob, rank, begin, end, tid)
            load(shape, hc, r, x, rank, begin, end, tid)
            sync()  # or the compiler puts off the loads
            fetch_fn(shape, fn, fn_smem, rank, tid)
            if shape.is_post:
                T.ptx_wait_group(hc)
                sync()
            for s in T.serial(steps + 2):
                t0 = begin + s * TILE
                if s < steps:
                    if s + 1 < steps:
                        prefetch(shape, o, r, rank, t0 + TILE, end, tid)
                        if shape.is_post:
                            load_gates(shape, old_post, old_comb, gates, (s + 1) % 2, t0 + TILE, end, tid)
                    if shape.is_post:
                        post_map(shape, x, ob, gates, out, s % 2, rank, t0, end, tid)
                    dot(shape, x, fn_smem, total, row_total, tid)
                    if s > 0:
                        T.mbarrier_wait_parity(taken[0], (s - 1) % 2)
                    hand_over(shape, total, row_total, partial, row_square, tid)
                if s > 0 and s <= steps:
                    # this lane's own stores, or what it read before
                    load(shape, hc, out if shape.is_post else r, x, rank, t0 - TILE, end, tid)
                    pre_gates(shape, at_all, pre, arrived, scale, base, s - 1, tid)
                if s <= steps:
                    sync()
                if s > 1:
                    write(
                        shape, has_norm, y, square, squared, weight, layer_input, s - 2, rank, t0 - 2 * TILE, end, tid
                    )
                if s > 0 and s <= steps:
                    collapse(shape, has_norm, x, y, pre, y_square, tid)
                    if tid // 32 == WARPS - 1:
                        own_mixes(
                            shape, at_all, at_owner, logits, arrived, scale, base, post, s - 1, rank, t0 - TILE, end,
                            tid % 32,
                        )  # fmt: skip
                if s < steps:
                    add_own(shape, total, partial, tid)
                    if s + 1 < steps:
                        if shape.is_post:
                            load_row(shape, o, ob, rank, t0 + TILE, end, tid)
                        load(shape, hc, r, x, rank, t0 + TILE, end, tid)
                # the sums of s - 1 may be overwritten once those of s have been sent
                if s <= steps:
                    sync()
                if s < steps:
                    if s == 0:
                        T.cluster_wait()
                    send_sums(shape, partial, row_square, at_all, at_owner, arrived, s % 2, rank, tid)
                    T.sync_warp()
                    if tid % 32 == 0:
                        T.mbarrier_arrive(taken[0])
                if s > 0 and s <= steps:
                    if has_norm:
                        send_squares(y_square, square, squared, (s - 1) % 2, rank, tid)
                    if tid // 32 == WARPS - 1 and (s == steps or s % BATCH == 0):
                        own_comb(shape, logits, comb, s - 1, rank, begin, end, tid % 32)
            # every block has waited for all that was sent to it, so none has to outlive the others

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*dims, dtype="float32"):
        return lambda: T.Tensor(dims, dtype)

    stream_type, row_type = tensor(tokens, hc, hidden, dtype="bfloat16"), tensor(tokens, hidden, dtype="bfloat16")
    post_type, comb_type = tensor(tokens, hc, 1), tensor(tokens, hc, hc)
    fn_type, weight_type = tensor(shape.rows, hc * hidden), tensor(hidden, dtype="bfloat16")
    scale_type, base_type = tensor(3), tensor(shape.rows)

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
            body(r, r, base, base, fn, scale, base, weight, r, *flat(config, tokens, post, comb), layer_input)

        return pre_kernel

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
        body(
            o,
            r,
            *flat(config, tokens, old_post, old_comb),
            fn,
            scale,
            base,
            weight,
            out,
            *flat(config, tokens, post, comb),
            layer_input,
        )

    return post_pre_kernel
