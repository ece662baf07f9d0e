"""The pre on four streams in one launch, alone or behind a post.

For hc 4 and H up to 4096 in steps of 256; `streams` does the same for others. A cluster of 16 blocks splits every row,
so that a block's slice of `fn`, cut into bf16 parts, stays in the registers of its 16 workers: warps that make a tile's
new streams, project them, send the sums and collapse them. Four helpers have what registers are left: warps that make
gates of the sums of all blocks. A tile's streams lie in shared memory, new ones in place of the old.
"""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import shares_before
from mhc.kernels.quad_dot import (
    BARRIERS,
    CLUSTER,
    SLOTS,
    STREAMS,
    TILE,
    WORKERS,
    Quad,
    cut_fn,
    dot_tile,
    load_fn,
    map_tile,
    prefetch_fn,
)
from mhc.kernels.quad_finish import (
    BATCH,
    HELPERS,
    THREADS,
    collapse_tile,
    first_gated,
    gate_tile,
    helper,
    load_weights,
    own_comb,
    own_step,
    prefetch,
    wait,
)
from mhc.kernels.quad_sums import send_sums
from mhc.kernels.remote import PRELUDE
from mhc.kernels.signatures import of_streams
from mhc.kernels.split import PARTS

FEW_CLUSTERS = 7  # from here on there are many tokens


def quad(config: MHCConfig, clusters: int, has_norm: bool, source: str):
    """Streams -> (new streams [T, 4, H], post [T, 4, 1], comb [T, 4, 4],) layer_input [T, H].

    A cluster takes an equal share of the tokens, in tiles of 8. All workers project a tile and make the next one's
    streams, the one half before it sends the sums, the other after it has collapsed an earlier tile, whose gates
    helpers have made, and has begun to load another in its place. So the halves ask for tensor cores at other times.

    Args:
        config: shapes and constants; hc is 4, H a multiple of 256 and at most 4096.
        clusters: most clusters launched.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        source: `pre` reads streams; `post_pre` makes them from (o, r, post, comb) and writes them; `post_pre_collapsed`
            makes them from (o, x, post).
    """
    plan = Quad(config, source)
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        with T.ClusterKernel(T.min(tokens, clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS) as block:
            T.import_source(PRELUDE)
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            x_tile = T.alloc_shared((SLOTS, TILE, plan.pitch), "bfloat16")
            x_words = T.view(x_tile, (SLOTS, TILE, plan.pitch // 2), "uint32")
            map_gates = T.alloc_shared((SLOTS, TILE, plan.mixes), "float32")
            partial = T.alloc_shared((2, plan.warps, plan.partial), "float32")
            gate_part = T.alloc_shared((SLOTS * CLUSTER * plan.gates * TILE,), "float32")
            mix_part = T.alloc_shared((SLOTS * CLUSTER * plan.mixes,), "float32")
            softmax = T.alloc_shared((HELPERS, BATCH, STREAMS * STREAMS), "float32")
            lowest = T.alloc_shared((STREAMS, WORKERS, 4), "uint32")
            gates = T.alloc_shared((SLOTS, TILE, 8), "float32")
            loaded = T.alloc_barrier([WORKERS // 2] * BARRIERS)
            # two, as those that collapse can be a step ahead of those that send
            projected = T.alloc_barrier([WORKERS] * 2)
            arrived = T.alloc_barrier([WORKERS // 2] * BARRIERS)
            gated = T.alloc_barrier([HELPERS * 32] * BARRIERS)
            sums, into = (gate_part, mix_part, arrived), (weight, out, layer_input)
            sources = (o, r, old_post, old_comb)

            # a peer may send here once every block has initialised its barriers and arrived
            T.cluster_arrive_relaxed()
            # a layer's weights are seldom in L2: the first cluster asks for them, unless it has more to wait for
            if clusters < FEW_CLUSTERS and tid >= WORKERS and block < CLUSTER:
                prefetch_fn(plan, fn, rank, tid - WORKERS)
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
                top = T.alloc_local((STREAMS // 2 * 4,), "uint32")
                sends = tid < WORKERS // 2
                if not sends:
                    for step in T.serial(SLOTS):
                        prefetch(plan, sources, x_tile, map_gates, loaded, share, step, step, rank, tid)
                # half of `fn` is on its way while the first tile is made, the other half while the first is cut
                load_fn(plan, fn, w, 0, rank, tid)
                wait(loaded, 0)
                if plan.is_post:
                    map_tile(plan, x_words, map_gates, 0, tid)
                load_fn(plan, fn, w, STREAMS // 2, rank, tid)
                T.sync_warp()  # or the compiler would have all loads first
                cut_fn(plan, w, pairs, odd, top, lowest, tid)
                T.cluster_wait()
                slot = T.alloc_local((1,), "int32")  # kept, or it would be divided out anew
                slot[0] = 0
                for s in T.serial(share[2] + 2):
                    if not sends and s > 1:
                        before = T.if_then_else(slot[0] < 2, slot[0] + SLOTS - 2, slot[0] - 2)
                        collapse_tile(plan, has_norm, gates, gated, x_tile, into, share, s - 2, before, rank, tid)
                        # in place of what this warp has collapsed
                        if s - 2 + SLOTS < share[2]:
                            prefetch(plan, sources, x_tile, map_gates, loaded, share, s - 2 + SLOTS, before, rank, tid)
                    if s < share[2]:
                        dot_tile(plan, x_words, slot[0], lowest, pairs, odd, top, partial, s % 2, tid)
                        T.mbarrier_arrive(projected[s % 2])
                    if s + 1 < share[2]:
                        wait(loaded, s + 1)
                        if plan.is_post:
                            map_tile(plan, x_words, map_gates, following(slot[0]), tid)
                    if sends and s < share[2]:
                        # those that collapse have also waited for the gates of s - 2
                        T.mbarrier_wait_parity(projected[s % 2], s // 2 % 2)
                        count = T.min(share[1] - share[0] - s * TILE, TILE)
                        send_sums(plan, partial, sums, s, slot[0], count, rank, tid)
                    slot[0] = following(slot[0])
            else:
                T.set_max_nreg(64, 0)
                helpers_share = T.alloc_local((3,), "int32")
                own_share(helpers_share, block // CLUSTER, tokens, clusters)
                affine = T.alloc_local((4,), "float32")
                load_weights(plan, scale, base, affine, tid)
                helpers_slot = T.alloc_local((1,), "int32")
                helpers_slot[0] = 0
                T.cluster_wait()
                # comb last of all, but for full batches: a helper that computes it keeps all waiting
                for s in T.serial(helpers_share[2] + T.if_then_else(helpers_share[2] > 1, HELPERS - 1, 0)):
                    # the last of the helpers takes the first step: it has the fewest tokens
                    is_own = helper(tid) == HELPERS - 1 - s % HELPERS
                    if s < helpers_share[2]:
                        wait(arrived, s)
                        # gates first, as workers wait for them; where there is one step only, comb takes longest
                        for i in T.serial(2):
                            if i == T.if_then_else(is_own and helpers_share[2] == 1, 1, 0):
                                if helpers_share[0] + s * TILE + first_gated(tid) < helpers_share[1]:
                                    gate_tile(plan, has_norm, sums, gates, affine, helpers_slot[0], tid)
                                T.mbarrier_arrive(gated[s % BARRIERS])
                            elif is_own:
                                own_step(
                                    plan, sums, softmax, affine, post, helpers_share, s, helpers_slot[0], rank, tid
                                )
                    of = T.if_then_else(s < helpers_share[2], s, s - HELPERS)
                    is_full = of // HELPERS % BATCH == BATCH - 1
                    if is_own and of >= 0 and (s == helpers_share[2] - 1 or is_full == (s < helpers_share[2])):
                        own_comb(plan, softmax, comb, helpers_share, of, rank, tid)
                    helpers_slot[0] = following(helpers_slot[0])
            # every block has waited for all that was sent to it, so none has to outlive the others

    return of_streams(config, tokens, source, body)


def following(slot):
    return T.if_then_else(slot == SLOTS - 1, 0, slot + 1)


@T.macro
def own_share(share, cluster, tokens, clusters):
    """share = the first token of a cluster, the one after its last, and its steps.

    Kept, or every address would divide anew, and in each role's own registers, or they would be in local memory.
    """
    for e in T.unroll(2):
        share[e] = shares_before(cluster + e, tokens, clusters)
    share[2] = T.ceildiv(share[1] - share[0], TILE)
