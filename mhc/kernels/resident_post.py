"""The streams of a step in registers: read, or made by the post map.

A lane has token `lane / 4` of the tile and 8 adjacent columns of every stream, `x[stream * 4 + pair]` of two bf16 each.
"""

import tilelang.language as T

from mhc.kernels.parts import copy_async
from mhc.kernels.resident_parts import TILE, first, second


def token(tid):
    return tid % 32 // 4


def column(tid):
    """The first of a lane's 8 columns of its block's."""
    return tid // 32 * 32 + tid % 4 * 8


@T.macro
def prefetch(shape, o, r, rank, t0, end, tid):
    """Bring what the tile that begins at t0 reads into the L2 cache, a warp a token."""
    cols = shape.cols
    lane = tid % 32
    t = t0 + tid // 32
    if t < end and tid // 32 < TILE:
        if lane < shape.streams:
            prefetch_row(r[T.cast(t, "int64"), lane, rank * cols], cols)
        if shape.is_post:  # noqa: SIM102 (known to the compiler, unlike the next)
            if lane == shape.streams:
                prefetch_row(o[T.cast(t, "int64"), rank * cols], cols)


def prefetch_row(at, cols):
    return T.evaluate(T.call_extern("handle", "mhc_prefetch", T.access_ptr(at, "r", extent=cols), T.uint32(cols * 2)))


@T.macro
def load_gates(shape, post, comb, gates, parity, t0, end, tid):
    """Start to copy gates[parity] = post and comb of the post map, a warp a token."""
    hc = shape.streams
    vec = 4 if hc % 4 == 0 else 2 if hc % 2 == 0 else 1
    t = tid // 32
    k = tid % 32 * vec
    if t < TILE and t0 + t < end:
        if k < hc:
            copy_async(gates[parity, t, k], post[T.cast(t0 + t, "int64"), k], vec)
        elif shape.gates > hc:  # noqa: SIM102 (known to the compiler, unlike the next)
            if k < shape.gates:
                copy_async(gates[parity, t, k], comb[T.cast(t0 + t, "int64"), k - hc], vec)
    T.ptx_commit_group()


@T.macro
def load(shape, count, source, x, rank, t0, end, tid):
    """x = `count` streams of this lane's token and columns; zeros where there are none."""
    t = t0 + token(tid)
    for j in T.unroll(count):
        x[T.Ramp(j * 4, 1, 4)] = T.ldg128(
            source[t, j, rank * shape.cols + column(tid)], pred=column(tid) < shape.cols and t < end
        )


@T.macro
def load_row(shape, source, x, rank, t0, end, tid):
    t = t0 + token(tid)
    x[T.Ramp(0, 1, 4)] = T.ldg128(source[t, rank * shape.cols + column(tid)], pred=column(tid) < shape.cols and t < end)


@T.macro
def post_map(shape, x, ob, gates, out, parity, rank, t0, end, tid):
    """x = the new streams of the old and of the output, in place, also written to `out`."""
    hc = shape.streams
    t = token(tid)
    of = T.alloc_local((2,), "float32")
    rf = T.alloc_local((shape.streams * 2,), "float32")
    p = T.alloc_local((shape.gates,), "float32")
    kb = T.alloc_local((2,), "bfloat16")
    value = T.alloc_local((2,), "float32")
    for k in T.unroll(shape.gates // hc):
        for e in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
            p[k * hc + e] = gates[parity, t, k * hc + e]
    for q in T.unroll(4):
        of[0] = first(ob[q])
        of[1] = second(ob[q])
        for j in T.unroll(shape.streams):
            rf[j * 2] = first(x[j * 4 + q])
            rf[j * 2 + 1] = second(x[j * 4 + q])
        for k in T.unroll(hc):
            # r'[k] = post_k * o + sum_j comb[j, k] * r[j]
            for e in T.unroll(2):
                value[e] = p[k] * of[e]
                for j in T.unroll(hc):
                    value[e] += p[(1 + j) * hc + k] * rf[j * 2 + e]
            for e in T.vectorized(2):
                kb[e] = T.cast(value[e], "bfloat16")
            x[k * 4 + q] = T.reinterpret(kb[T.Ramp(0, 1, 2)], "uint32")
    if column(tid) < shape.cols and t0 + t < end:
        for k in T.unroll(hc):
            T.stg128(out[t0 + t, k, rank * shape.cols + column(tid)], x[T.Ramp(k * 4, 1, 4)])


@T.macro
def fetch_fn(shape, fn, fn_smem, rank, tid):
    """Start to copy this block's slice of `fn`, one stream after the other; a warp copies what it will read."""
    hc, rows, cols = shape.streams, shape.rows, shape.cols
    lane = tid % 32
    col = tid // 32 * 32 + lane % 8 * 4
    for j in T.unroll(hc):
        for i in T.unroll(T.ceildiv(rows, 4)):
            m = i * 4 + lane // 8
            if m < rows and col < cols:
                copy_async(fn_smem[j, m, col], fn[m, j * shape.config.hidden_size + rank * cols + col], 4)
        T.ptx_commit_group()
