"""The post map alone: `reference.post` and `reference.post_collapsed`."""

import tilelang.language as T


def post_map(hidden: int, hc: int, collapsed: bool):
    """o [T, H], r [T, hc, H], post [T, hc, 1], comb [T, hc, hc] -> out [T, hc, H].

    With `collapsed` o, x [T, H] and post [T, hc].
    """
    threads = 128
    sources = 1 if collapsed else hc
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, post, comb, out):
        with T.Kernel(tokens, T.ceildiv(hidden, threads * 8), threads=threads) as (token, block):
            col = (block * threads + T.get_thread_binding()) * 8
            ob = T.alloc_local((8,), "bfloat16")
            rb = T.alloc_local((sources * 8,), "bfloat16")
            kb = T.alloc_local((8,), "bfloat16")
            value = T.alloc_local((1,), "float32")
            if col < hidden:
                for e in T.vectorized(8):
                    ob[e] = o[token, col + e]
                for j in T.unroll(sources):
                    for e in T.vectorized(8):
                        rb[j * 8 + e] = r[token, j, col + e]
                for k in T.unroll(hc):
                    # r'[k] = post_k * o + sum_j comb[j, k] * r[j]
                    for e in T.unroll(8):
                        value[0] = post[token, k] * T.cast(ob[e], "float32")
                        if collapsed:
                            value[0] += T.cast(rb[e], "float32")
                        else:
                            for j in T.unroll(hc):
                                value[0] += comb[token, j * hc + k] * T.cast(rb[j * 8 + e], "float32")
                        kb[e] = T.cast(value[0], "bfloat16")
                    for e in T.vectorized(8):
                        out[token, k, col + e] = kb[e]

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def row_type():
        return T.Tensor((tokens, hidden), "bfloat16")

    def stream_type():
        return T.Tensor((tokens, hc, hidden), "bfloat16")

    if collapsed:

        @T.prim_func
        def post_collapsed_kernel(
            o: row_type(), x: row_type(), post: T.Tensor((tokens, hc), "float32"), out: stream_type()
        ):
            body(o, T.reshape(x, (tokens, 1, hidden)), post, post, out)

        return post_collapsed_kernel

    @T.prim_func
    def post_kernel(
        o: row_type(),
        r: stream_type(),
        post: T.Tensor((tokens, hc, 1), "float32"),
        comb: T.Tensor((tokens, hc, hc), "float32"),
        out: stream_type(),
    ):
        # views in torch would cost host time
        body(o, r, T.reshape(post, (tokens, hc)), T.reshape(comb, (tokens, hc * hc)), out)

    return post_kernel
