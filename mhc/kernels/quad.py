"""The pre on four streams in one launch, alone or behind a post.

For hc 4 and H up to 4096 in steps of 256; `streams` does the same for others. A cluster of 16 blocks splits every row,
so that a block's slice of `fn`, cut into bf16 parts, stays in the registers of its 16 workers: warps that make a tile's
new streams, project them, send the sums and collapse them. Four helpers have what registers are left: warps that load
the tiles and make gates of the sums of all blocks. A tile's streams lie in shared memory, new ones in place of the old.
"""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import shares_before
from mhc.kernels.quad_dot import CLUSTER, STREAMS, TILE, WORKERS, Quad, cut_fn, dot_tile, load_fn, map_tile
from mhc.kernels.quad_finish import (
    BATCH,
    HELPERS,
    THREADS,
    collapse_tile,
    gate_tile,
    helper,
    own_comb,
    own_step,
    prefetch,
)
from mhc.kernels.quad_sums import GATE_PITCH, send_sums
from mhc.kernels.remote import PRELUDE
from mhc.kernels.signatures import of_streams
from mhc.kernels.split import PARTS, SLOTS


def quad(config: MHCConfig, clusters: int, has_norm: bool, source: str):
    """Streams -> (new streams [T, 4, H], post [T, 4, 1], comb [T, 4, 4],) layer_input [T, H].

    A cluster takes an equal share of the tokens, in tiles of 8. Workers project a tile, make the next one's streams
    while they wait for each other, send the sums of the first and collapse the tile before, whose gates helpers have
    made. Four slots suffice: of sums, since a peer that sends step s + 4 has collapsed s + 2, for which it needed sums
    that this block's workers sent after they had collapsed s, and so after helpers had read the sums of s.

    Args:
        config: shapes and constants; hc is 4, H a multiple of 256 and at most 4096.
        clusters: most clusters launched.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        source: `pre` reads streams; `post_pre` makes them from (o, r, post, comb) and writes them; `post_pre_collapsed`
            makes them from (o, x, post).
    """
    plan = Quad(config, source)
    mapped = TILE if plan.is_post else 1
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        with T.ClusterKernel(T.min(tokens, clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS) as block:
            T.import_source(PRELUDE)
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            x_tile = T.alloc_shared((SLOTS, TILE, plan.pitch), "bfloat16")
            x_words = T.view(x_tile, (SLOTS, TILE, plan.pitch // 2), "uint32")
            o_tile = T.alloc_shared((SLOTS, mapped, plan.cols + 16), "bfloat16")
            o_words = T.view(o_tile, (SLOTS, mapped, plan.cols // 2 + 8), "uint32")
            map_gates = T.alloc_shared((SLOTS, mapped, plan.mixes), "float32")
            partial = T.alloc_shared((2, plan.warps, plan.sums, TILE), "float32")
            gate_part = T.alloc_shared((SLOTS * CLUSTER * plan.gates * GATE_PITCH,), "float32")
            mix_part = T.alloc_shared((SLOTS * CLUSTER * plan.mixes,), "float32")
            softmax = T.alloc_shared((HELPERS, BATCH, STREAMS * STREAMS), "float32")
            lowest = T.alloc_shared((STREAMS, WORKERS, 4), "uint32")
            gates = T.alloc_shared((SLOTS, TILE, 8), "float32")
            loaded = T.alloc_barrier([HELPERS * 32] * SLOTS)
            projected = T.alloc_barrier([WORKERS])
            arrived = T.alloc_barrier([WORKERS] * SLOTS)
            gated = T.alloc_barrier([HELPERS * 32] * SLOTS)
            read = T.alloc_barrier([WORKERS] * SLOTS)
            sums, weights = (gate_part, mix_part, arrived), (scale, base)
            sources, tiles = (o, r, old_post, old_comb), (o_tile, x_tile, map_gates)

            # a peer may send here once every block has initialised its barriers and arrived
            T.cluster_arrive_relaxed()
            T.pdl_sync()
            T.pdl_trigger()
            # of the block's registers, 96 a thread, workers take what helpers can spare
            if tid < WORKERS:
                T.set_max_nreg(104, 1)
                share = T.alloc_local((3,), "int32")
                own_share(share, block // CLUSTER, tokens, clusters)
                w = T.alloc_local((STREAMS * plan.row_tiles * 4,), "float32")
                pairs = T.alloc_local((STREAMS * PARTS * plan.pairs * 4,), "uint32")
                odd = T.alloc_local((STREAMS * 4,), "uint32")
                top = T.alloc_local((STREAMS * 2,), "uint32")
                load_fn(plan, fn, w, rank, tid)
                cut_fn(plan, w, pairs, odd, top, lowest, tid)
                # step s - 1 is projected, s mapped, s - 1 sent, s - 2 collapsed
                for s in T.serial(share[2] + 2):
                    if s > 0 and s <= share[2]:
                        dot_tile(plan, x_words, (s - 1) % SLOTS, lowest, pairs, odd, top, partial, (s - 1) % 2, tid)
                        T.mbarrier_arrive(projected[0])
                    if s < share[2]:
                        T.mbarrier_wait_parity(loaded[s % SLOTS], s // SLOTS % 2)
                        if plan.is_post:
                            map_tile(plan, x_words, o_words, map_gates, s % SLOTS, tid)
                    if s > 0 and s <= share[2]:
                        T.mbarrier_wait_parity(projected[0], (s - 1) % 2)
                        if s == 1:
                            T.cluster_wait()
                        count = T.min(share[1] - share[0] - (s - 1) * TILE, TILE)
                        send_sums(plan, partial, (s - 1) % 2, sums, (s - 1) % SLOTS, count, rank, tid)
                    if s > 1:
                        last = (s - 2) % SLOTS
                        T.mbarrier_wait_parity(gated[last], (s - 2) // SLOTS % 2)
                        collapse_tile(
                            plan, has_norm, gates, x_tile, weight, out, layer_input, share, s - 2, last, rank, tid
                        )
                        T.mbarrier_arrive(read[last])
            else:
                T.set_max_nreg(64, 0)
                helpers_share = T.alloc_local((3,), "int32")
                own_share(helpers_share, block // CLUSTER, tokens, clusters)
                for s in T.unroll(SLOTS):
                    prefetch(plan, sources, tiles, loaded, helpers_share, s, s, rank, tid)
                T.cluster_wait()
                for s in T.serial(helpers_share[2]):
                    slot = s % SLOTS
                    T.mbarrier_wait_parity(arrived[slot], s // SLOTS % 2)
                    # the last of the helpers takes the first step: it has the fewest tokens
                    is_own = helper(tid) == HELPERS - 1 - s % HELPERS
                    if is_own:
                        own_step(plan, sums, softmax, weights, post, helpers_share, s, slot, rank, tid)
                    gate_tile(plan, has_norm, sums, gates, weights, slot, tid)
                    T.mbarrier_arrive(gated[slot])
                    if is_own and (s + HELPERS >= helpers_share[2] or s // HELPERS % BATCH == BATCH - 1):
                        own_comb(plan, softmax, comb, helpers_share, s, rank, tid)
                    # s - 1 has been collapsed, or soon will be
                    if s > 0 and s + SLOTS - 1 < helpers_share[2]:
                        T.mbarrier_wait_parity(read[(s - 1) % SLOTS], (s - 1) // SLOTS % 2)
                        prefetch(plan, sources, tiles, loaded, helpers_share, s + SLOTS - 1, (s - 1) % SLOTS, rank, tid)
            # every block has waited for all that was sent to it, so none has to outlive the others

    return of_streams(config, tokens, source, body)


@T.macro
def own_share(share, cluster, tokens, clusters):
    """share = the first token of a cluster, the one after its last, and its steps.

    Kept, or every address would divide anew, and in each role's own registers, or they would be in local memory.
    """
    for e in T.unroll(2):
        share[e] = shares_before(cluster + e, tokens, clusters)
    share[2] = T.ceildiv(share[1] - share[0], TILE)
