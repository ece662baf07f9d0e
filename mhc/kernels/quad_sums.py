"""How `quad` adds up the warps' sums of a tile and sends them to the blocks of its cluster, as `fused` does."""

import tilelang.language as T

from mhc.kernels.quad_dot import BARRIERS, CLUSTER, GRAM_PITCH, STREAMS, TILE
from mhc.kernels.remote import arrive, gather_quad, send_quad


def gate_at(plan, slot, block, m, t):
    """Where gate_part has the `m`th sum of a tile's token `t` from a block.

    Every second four rows have their tokens' halves swapped: lanes that read a row each meet in fewer banks.
    """
    return ((slot * CLUSTER + block) * plan.gates + m) * TILE + T.bitwise_xor(t, m // 4 % 2 * (TILE // 2))


@T.macro
def send_sums(plan, partial, sums, step, slot, count, rank, tid):
    """The sums partial[step % 2] of `count` tokens over the warps, sent four values at a time.

    gate_part [SLOTS, CLUSTER, gates, TILE] of every block takes four tokens of a row, mix_part [SLOTS, CLUSTER, mixes]
    four rows of the token that the block owns, its `rank`th. A lane adds up a row of one token, or of two if they are
    sent to one block each. Half of the workers suffices.

    Five slots do: a peer that sends step s + 4 has waited for the gates of s + 2, for which it needed sums that this
    block sent once s was gated. A helper can still be at work on post and comb of s then, but not once s + 1 is gated.
    """
    gate_part, mix_part, arrived = sums
    at = step % 2
    barrier = step % BARRIERS
    lane = tid % 32
    gate_lanes = plan.gates * TILE
    in_warps = -(-gate_lanes // 32) * 32  # the lanes of a warp exchange values
    mix_lanes = plan.mixes * TILE // 2
    place = T.alloc_local((1,), "int32")
    value = T.alloc_local((2,), "float32")
    quad = T.alloc_local((8,), "float32")
    if tid < in_warps:
        q = T.min(tid, gate_lanes - 1)
        m = q // TILE
        inner = plan.rows * TILE + q % TILE * GRAM_PITCH + m - STREAMS
        place[0] = T.if_then_else(m < STREAMS, q, inner)
        value[0] = partial[at, 0, place[0]]
        for g in T.unroll(plan.warps - 1):
            value[0] += partial[at, g + 1, place[0]]
        gather_quad(value, quad, lane)
        first = q % TILE // 4 * 4
        if tid < gate_lanes and first < count:
            to = gate_at(plan, slot, rank, m, first)
            for j in T.unroll(CLUSTER // 4):
                send_quad(quad, gate_part, to, arrived, barrier, lane % 4 + j * 4, rank)
    elif tid < in_warps + -(-mix_lanes // 32) * 32:
        # lane % 4 is a row, then come two tokens of eight, then four more rows
        i = T.min(tid - in_warps, mix_lanes - 1)
        from_row = i // 16 * 4
        two = i // 4 % 4 * 2
        for e in T.vectorized(2):
            value[e] = partial[at, 0, (STREAMS + from_row + lane % 4) * TILE + two + e]
        for g in T.unroll(plan.warps - 1):
            for e in T.vectorized(2):
                quad[e] = partial[at, g + 1, (STREAMS + from_row + lane % 4) * TILE + two + e]
            for e in T.unroll(2):
                value[e] += quad[e]
        # the even lanes of four take the first token, the odd ones the second
        for e in T.unroll(4):
            quad[e] = T.shfl_sync(value[0], lane // 4 * 4 + e)
            quad[4 + e] = T.shfl_sync(value[1], lane // 4 * 4 + e)
        for e in T.unroll(4):
            quad[e] = T.if_then_else(lane % 2 == 0, quad[e], quad[4 + e])
        owner = two + lane % 2
        if tid - in_warps < mix_lanes and lane % 4 < 2 and owner < count:
            send_quad(quad, mix_part, (slot * CLUSTER + rank) * plan.mixes + from_row, arrived, barrier, owner, rank)
    quads = plan.gates * T.ceildiv(count, 4) + T.if_then_else(rank < count, plan.mixes // 4, 0)
    arrive(arrived, barrier, tid == 0, (CLUSTER - 1) * quads * 16)
