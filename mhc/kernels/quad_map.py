"""Four streams: the post map that makes them, a product of 16 x 16 by 16 x 4 a token and 16 columns.

r'[k] = post_k * o + sum_j comb[j, k] * r[j]: five rows of a token's columns times four columns of coefficients. These
are cut into three bf16 numbers each whose sum they are exactly: five inputs, three times each, are 15 of the 16 that a
tensor core sums. Helpers cut the coefficients, once a token; all workers use them.
"""

import tilelang.language as T

from mhc.kernels.quad_dot import STREAMS, TILE, WORKERS, first_col
from mhc.kernels.split import PARTS, clear, multiply

HELPERS = 4  # warps
ROUNDS = TILE // HELPERS  # tokens of a tile that a helper loads


@T.macro
def load_gates(plan, sources, w, at, share, step, tid):
    """w[at:] = of each token of a helper the two coefficients that this lane cuts; nothing waits yet.

    A lane's two are k and k + 1 of the 16 summed, k = lane % 2 * 8 + lane / 2 % 4 * 2, for the new stream lane / 8.
    """
    old_post, old_comb = sources[2:]
    lane = tid % 32
    for i in T.unroll(ROUNDS):
        t = share[0] + step * TILE + i * HELPERS + (tid - WORKERS) // 32
        for e in T.unroll(2):
            source = (lane % 2 * 8 + lane // 2 % 4 * 2 + e) // PARTS
            w[at + i * 2 + e] = 0.0
            if t < share[1]:
                if source == plan.sources:
                    w[at + i * 2 + e] = old_post[t, lane // 8]
                if source < plan.sources:
                    # of the one embedding that all streams are, every new stream has all
                    w[at + i * 2 + e] = 1.0 if plan.sources == 1 else old_comb[t, source * STREAMS + lane // 8]


@T.macro
def cut_gates(plan, w, at, map_words, slot, tid):
    """Cut them into bf16 parts, and leave in map_words[slot] what the lanes of a worker's warp take for two tokens."""
    lane = tid % 32
    rest = T.alloc_local((PARTS,), "float32")
    kept = T.alloc_local((2,), "float32")
    for i in T.unroll(ROUNDS):
        t = i * HELPERS + (tid - WORKERS) // 32
        for e in T.unroll(2):
            part = (lane % 2 * 8 + lane // 2 % 4 * 2 + e) % PARTS
            rest[0] = w[at + i * 2 + e]
            for p in T.unroll(PARTS - 1):
                upper = T.bitwise_and(T.reinterpret(rest[p], "uint32"), T.uint32(0xFFFF0000))
                rest[p + 1] = rest[p] - T.reinterpret(upper, "float32")
            kept[e] = T.if_then_else(part == 0, rest[0], T.if_then_else(part == 1, rest[1], rest[2]))
        map_words[slot, t // 2, lane // 2, t % 2 * 2 + lane % 2] = T.bitwise_or(
            T.shift_right(T.reinterpret(kept[0], "uint32"), T.uint32(16)),
            T.bitwise_and(T.reinterpret(kept[1], "uint32"), T.uint32(0xFFFF0000)),
        )


@T.macro
def map_tile(plan, x_tile, map_words, slot, tid):
    """The new streams of a tile, rounded to bf16, in place of what they are made of: a warp's 16 columns.

    Columns are the rows of the first operand, coefficients the second, new streams the columns of the product, which
    come twice: there are 8 columns. Of the second four those of the next token take the place.
    """
    lane = tid % 32
    row = T.alloc_local((2,), "int32")
    a = T.alloc_local((4,), "uint32")
    b = T.alloc_local((4,), "uint32")
    acc = T.alloc_local((4,), "float32")
    pair = T.alloc_local((2,), "bfloat16")
    words = T.alloc_local((4,), "uint32")
    made = T.alloc_local((4,), "uint32")
    if tid // 32 < plan.warps:
        # the row of 8 columns that this lane points at: of the 16 that are summed, or of a new stream
        source = T.min((lane // 16 * 8 + lane % 8) // PARTS, plan.sources)
        col = first_col(tid) + lane // 8 % 2 * 8
        row[0] = T.if_then_else(source < plan.sources, source, STREAMS) * plan.stride + col
        row[1] = lane % 4 * plan.stride + col
        for four in T.unroll(TILE // 4):
            for two in T.unroll(2):
                for e in T.vectorized(4):
                    b[e] = map_words[slot, four * 2 + two, lane % 16, e]
                for i in T.unroll(2):
                    T.ptx_ldmatrix(
                        T.bool(True),
                        4,
                        T.access_ptr(x_tile[slot, four * 4 + two * 2 + i, row[0]], "r", extent=8),
                        T.access_ptr(a[0], "w", extent=4),
                    )
                    clear(acc)
                    multiply(a, 0, b, i * 2, acc)
                    for half in T.unroll(2):
                        for e in T.vectorized(2):
                            pair[e] = T.cast(acc[half * 2 + e], "bfloat16")
                        words[i * 2 + half] = T.reinterpret(pair[T.Ramp(0, 1, 2)], "uint32")
                for half in T.unroll(2):
                    made[two * 2 + half] = T.if_then_else(lane % 4 < 2, words[half], words[2 + half])
            T.call_extern(
                "handle",
                "tl::ptx_stmatrix_x4_trans",
                T.access_ptr(x_tile[slot, four * 4 + lane // 16 * 2 + lane // 4 % 2, row[1]], "w", extent=8),
                made[0],
                made[1],
                made[2],
                made[3],
            )
    # the lanes of a warp have stored for each other
    T.sync_warp()
