"""The pre on four materialised streams in one launch, alone or behind a post, on the pattern of `fused`.

For hc 4 and H up to 4096 in steps of 256; `streams` does the same for others. A cluster of 16 blocks splits every row,
so that a block's slice of `fn`, cut into bf16 parts, stays in the registers of its 16 warps. A tile's streams lie in
shared memory: the post map replaces them in place, lane by lane, and the same registers feed the tensor cores.
"""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import copy_async, flat, send, shares_before, store_bulk
from mhc.kernels.quad_dot import CLUSTER, STREAMS, THREADS, WARPS, Quad, add_warps, cut_fn, dot_tile, load_fn
from mhc.kernels.quad_finish import BATCH, bounds, finish_tile, own_comb, own_step
from mhc.kernels.split import PARTS, SLOTS, X_SLOTS

O_SLOTS = 2  # tiles of the sub-layer's output, and of the post map's gates: one being used, the next


def quad(config: MHCConfig, tile: int, clusters: int, has_norm: bool, source: str):
    """Streams -> (new streams [T, 4, H], post [T, 4, 1], comb [T, 4, 4],) layer_input [T, H].

    A cluster takes an equal share of the tokens, tile after tile, and exchanges sums as `fused` does, in four slots.

    Args:
        config: shapes and constants; hc is 4, H a multiple of 256 and at most 4096.
        tile: most tokens a cluster works on at a time, 8 or 16.
        clusters: most clusters launched.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        source: `pre` reads streams; `post_pre` makes them from (o, r, post, comb) and writes them.
    """
    hidden, hc = config.hidden_size, config.hc_mult
    plan = Quad(config, tile, source == "post_pre")
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        with T.ClusterKernel(T.min(tokens, clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS) as block:
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            x_tile = T.alloc_shared((X_SLOTS, tile, plan.pitch), "bfloat16")
            x_words = T.view(x_tile, (X_SLOTS, tile, plan.pitch // 2), "uint32")
            o_tile = T.alloc_shared((O_SLOTS, tile if plan.is_post else 1, plan.cols + 16), "bfloat16")
            o_words = T.view(o_tile, (O_SLOTS, tile if plan.is_post else 1, plan.cols // 2 + 8), "uint32")
            map_gates = T.alloc_shared((O_SLOTS, tile if plan.is_post else 1, plan.mixes), "float32")
            partial = T.alloc_shared((plan.warps, plan.token_tiles, plan.sums, 8), "float32")
            gate_part = T.alloc_shared((SLOTS, CLUSTER, tile, plan.gates), "float32")
            mix_stage = T.alloc_shared((SLOTS, CLUSTER, plan.mixes), "float32")
            mix_part = T.alloc_shared((SLOTS, CLUSTER, plan.mixes), "float32")
            softmax = T.alloc_shared((BATCH, STREAMS * STREAMS), "float32")
            arrived = T.alloc_barrier([(CLUSTER - 1) * 2 + 1] * SLOTS)
            w = T.alloc_local((STREAMS * plan.row_tiles * 4,), "float32")
            pairs = T.alloc_local((STREAMS * PARTS * plan.pairs * 4,), "uint32")
            odd = T.alloc_local((STREAMS * 4,), "uint32")
            top = T.alloc_local((STREAMS * 2,), "uint32")
            sums, weights = (gate_part, mix_part, arrived), (scale, base, weight)
            sources, tiles = (o, r, old_post, old_comb), (o_tile, x_tile, map_gates)

            # a peer may send here once every block has initialised its barriers and arrived
            T.cluster_arrive_relaxed()
            T.pdl_sync()
            T.pdl_trigger()
            load_fn(plan, fn, w, rank, tid)  # the longest of the loads
            # kept, or every address would divide anew: the first token and the end
            share = T.alloc_local((2,), "int32")
            for e in T.unroll(2):
                share[e] = shares_before(block // CLUSTER + e, tokens, clusters)
            steps = T.ceildiv(share[1] - share[0], tile)
            for s in T.unroll(2):
                t0, end = bounds(plan, share, s)
                prefetch(plan, sources, tiles, s, s, rank, t0, end, tid)
            cut_fn(plan, w, pairs, odd, top)
            for s in T.serial(steps + 1):
                t0, end = bounds(plan, share, s)
                if s < steps:
                    T.ptx_wait_group(1)
                    sync()
                    dot_tile(
                        plan, (x_words, o_words, map_gates), s % X_SLOTS, s % O_SLOTS, pairs, odd, top, partial,
                        end - t0, tid,
                    )  # fmt: skip
                    sync()
                    add_warps(plan, partial, gate_part, mix_stage, mix_part, s % SLOTS, end - t0, rank, tid)
                    T.fence_proxy_async()  # the engine that copies reads the sums and the new streams
                    sync()
                    if s == 0:
                        T.cluster_wait()
                    send_sums(plan, gate_part, mix_stage, mix_part, arrived, s % SLOTS, end - t0, rank, tid)
                    if plan.is_post:
                        store_streams(plan, x_tile, out, s % X_SLOTS, rank, t0, end, tid)
                if s > 0:
                    last_t0, last_end = bounds(plan, share, s - 1)
                    if tid // 32 == WARPS - 1:
                        own_step(plan, sums, softmax, weights, post, s - 1, rank, last_t0, last_end, tid % 32)
                        if s == steps or s % BATCH == 0:
                            own_comb(plan, softmax, comb, share, s - 1, rank, tid % 32)
                    finish_tile(plan, has_norm, sums, x_tile, weights, layer_input, s - 1, rank, last_t0, last_end, tid)
                if plan.is_post:
                    # the streams of s - 1 have been stored
                    if s < steps:
                        T.tma_store_wait(1)
                    else:
                        T.tma_store_wait(0)
                    T.sync_warp()
                else:
                    sync()  # not needed, but without it a tile of 16 would spill
                # into the slot of s - 1, of which this lane has read what it overwrites
                next_t0, next_end = bounds(plan, share, s + 2)
                prefetch(plan, sources, tiles, (s + 2) % X_SLOTS, s % O_SLOTS, rank, next_t0, next_end, tid)
            T.cluster_arrive_relaxed()
            # a block outlives the copies that read its shared memory, and all have arrived when its peers say so
            T.cluster_wait()

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*dims, dtype="float32"):
        return lambda: T.Tensor(dims, dtype)

    stream_type, row_type = tensor(tokens, hc, hidden, dtype="bfloat16"), tensor(tokens, hidden, dtype="bfloat16")
    post_type, comb_type = tensor(tokens, hc, 1), tensor(tokens, hc, hc)
    fn_type, weight_type = tensor(plan.rows, hc * hidden), tensor(hidden, dtype="bfloat16")
    scale_type, base_type = tensor(3), tensor(plan.rows)

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
            body(None, r, None, None, fn, scale, base, weight, None, *flat(config, tokens, post, comb), layer_input)

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


@T.macro
def sync():
    T.sync_threads(1, THREADS)


@T.macro
def prefetch(plan, sources, tiles, slot, o_slot, rank, t0, end, tid):
    """Start to copy what tokens t0 to end are made of, the block's columns; a warp a token."""
    o, r, old_post, old_comb = sources
    o_tile, x_tile, map_gates = tiles
    t = tid // 32
    lane = tid % 32
    col = lane * 8
    if t0 + t < end:
        at = T.cast(t0 + t, "int64")
        if plan.is_post:
            if lane == 0:
                copy_async(map_gates[o_slot, t, 0], old_post[at, 0], STREAMS)
            elif lane <= STREAMS:
                copy_async(map_gates[o_slot, t, lane * STREAMS], old_comb[at, (lane - 1) * STREAMS], STREAMS)
        if col < plan.cols:
            for j in T.unroll(STREAMS):
                copy_async(x_tile[slot, t, j * plan.cols + col], r[at, j, rank * plan.cols + col], 8)
            if plan.is_post:
                copy_async(o_tile[o_slot, t, col], o[at, rank * plan.cols + col], 8)
    T.ptx_commit_group()


@T.macro
def send_sums(plan, gate_part, mix_stage, mix_part, arrived, slot, count, rank, tid):
    """gate_part[slot, rank] goes to every other block, mix_stage[slot, peer] to mix_part[slot, rank] there."""
    peer = tid // 32
    own, peers = (slot * CLUSTER + rank) * plan.mixes, (slot * CLUSTER + peer) * plan.mixes
    gates = (slot * CLUSTER + rank) * plan.tile * plan.gates
    if tid % 32 == 0 and peer != rank:
        send((gate_part, gate_part), count * plan.gates, gates, gates, arrived[slot], peer)
    if tid % 32 == 1 and peer != rank:
        send((mix_stage, mix_part), plan.mixes, own, peers, arrived[slot], peer)
    if tid == rank * 32:
        T.mbarrier_arrive(arrived[slot])  # the block's own are in place


@T.macro
def store_streams(plan, x_tile, out, slot, rank, t0, end, tid):
    """out = the new streams, by the engine that copies; a warp a token, as they are prefetched, a lane a stream."""
    t = tid // 32
    stream = tid % 32
    if t0 + t < end and stream < STREAMS:
        store_bulk(
            T.access_ptr(out[T.cast(t0 + t, "int64"), stream, rank * plan.cols], "w", extent=plan.cols),
            T.access_ptr(x_tile[slot, t, stream * plan.cols], "r", extent=plan.cols),
            plan.cols * 2,
        )
    T.tma_store_arrive()
