"""The projection of a tile on tensor cores, and its sums on their way to the blocks of the cluster."""

import tilelang.language as T

from mhc.kernels.parts import CLUSTER
from mhc.kernels.remote import arrive, gather_quad, send_quad
from mhc.kernels.resident_parts import SLOTS, TILE, WARPS, first, second
from mhc.kernels.tensor import multiply


@T.macro
def wait_stream(hc, j, k):
    """Wait until this lane's copies of stream j are there: the number of younger ones has to be a literal."""
    if k < hc:
        if j == k:
            T.ptx_wait_group(hc - 1 - k)
        wait_stream(hc, j, k + 1)


@T.macro
def dot(shape, x, fn_smem, total, square, tid):
    """total = this warp's share of `flat(r) @ fn.T`, square = its share of `sum(flat(r)^2)` of this lane's token.

    `fn` is the first operand, 8 tokens the second. bf16 streams are exact in tf32; `fn` is split into its tf32 part and
    the rest. The tensor core truncates as it accumulates, so it only ever adds up 16 columns, small products first: all
    further sums are rounded fp32.

    Column c of a lane's 8 plays k = lane % 4 + 4 * (c % 2) of product c / 2: any order of k is right if both operands
    keep it. A row tile without a partner stands above itself, its rest above its tf32 part.
    """
    hc, cols, pairs = shape.streams, shape.cols, shape.pairs
    odd = shape.row_tiles % 2
    row = tid % 32 // 4
    w = T.alloc_local((shape.row_tiles * 4,), "float32")
    rest = T.alloc_local((shape.row_tiles * 4,), "float32")
    high = T.alloc_local((pairs * 8 + odd * 8,), "float32")
    low = T.alloc_local((max(pairs * 8, 1),), "float32")
    b = T.alloc_local((4,), "float32")
    acc = T.alloc_local((4,), "float32")
    for i in T.unroll(shape.row_tiles * 2):
        total[i] = 0.0
    square[0] = 0.0
    for j in T.unroll(hc):
        wait_stream(hc, j, 0)
        T.sync_warp()
        for half in T.unroll(2):
            col = tid // 32 * 32 + tid % 4 * 8 + half * 4
            for n in T.unroll(shape.row_tiles):
                if cols % (32 * WARPS) != 0:
                    for e in T.unroll(4):
                        w[n * 4 + e] = 0.0
                if col < cols:
                    for e in T.vectorized(4):
                        w[n * 4 + e] = fn_smem[j, T.min(n * 8 + row, shape.rows - 1), col + e]
                for e in T.unroll(4):
                    # tf32 keeps 10 bits of mantissa
                    bits = T.bitwise_and(T.reinterpret(w[n * 4 + e], "uint32"), T.uint32(0xFFFFE000))
                    rest[n * 4 + e] = w[n * 4 + e] - T.reinterpret(bits, "float32")
                    w[n * 4 + e] = T.reinterpret(bits, "float32")
            # a lane's registers for product p: column 2 p of the upper and the lower row, then column 2 p + 1
            for e in T.unroll(4):
                for n in T.unroll(pairs * 2):
                    high[n // 2 * 8 + e * 2 + n % 2] = w[n * 4 + e]
                    low[n // 2 * 8 + e * 2 + n % 2] = rest[n * 4 + e]
                if odd:
                    high[pairs * 8 + e * 2] = rest[pairs * 8 + e]
                    high[pairs * 8 + e * 2 + 1] = w[pairs * 8 + e]
            for p in T.unroll(2):
                b[p * 2] = first(x[j * 4 + half * 2 + p])
                b[p * 2 + 1] = second(x[j * 4 + half * 2 + p])
            for e in T.unroll(4):
                square[0] += b[e] * b[e]
            for n in T.unroll(pairs):
                for e in T.unroll(4):
                    acc[e] = 0.0
                for p in T.unroll(2):
                    multiply(low, n * 8 + p * 4, b, p * 2, acc, 0)
                for p in T.unroll(2):
                    multiply(high, n * 8 + p * 4, b, p * 2, acc, 0)
                for e in T.unroll(4):
                    total[n * 4 + e] = total[n * 4 + e] + acc[e]
            if odd:
                for e in T.unroll(4):
                    acc[e] = 0.0
                for p in T.unroll(2):
                    multiply(high, pairs * 8 + p * 4, b, p * 2, acc, 0)
                for e in T.unroll(2):
                    total[pairs * 4 + e] = total[pairs * 4 + e] + (acc[e] + acc[2 + e])
    square[0] = square[0] + T.shfl_xor(square[0], 1)
    square[0] = square[0] + T.shfl_xor(square[0], 2)


@T.macro
def hand_over(shape, total, square, partial, row_square, tid):
    """The upper warps' sums into partial[warp - SLOTS], every warp's squares into row_square."""
    warp = tid // 32
    if warp >= SLOTS:
        for n in T.unroll(shape.row_tiles):
            for e in T.vectorized(2):
                partial[warp - SLOTS, n * 8 + tid % 32 // 4, tid % 4 * 2 + e] = total[n * 2 + e]
    if tid % 4 == 0:
        row_square[warp, tid % 32 // 4] = square[0]


@T.macro
def add_own(shape, total, partial, tid):
    """The lower warps add theirs."""
    warp = tid // 32
    if warp < SLOTS:
        for n in T.unroll(shape.row_tiles):
            for e in T.vectorized(2):
                partial[warp, n * 8 + tid % 32 // 4, tid % 4 * 2 + e] = (
                    partial[warp, n * 8 + tid % 32 // 4, tid % 4 * 2 + e] + total[n * 2 + e]
                )


@T.macro
def send_sums(shape, partial, row_square, at_all, at_owner, arrived, parity, rank, tid):
    """Add up the slots; the sums go to the blocks that need them, four at a time.

    at_all [2, CLUSTER, common, TILE] takes four tokens of a row, at_owner [2, CLUSTER, mixes_sent] four rows of a
    token, whose owner is the block of its number. The lanes of four are laid out so that every bank is read once.
    """
    hc, rows = shape.streams, shape.rows
    lane = tid % 32
    value = T.alloc_local((1,), "float32")
    quad = T.alloc_local((4,), "float32")
    if tid // 32 < shape.common_warps:
        t = tid % TILE
        m = tid // TILE
        value[0] = 0.0
        if m < hc:
            for s in T.unroll(SLOTS):
                value[0] += partial[s, m, t]
        elif m == hc:
            for s in T.unroll(WARPS):
                value[0] += row_square[s, t]
        gather_quad(value, quad, lane)
        if m <= hc:
            for i in T.unroll(CLUSTER // 4):
                index = ((parity * CLUSTER + rank) * shape.common + m) * TILE + t // 4 * 4
                send_quad(quad, at_all, index, arrived, parity, lane % 4 + i * 4, rank)
    elif tid // 32 < shape.senders:
        owner = lane // 4
        from_row = (tid // 32 - shape.common_warps) * 4
        value[0] = 0.0
        for s in T.unroll(SLOTS):
            value[0] += partial[s, T.min(hc + from_row + lane % 4, rows - 1), owner]
        gather_quad(value, quad, lane)
        if lane % 4 == 0:
            at = (parity * CLUSTER + rank) * shape.mixes_sent + from_row
            send_quad(quad, at_owner, at, arrived, parity, owner, rank)
    if tid // 32 < shape.senders:
        count = (CLUSTER - 1) * 4 * (shape.common * TILE + shape.mixes_sent)
        arrive(arrived, parity, tid // 32 == 0, count, lane)
