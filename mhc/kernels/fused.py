"""The broadcast pre in one launch: `reference.pre_broadcast`, whole, collapsed, or as rows of a token table."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.gates import finish_tile, own_comb, own_logits
from mhc.kernels.parts import CLUSTER, copy_async, flat, shares_before
from mhc.kernels.remote import PRELUDE, arrive, gather_quad, send_quad
from mhc.kernels.split import PARTS, SLOTS, X_SLOTS, Slices, cut_fn, dot_tile, load_fn


def fused(config: MHCConfig, tile: int, clusters: int, has_norm: bool, outputs: str):
    """x [T, H] -> the outputs of the first pre.

    A cluster takes an equal share of the tokens, in equal tiles. It sends the sums of one tile before it waits for
    those of the tile before, so that the exchange is off the chain. Four slots for them suffice: a block that sends
    step s has seen all sums of s - 2, and a peer sends those only after it has read all of s - 4. A warp of its own
    computes comb, of many steps at once: it takes as long for 32 tokens as for one.

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
            T.import_source(PRELUDE)
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            x_tile = T.alloc_shared((X_SLOTS, tile, plan.pitch), "bfloat16")
            x_words = T.view(x_tile, (X_SLOTS, tile, plan.pitch // 2), "uint32")
            partial = T.alloc_shared((plan.warps, plan.token_tiles, plan.sums, 8), "float32")
            gate_part = T.alloc_shared((SLOTS * CLUSTER * plan.commons * plan.token_pitch,), "float32")
            mix_part = T.alloc_shared((SLOTS * CLUSTER * plan.mixes,), "float32")
            logits = T.alloc_shared((32, hc * hc + 4), "float32")  # padded as `pitch` is
            arrived = T.alloc_barrier([plan.workers] * SLOTS)
            w = T.alloc_local((plan.steps_held * plan.row_tiles * 4,), "float32")
            pairs = T.alloc_local((max(plan.steps_held * PARTS * plan.pairs * 4, 1),), "uint32")
            odd = T.alloc_local((plan.steps_held * 4,), "uint32")
            top = T.alloc_local((plan.steps_held * 2,), "uint32")
            sums, weights, into = (gate_part, arrived), (scale, base, weight), (residual, post, layer_input, factor)

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
                if plan.comb:
                    lane = tid % 32
                    own_token = T.alloc_local((1,), "int32")  # kept, as `share` is
                    # barrier 2 + s % 2: the sums of s - 2 have been read
                    for s in T.unroll(2):
                        if s < steps:
                            T.named_barrier_arrive(2 + s, plan.workers + 32)
                    for s in T.serial(steps):
                        own_logits(plan, sums, mix_part, logits, weights, s, s + 2 < steps, rank, lane)
                        if s % plan.batch == plan.batch - 1 or s == steps - 1:
                            # the step whose token a lane has
                            of = s - s % plan.batch + lane // plan.owned
                            first, end = bounds(share, of)
                            own_token[0] = first + lane % plan.owned * CLUSTER + rank
                            own_comb(plan, logits, comb, own_token[0], of <= s and own_token[0] < end, lane)
            else:
                for s in T.unroll(2):
                    t0, end = bounds(share, s)
                    prefetch_x(plan, x, x_tile, s, rank, t0, end, tid)
                cut_fn(plan, w, pairs, odd, top)
                for s in T.serial(steps + 1):
                    t0, end = bounds(share, s)
                    if s < steps:
                        T.ptx_wait_group(1)
                        T.sync_threads(1, plan.workers)
                        dot_tile(plan, x_words, s % X_SLOTS, fn, w, pairs, odd, top, partial, end - t0, rank, tid)
                        if plan.comb:
                            # each by its own number: with a computed one the compiler would reserve all sixteen
                            if s % 2 == 0:
                                T.sync_threads(2, plan.workers + 32)
                            else:
                                T.sync_threads(3, plan.workers + 32)
                        else:
                            T.sync_threads(1, plan.workers)
                        if s == 0:
                            T.cluster_wait()
                        send_sums(plan, partial, gate_part, mix_part, arrived, s % SLOTS, end - t0, rank, tid)
                    if s > 0:
                        last_t0, last_end = bounds(share, s - 1)
                        finish_tile(
                            plan, has_norm, outputs, sums, x_tile, weights, into, s - 1, rank, last_t0, last_end, tid
                        )
                    # into the slot of s - 1, where this lane has read what it overwrites
                    next_t0, next_end = bounds(share, s + 2)
                    prefetch_x(plan, x, x_tile, (s + 2) % X_SLOTS, rank, next_t0, next_end, tid)
            # every block has waited for all that was sent to it, so none has to outlive the others

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
                    copy_async(x_tile[slot, t, col], x[T.cast(t0 + t, "int64"), rank * plan.cols + col], 8)
    T.ptx_commit_group()


@T.macro
def send_sums(plan, partial, gate_part, mix_part, arrived, slot, count, rank, tid):
    """Add up the warps' shares and send the sums of `count` tokens, four values at a time.

    gate_part [SLOTS, CLUSTER, commons, token_pitch] of every block takes four tokens of a row, mix_part [SLOTS,
    CLUSTER, owned, comb_sent] four rows of a token that the block owns.
    """
    lane = tid % 32
    gates = plan.commons - 1
    common = plan.token_tiles * plan.commons * 8
    in_warps = -(-common // 32) * 32  # the lanes of a warp exchange values
    size = in_warps + plan.token_tiles * plan.comb_sent * 8
    value = T.alloc_local((1,), "float32")
    quad = T.alloc_local((4,), "float32")
    for i in T.unroll(T.ceildiv(size, plan.workers), unroll_factor=1):  # unrolled, many streams take more registers
        q = i * plan.workers + tid
        if q < in_warps:
            c = T.min(q, common - 1)
            m = c // 8 % plan.commons
            # the last of the common rows is the squares'
            add_warps(plan, partial, c // 8 // plan.commons, m + m // gates * (plan.rows - gates), c % 8, value)
            gather_quad(value, quad, lane)
            first = c // 8 // plan.commons * 8 + c % 8 // 4 * 4
            if q < common and first < count:
                at = ((slot * CLUSTER + rank) * plan.commons + m) * plan.token_pitch + first
                for j in T.unroll(CLUSTER // 4):
                    send_quad(quad, gate_part, at, arrived, slot, lane % 4 + j * 4, rank)
        elif plan.comb:  # noqa: SIM102 (known to the compiler, unlike the next)
            if q < size:
                r = q - in_warps
                h = r // 8 // plan.comb_sent
                from_row = r // 32 % (plan.comb_sent // 4) * 4
                owner = r // 4 % 8
                add_warps(plan, partial, h, T.min(gates + from_row + lane % 4, plan.rows - 1), owner, value)
                gather_quad(value, quad, lane)
                if lane % 4 == 0 and h * 8 + owner < count:
                    at_owner = ((slot * CLUSTER + rank) * plan.owned + h) * plan.comb_sent + from_row
                    send_quad(quad, mix_part, at_owner, arrived, slot, owner, rank)
    # of the tokens, the block owns (count + 7 - rank) // 8
    quads = plan.commons * T.ceildiv(count, 4) + (count + CLUSTER - 1 - rank) // CLUSTER * (plan.comb_sent // 4)
    arrive(arrived, slot, tid == 0, (CLUSTER - 1) * quads * 16)


@T.macro
def add_warps(plan, partial, h, m, t, value):
    """value = the sum of partial[:, h, m, t], in the order of the warps."""
    value[0] = partial[0, h, m, t]
    for g in T.unroll(plan.warps - 1):
        value[0] += partial[g + 1, h, m, t]
