"""What is timed: for every op and implementation a closure a buffer set, and its check against fp64.

`prepare` returns closures that are ready to be timed, or raises `Skip` with the status and the reason that go into
the record. Nothing is timed that did not first agree with the fp64 formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mhc
from mhc import reference
from mhc.bench import floor, peers, timing
from mhc.bench.inputs import Buffers, Inputs
from mhc.bench.work import BLOCK_TOKENS, IMPLS, work
from mhc.config import MHCConfig

Outputs = tuple[Tensor | None, ...]
BF16 = torch.bfloat16
# worst absolute error of post and comb; the peers' projections are TF32
TOLERANCE_FP32, TOLERANCE_TF32 = 5e-5, 1e-2
STEP_BF16 = 2.0**-6  # two bf16 steps, relative, for what is rounded to bf16 twice
ROUNDING_BF16 = 1.01 * 2.0**-8  # the most that one rounding to bf16 changes a value, relative


class Skip(Exception):
    """A point that is not timed: `status` is failed, skipped or absent."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def prepare(inputs: Inputs, op: str, impl: str, tokens: int, sets: int) -> tuple[list[timing.Call], float | None]:
    """Closures for `sets` buffer sets, and the worst absolute error of post and comb on the first.

    Args:
        inputs: of the hidden size wanted.
        op, impl: see `mhc.bench.work.IMPLS`.
        tokens: T.
        sets: 1 for warm L2; `timing.cold_sets` for cold.

    Returns:
        (closures, error); the error is None for the floors, which compute nothing.

    Raises:
        Skip: the implementation is absent, raises, or is wrong.
        ValueError: op or impl is unknown.
    """
    if op not in IMPLS or impl not in IMPLS[op]:
        raise ValueError(f"op and impl must be of mhc.bench.work.IMPLS, got {op!r}, {impl!r}")
    if impl == "floor_launch":
        return [floor.launch()] * sets, None
    if impl == "floor_copy":
        return [_floor(op, inputs, tokens) for _ in range(sets)], None
    if impl == "mhc_noise_rows" and tokens % BLOCK_TOKENS:
        raise Skip("skipped", f"blocks have {BLOCK_TOKENS} rows, of which T = {tokens} is no multiple")
    buffers = inputs.buffers(tokens, sets)
    try:
        calls: list[Callable[[], Any]] = [CALLS[op](impl, inputs, b) for b in buffers]
        _poison(inputs, tokens)
        outputs = calls[0]()
    except peers.Absent as error:
        raise Skip("absent", str(error)) from error
    except NotImplementedError as error:
        raise Skip("absent", str(error)) from error
    except Exception as error:
        raise Skip("failed", f"{type(error).__name__}: {error}".splitlines()[0]) from error
    tolerance = TOLERANCE_FP32 if impl.startswith("mhc_") or impl == "torch_compile" else TOLERANCE_TF32
    if op == "first_pre":
        return calls, check(outputs, _first_expected(inputs, _first_rows(impl, buffers[0])), tolerance)
    want, slack, rest = _next_expected(op, inputs, buffers[0], outputs[0], tolerance)
    check_streams(outputs[0], want, slack)
    return calls, check(outputs, rest, tolerance)


def check_streams(got: Tensor, want: Tensor, slack: Tensor | float) -> None:
    """New streams [T, hc, H] against fp64: one rounding to bf16, and the `slack` of the post and comb behind them.

    Raises:
        Skip: a stream is further off (NaN always is).
    """
    if got.numel() != want.numel():
        raise Skip("failed", f"streams has shape {list(got.shape)}, expected {list(want.shape)}")
    off = (got.double().reshape(want.shape) - want).abs()
    # terms that cancel leave an error that is not relative to their sum
    allowed = ROUNDING_BF16 * want.abs() + slack + 2.0**-18 * want.abs().max()
    if not bool((off <= allowed).all()):
        raise Skip("failed", f"streams is off by {off.max().item():.3g}")


def check(outputs: Outputs, expected: Outputs, tolerance: float) -> float:
    """Compare (streams, post, comb, layer_input) with the fp64 formula's; None on either side is not compared.

    Returns:
        The worst absolute error of post and comb.

    Raises:
        Skip: an output is outside its tolerance (NaN always is).
    """
    worst = 0.0
    for name, got, want in zip(("streams", "post", "comb", "layer_input"), outputs, expected, strict=True):
        if got is None or want is None:
            continue
        if got.numel() != want.numel():
            raise Skip("failed", f"{name} has shape {list(got.shape)}, expected {list(want.shape)}")
        want = want.reshape(got.shape)
        off = (got.double() - want).abs()
        if got.dtype == BF16:
            excess = (off - STEP_BF16 * want.abs()).max().item()
            if not excess <= STEP_BF16 / 4:
                raise Skip("failed", f"{name} is off by {off.max().item():.3g}")
        else:
            error = off.max().item()
            if not error <= tolerance:
                raise Skip("failed", f"{name} is off by {error:.3g}, allowed {tolerance:g}")
            worst = max(worst, error)
    return worst


def _first_call(impl: str, inputs: Inputs, b: Buffers) -> Callable[[], Any]:
    config = inputs.config
    if impl in ("mhc_table", "mhc_collapsed"):
        # the norm's weight stays warm; ids, rows of embedding and table, and outputs rotate
        lookup = (b.token_ids, inputs.embedding, inputs.table, inputs.first.norm_weight, config)
        options = {"collapse": True} if impl == "mhc_collapsed" else {}
        from_table: Any = mhc.pre_from_table  # type: ignore[attr-defined,unused-ignore]
        return lambda: from_table(*lookup, **options)
    w, x = b.first, b.x
    weights = (w.fn_broadcast, w.scale, w.base, w.norm_weight, config)
    if impl == "mhc_noise_rows":
        anchors, noise = b.anchors, b.noise
        return lambda: mhc.pre_noise_rows(anchors, noise, BLOCK_TOKENS, *weights)
    if impl == "torch_compile":
        compiled = _compiled_first()
        return lambda: compiled(x, *weights)
    if impl == "mhc_repeat":
        return lambda: mhc.pre(x.unsqueeze(1).repeat(1, config.hc_mult, 1), w.fn, *weights[1:])
    if impl in ("mhc_two_launch", "mhc_fused"):
        kind = impl.removeprefix("mhc_")
        return lambda: mhc.pre_broadcast(x, *weights, impl=kind)
    makers = {
        "vllm_repeat": peers.vllm_repeat,
        "vllm_broadcast": peers.vllm_broadcast,
        "tilekernels_repeat": peers.tilekernels_repeat,
    }
    if impl not in makers:
        raise NotImplementedError(f"{impl} is not an op of this version")
    run = makers[impl](w, config)
    return lambda: run(x)


def _post_pre_call(impl: str, inputs: Inputs, b: Buffers) -> Callable[[], Any]:
    config, w = inputs.config, b.next
    state: tuple[Any, ...] = (b.output, b.streams, b.post, b.comb)
    if impl == "vllm_post_pre":
        run = peers.vllm_post_pre(w, config)
        return lambda: run(*state)
    if impl == "torch_compile":
        compiled = _compiled_post_pre()
        return lambda: compiled(*state, w.fn, w.scale, w.base, w.norm_weight, config)
    post_pre: Any = mhc.post_pre
    return lambda: post_pre(*state, w.fn, w.scale, w.base, w.norm_weight, config)


def _pair_call(impl: str, inputs: Inputs, b: Buffers) -> Callable[[], Any]:
    config, w = inputs.config, b.next
    first, output = _first_call(impl, inputs, b), b.output  # drawn now: a graph's capture may not draw
    if impl.startswith("vllm_"):
        second = peers.vllm_post_pre(w, config)
        return lambda: second(output, *first()[:3])
    next_weights = (w.fn, w.scale, w.base, w.norm_weight, config)
    # collapsed: the residual is x [T, H] and there is no comb
    post_pre: Any = mhc.post_pre
    return lambda: post_pre(output, *first()[:3], *next_weights)


CALLS = {"first_pre": _first_call, "post_pre": _post_pre_call, "first_pre_then_post_pre": _pair_call}


def _first_rows(impl: str, b: Buffers) -> Tensor:
    """[T, H], what the implementation computes the first pre of."""
    return b.blocks if impl == "mhc_noise_rows" else b.x


def _first_expected(inputs: Inputs, x: Tensor) -> Outputs:
    w, config = inputs.first, inputs.config
    _, post, comb, y = reference.pre_broadcast(x, w.fn_broadcast.double(), w.scale, w.base, w.norm_weight, config)
    return None, post, comb, y  # the streams are x itself, which no implementation computes


def _next_expected(
    op: str, inputs: Inputs, b: Buffers, streams: Tensor, tolerance: float
) -> tuple[Tensor, Tensor | float, Outputs]:
    """In fp64: the new streams, the error that post and comb may bring into them, and the pre of `streams`.

    An implementation's next pre reads its own streams as it rounded them: where an exact one rounds the other way is
    no error of the pre.
    """
    w, config = b.next, inputs.config
    if op == "post_pre":
        old, post, comb = b.streams, b.post.double().squeeze(-1), b.comb.double()
        slack: Tensor | float = 0.0  # all are inputs
    else:
        old = reference.expand(b.x, config.hc_mult)
        _, first_post, first_comb, _ = _first_expected(inputs, b.x)
        assert first_post is not None
        assert first_comb is not None
        post, comb = first_post, first_comb
        slack = tolerance * (b.output.double().abs().unsqueeze(1) + old.double().abs().sum(1, keepdim=True))
    new = reference.post(b.output.double(), old.double(), post, comb)
    read = streams.double().reshape(new.shape) if streams.numel() == new.numel() else new
    _, post, comb, y = reference.pre(read, w.fn.double(), w.scale, w.base, w.norm_weight, config)
    return new, slack, (None, post, comb, y)


def _floor(op: str, inputs: Inputs, tokens: int) -> Callable[[], object]:
    hidden, hc = inputs.config.hidden_size, inputs.config.hc_mult

    def moving(read: int, written: int) -> Callable[[], object]:
        source = torch.randn(floor.length(read), device=inputs.device).to(BF16)
        return floor.copy(source, torch.empty(floor.length(written), device=inputs.device, dtype=BF16))

    whole = work(op, "floor_copy", tokens, hidden, hc)
    if op != "first_pre_then_post_pre":
        return moving(whole.read, whole.written)
    # two copies one after the other: the sub-layer runs in between
    head = work("first_pre", "mhc_collapsed", tokens, hidden, hc)
    first, second = moving(head.read, head.written), moving(whole.read - head.read, whole.written - head.written)
    return lambda: (first(), second())


def _poison(inputs: Inputs, tokens: int) -> None:
    """Fill freed memory with NaN: an output element that a kernel does not write is then no old right answer."""
    hidden, hc = inputs.config.hidden_size, inputs.config.hc_mult
    blocks = [
        torch.full((tokens, n), float("nan"), device=inputs.device, dtype=dtype)
        for n, dtype in ((hc * hidden, BF16), (hidden, BF16), (hc, torch.float32), (hc * hc, torch.float32))
    ]
    del blocks


@cache
def _compiled_first() -> Callable[..., Outputs]:
    def first(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, config: MHCConfig) -> Outputs:
        _, post, comb, y = reference.pre_broadcast(x, fn, scale, base, weight, config)
        return reference.expand(x, config.hc_mult), post, comb, y.to(BF16)

    return torch.compile(first)  # T becomes dynamic at its second value


@cache
def _compiled_post_pre() -> Callable[..., Outputs]:
    def post_pre(
        output: Tensor, streams: Tensor, post: Tensor, comb: Tensor,
        fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, config: MHCConfig,
    ) -> Outputs:  # fmt: skip
        new = reference.post(output, streams, post.squeeze(-1), comb).to(BF16)
        _, post, comb, y = reference.pre(new, fn, scale, base, weight, config)
        return new, post, comb, y.to(BF16)

    # Inductor would let the pre read streams that were never rounded: off by more than is allowed
    return torch.compile(post_pre, options={"emulate_precision_casts": True})
