"""The first pre out of a token table: gather, scale, store. No projection, no Sinkhorn."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.gates import scale_row


def gather(config: MHCConfig, has_norm: bool, collapsed: bool, id_dtype: str):
    """ids [T], embedding [V, H], table (post [V, hc], comb [V, hc * hc], factor [V, 2]) -> the first pre's outputs.

    An id outside the vocabulary reads nothing and fills its row with NaN.

    Args:
        config: shapes and constants.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        collapsed: residual is x itself, [T, 1, H], and no comb is written; else [T, hc, H] and [T, hc * hc].
        id_dtype: of the ids, "int64" or "int32" (as servers keep them: a cast ahead would cost a launch).
    """
    hidden, hc = config.hidden_size, config.hc_mult
    copies = 1 if collapsed else hc
    threads = 128
    tokens, vocab = T.dynamic("tokens"), T.dynamic("vocab")

    @T.prim_func
    def gather_kernel(
        ids: T.Tensor((tokens,), id_dtype),
        embedding: T.Tensor((vocab, hidden), "bfloat16"),
        table_post: T.Tensor((vocab, hc), "float32"),
        table_comb: T.Tensor((vocab, hc * hc), "float32"),
        table_factor: T.Tensor((vocab, 2), "float32"),
        weight: T.Tensor((hidden,), "bfloat16"),
        residual: T.Tensor((tokens, copies, hidden), "bfloat16"),
        post: T.Tensor((tokens, hc), "float32"),
        comb: T.Tensor((tokens, hc * hc), "float32"),
        layer_input: T.Tensor((tokens, hidden), "bfloat16"),
    ):
        with T.Kernel(tokens, T.ceildiv(hidden, threads * 8), threads=threads) as (token, block):
            tid = T.get_thread_binding()
            col = (block * threads + tid) * 8
            xb = T.alloc_local((8,), "bfloat16")
            wb = T.alloc_local((8,), "bfloat16")
            factor = T.alloc_local((2,), "float32")
            T.pdl_sync()  # before any read: the kernel ahead may have been a refit of the weight
            T.pdl_trigger()
            if has_norm and col < hidden:
                for e in T.vectorized(8):
                    wb[e] = weight[col + e]
            row = T.cast(ids[token], "int64")
            known = T.bitwise_and(row >= 0, row < T.cast(vocab, "int64"))
            for e in T.unroll(8):
                xb[e] = T.cast(float("nan"), "bfloat16")
            for e in T.unroll(2):
                factor[e] = float("nan")
            if known:
                for e in T.vectorized(2):
                    factor[e] = table_factor[row, e]
            if col < hidden:
                if known:
                    for e in T.vectorized(8):
                        xb[e] = embedding[row, col + e]
                for j in T.unroll(copies):
                    for e in T.vectorized(8):
                        residual[token, j, col + e] = xb[e]
                scale_row(has_norm, xb, wb, 0, factor[0], factor[1])
                for e in T.vectorized(8):
                    layer_input[token, col + e] = xb[e]
            if block == 0 and tid < hc:
                post[token, tid] = T.if_then_else(known, table_post[row, tid], float("nan"))
            if not collapsed:  # noqa: SIM102 (known to the compiler, unlike the next)
                if block == 0 and tid < hc * hc:
                    comb[token, tid] = T.if_then_else(known, table_comb[row, tid], float("nan"))

    return gather_kernel
