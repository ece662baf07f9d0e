"""What a kernel on materialised streams takes and returns: `streams` and `quad` differ in what is between."""

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import flat


def of_streams(config: MHCConfig, tokens, source: str, body):
    """The kernel of a body.

    Args:
        config: shapes and constants.
        tokens: T, the dynamic size that `body` uses.
        source: `pre`, `post_pre` or `post_pre_collapsed`, see `streams`.
        body: a macro of (o, r, old post, old comb, fn, scale, base, weight, new streams, post, comb, layer_input); what
            the source has not is None, and the one embedding that all streams are is r [T, H].
    """
    hidden, hc, rows = config.hidden_size, config.hc_mult, config.mix_rows

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*shape, dtype="float32"):
        return lambda: T.Tensor(shape, dtype)

    stream_type, row_type = tensor(tokens, hc, hidden, dtype="bfloat16"), tensor(tokens, hidden, dtype="bfloat16")
    post_type, comb_type = tensor(tokens, hc, 1), tensor(tokens, hc, hc)
    fn_type, weight_type = tensor(rows, hc * hidden), tensor(hidden, dtype="bfloat16")
    scale_type, base_type = tensor(3), tensor(rows)

    if source == "pre":

        @T.prim_func
        def pre_kernel(
            r: stream_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            weight: weight_type(),
            post: post_type(),
            comb: comb_type(),
            layer_input: row_type(),
        ):
            body(None, r, None, None, fn, scale, base, weight, None, *flat(config, tokens, post, comb), layer_input)

        return pre_kernel

    if source == "post_pre_collapsed":

        @T.prim_func
        def post_pre_collapsed_kernel(
            o: row_type(),
            x: row_type(),
            old_post: T.Tensor((tokens, hc), "float32"),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            weight: weight_type(),
            out: stream_type(),
            post: post_type(),
            comb: comb_type(),
            layer_input: row_type(),
        ):
            body(o, x, old_post, None, fn, scale, base, weight, out, *flat(config, tokens, post, comb), layer_input)

        return post_pre_collapsed_kernel

    @T.prim_func
    def post_pre_kernel(
        o: row_type(),
        r: stream_type(),
        old_post: post_type(),
        old_comb: comb_type(),
        fn: fn_type(),
        scale: scale_type(),
        base: base_type(),
        weight: weight_type(),
        out: stream_type(),
        post: post_type(),
        comb: comb_type(),
        layer_input: row_type(),
    ):
        body(
            o,
            r,
            *flat(config, tokens, old_post, old_comb),
            fn,
            scale,
            base,
            weight,
            out,
            *flat(config, tokens, post, comb),
            layer_input,
        )

    return post_pre_kernel
