"""How the tile of a one-launch kernel is filled with streams: read as they are, or made by the post map."""

import tilelang.language as T

from mhc.kernels.parts import WORKERS, copy_async


@T.macro
def load_streams(plan, r, tile_smem, rank, t0, tokens, tid):
    """tile[t, j * S + c] = r[t, j, rank * S + c]."""
    for i in T.serial(T.ceildiv(plan.tile * plan.vecs, WORKERS)):
        t = (i * WORKERS + tid) // plan.vecs
        col = (i * WORKERS + tid) % plan.vecs * 8
        if t < plan.tile and t0 + t < tokens:
            for j in T.unroll(plan.streams):
                for e in T.vectorized(8):
                    tile_smem[t, j * plan.cols + col + e] = r[t0 + t, j, rank * plan.cols + col + e]


@T.macro
def prefetch_post(plan, sources, o, r, post, comb, raw, coefficients, rank, t0, tokens, tid):
    """Start to copy what `load_post` needs: raw [tile, 1 + sources, S] = o and r, coefficients = post and comb."""
    hc = plan.streams
    for i in T.unroll(T.ceildiv(plan.tile * (1 + sources) * plan.vecs, WORKERS), unroll_factor=1):
        q = i * WORKERS + tid
        col = q % plan.vecs * 8
        j = q // plan.vecs % (1 + sources)
        t = q // plan.vecs // (1 + sources)
        if t < plan.tile and t0 + t < tokens:
            if j == 0:
                copy_async(raw[t, 0, col], o[T.cast(t0 + t, "int64"), rank * plan.cols + col], 8)
            else:
                copy_async(raw[t, j, col], r[T.cast(t0 + t, "int64"), j - 1, rank * plan.cols + col], 8)
    for i in T.serial(T.ceildiv(plan.tile * hc * (hc + 1 if sources > 1 else 1), WORKERS)):
        q = i * WORKERS + tid
        if q < plan.tile * hc and t0 + q // hc < tokens:
            copy_async(coefficients[q // hc, q % hc], post[t0 + q // hc, q % hc], 1)
        elif sources > 1:
            e = q - plan.tile * hc
            if e >= 0 and e < plan.tile * hc * hc and t0 + e // (hc * hc) < tokens:
                copy_async(
                    coefficients[e // (hc * hc), hc + e % (hc * hc)], comb[t0 + e // (hc * hc), e % (hc * hc)], 1
                )
    T.ptx_commit_group()


@T.macro
def load_post(plan, collapsed, raw, coefficients, out, tile_smem, rank, t0, tokens, tid):
    """tile and out = bf16(post_k * o + sum_j comb[j, k] * r[j]); `collapsed`: bf16(post_k * o + x)."""
    hc = plan.streams
    sources = 1 if collapsed else hc
    # a buffer for each cast: TileLang reuses the value it read for an equal expression, stores in between or not
    ob = T.alloc_local((4,), "bfloat16")
    rb = T.alloc_local((4,), "bfloat16")
    kb = T.alloc_local((4,), "bfloat16")
    of = T.alloc_local((4,), "float32")
    rf = T.alloc_local((sources * 4,), "float32")
    value = T.alloc_local((4,), "float32")
    for i in T.unroll(T.ceildiv(plan.tile * plan.vecs * 2, WORKERS), unroll_factor=1):
        t = (i * WORKERS + tid) // (plan.vecs * 2)
        col = (i * WORKERS + tid) % (plan.vecs * 2) * 4
        if t < plan.tile:
            for e in T.vectorized(4):
                ob[e] = raw[t, 0, col + e]
            for e in T.vectorized(4):
                of[e] = T.cast(ob[e], "float32")
            for j in T.unroll(sources):
                for e in T.vectorized(4):
                    rb[e] = raw[t, j + 1, col + e]
                for e in T.vectorized(4):
                    rf[j * 4 + e] = T.cast(rb[e], "float32")
            for k in T.unroll(hc, unroll_factor=1):  # unrolled, its 20 coefficients would spill
                for e in T.unroll(4):
                    value[e] = coefficients[t, k] * of[e]
                    if collapsed:
                        value[e] += rf[e]
                    else:
                        for j in T.unroll(hc):
                            value[e] += coefficients[t, hc + j * hc + k] * rf[j * 4 + e]
                for e in T.vectorized(4):
                    kb[e] = T.cast(value[e], "bfloat16")
                for e in T.vectorized(4):
                    tile_smem[t, k * plan.cols + col + e] = kb[e]
                if t0 + t < tokens:
                    for e in T.vectorized(4):
                        out[t0 + t, k, rank * plan.cols + col + e] = kb[e]
