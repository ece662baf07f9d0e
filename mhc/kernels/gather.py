"""The first pre out of a token table: gather, scale, store. No projection, no Sinkhorn."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.gates import scale_row
from mhc.kernels.parts import flat


def gather(config: MHCConfig, has_norm: bool, collapsed: bool, id_dtype: str):
    """ids [T], embedding [V, H], table (post [V, hc], comb [V, hc * hc], factor [V, 2]) -> the first pre's outputs.

    An id outside the vocabulary reads nothing and fills its row with NaN.

    Args:
        config: shapes and constants.
        has_norm: whether the layer input is RMS-normed (else `weight` is not read).
        collapsed: residual is x itself, [T, H], post is [T, hc] and no comb is taken or returned; else they are
            [T, hc, H], [T, hc, 1] and [T, hc, hc].
        id_dtype: of the ids, "int64" or "int32" (as servers keep them: a cast ahead would cost a launch).
    """
    hidden, hc = config.hidden_size, config.hc_mult
    copies = 1 if collapsed else hc
    threads = 128
    shares = -(-hidden // (threads * 8))  # blocks a token, 8 columns a thread
    tokens, vocab = T.dynamic("tokens"), T.dynamic("vocab")

    @T.macro
    def body(ids, embedding, table_post, table_comb, table_factor, weight, residual, post, comb, layer_input):
        # blocks of one token are adjacent: what is written at a time lies together
        with T.Kernel(tokens * shares, threads=threads) as block:
            tid = T.get_thread_binding()
            token = T.cast(block // shares, "int64")  # or a row's offset would leave 32 bits
            share = block % shares
            col = (share * threads + tid) * 8
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
            if share == 0 and tid < hc:
                post[token, tid] = T.if_then_else(known, table_post[row, tid], float("nan"))
            if not collapsed:  # noqa: SIM102 (known to the compiler, unlike the next)
                if share == 0 and tid < hc * hc:
                    comb[token, tid] = T.if_then_else(known, table_comb[row, tid], float("nan"))

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*shape, dtype="float32"):
        return lambda: T.Tensor(shape, dtype)

    ids_type, row_type = tensor(tokens, dtype=id_dtype), tensor(tokens, hidden, dtype="bfloat16")
    embedding_type, weight_type = tensor(vocab, hidden, dtype="bfloat16"), tensor(hidden, dtype="bfloat16")
    post_type, comb_type, factor_type = tensor(vocab, hc), tensor(vocab, hc * hc), tensor(vocab, 2)

    if collapsed:

        @T.prim_func
        def gather_collapsed_kernel(
            ids: ids_type(),
            embedding: embedding_type(),
            table_post: post_type(),
            table_factor: factor_type(),
            weight: weight_type(),
            residual: row_type(),
            post: T.Tensor((tokens, hc), "float32"),
            layer_input: row_type(),
        ):
            body(
                ids,
                embedding,
                table_post,
                table_post,
                table_factor,
                weight,
                T.reshape(residual, (tokens, 1, hidden)),
                post,
                post,
                layer_input,
            )

        return gather_collapsed_kernel

    @T.prim_func
    def gather_kernel(
        ids: ids_type(),
        embedding: embedding_type(),
        table_post: post_type(),
        table_comb: comb_type(),
        table_factor: factor_type(),
        weight: weight_type(),
        residual: T.Tensor((tokens, hc, hidden), "bfloat16"),
        post: T.Tensor((tokens, hc, 1), "float32"),
        comb: T.Tensor((tokens, hc, hc), "float32"),
        layer_input: row_type(),
    ):
        body(
            ids,
            embedding,
            table_post,
            table_comb,
            table_factor,
            weight,
            residual,
            *flat(config, tokens, post, comb),
            layer_input,
        )

    return gather_kernel
