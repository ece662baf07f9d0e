"""How `quad` adds up the warps' sums of a tile and sends them to the blocks of its cluster, as `fused` does."""

import tilelang.language as T

from mhc.kernels.quad_dot import CLUSTER, STREAMS, TILE, WORKERS
from mhc.kernels.remote import arrive, gather_quad, send_quad

GATE_PITCH = TILE + 4  # floats between two sums of a token that every block needs: a multiple of 4, padded


@T.macro
def send_sums(plan, partial, at, sums, slot, count, rank, tid):
    """The sums partial[at] of `count` tokens over the warps, sent four values at a time.

    gate_part [SLOTS, CLUSTER, gates, GATE_PITCH] of every block takes four tokens of a row, mix_part [SLOTS, CLUSTER,
    mixes] four rows of the token that the block owns, its `rank`th. A lane adds up a row of one token, or of two if
    they are sent to one block each. The halves of the workers take turns.
    """
    gate_part, mix_part, arrived = sums
    lane = tid % 32
    turn = (tid + at * (WORKERS // 2)) % WORKERS
    gate_lanes = plan.gates * TILE
    in_warps = -(-gate_lanes // 32) * 32  # the lanes of a warp exchange values
    mix_lanes = plan.mixes * TILE // 2
    value = T.alloc_local((2,), "float32")
    quad = T.alloc_local((8,), "float32")
    if turn < in_warps:
        q = T.min(turn, gate_lanes - 1)
        m = q // TILE
        row = T.if_then_else(m < STREAMS, m, m + plan.rows - STREAMS)
        value[0] = partial[at, 0, row, q % TILE]
        for g in T.unroll(plan.warps - 1):
            value[0] += partial[at, g + 1, row, q % TILE]
        gather_quad(value, quad, lane)
        first = q % TILE // 4 * 4
        if turn < gate_lanes and first < count:
            to = ((slot * CLUSTER + rank) * plan.gates + m) * GATE_PITCH + first
            for j in T.unroll(CLUSTER // 4):
                send_quad(quad, gate_part, to, arrived, slot, lane % 4 + j * 4, rank)
    elif turn < in_warps + -(-mix_lanes // 32) * 32:
        # lane % 4 is a row, then come two tokens of eight, then four more rows
        i = T.min(turn - in_warps, mix_lanes - 1)
        from_row = i // 16 * 4
        two = i // 4 % 4 * 2
        for e in T.vectorized(2):
            value[e] = partial[at, 0, STREAMS + from_row + lane % 4, two + e]
        for g in T.unroll(plan.warps - 1):
            for e in T.vectorized(2):
                quad[e] = partial[at, g + 1, STREAMS + from_row + lane % 4, two + e]
            for e in T.unroll(2):
                value[e] += quad[e]
        # the even lanes of four take the first token, the odd ones the second
        for e in T.unroll(4):
            quad[e] = T.shfl_sync(value[0], lane // 4 * 4 + e)
            quad[4 + e] = T.shfl_sync(value[1], lane // 4 * 4 + e)
        for e in T.unroll(4):
            quad[e] = T.if_then_else(lane % 2 == 0, quad[e], quad[4 + e])
        owner = two + lane % 2
        if turn - in_warps < mix_lanes and lane % 4 < 2 and owner < count:
            send_quad(quad, mix_part, (slot * CLUSTER + rank) * plan.mixes + from_row, arrived, slot, owner, rank)
    quads = plan.gates * T.ceildiv(count, 4) + T.if_then_else(rank < count, plan.mixes // 4, 0)
    arrive(arrived, slot, tid == 0, (CLUSTER - 1) * quads * 16)
