"""What the public ops refuse, and the path of an eager CUDA call around the dispatcher, on CPU tensors."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.table import problem
from ops_tools import CALLS, CONFIG, layout, pre, pre_broadcast, tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mhc
from mhc import MHCConfig, cuda, launch, ops

# ---- what is refused ----

STRIDED = "must be contiguous, got strides"
REFUSED: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("pre", "residual", lambda t: t.float(), r"residual must be bfloat16 \[T, 4, 64\], got float32 \[3, 4, 64\]"),
    ("pre", "residual", lambda t: t[:, :2], r"residual must be bfloat16 \[T, 4, 64\], got bfloat16 \[3, 2, 64\]"),
    ("pre", "residual", lambda t: t.mT.contiguous().mT, f"residual {STRIDED}"),
    ("pre", "fn", lambda t: t[:-1], r"fn must be float32 \[24, 256\], got float32 \[23, 256\]"),
    ("pre", "fn", lambda t: t.to("meta"), "fn must be on cpu, got meta"),
    ("pre", "norm_weight", lambda t: t.float(), r"norm_weight must be bfloat16 \[64\], got float32 \[64\]"),
    ("pre_broadcast", "x", lambda t: t.double(), r"x must be bfloat16 \[T, 64\], got float64 \[3, 64\]"),
    ("pre_broadcast", "x", lambda t: t.repeat(1, 2)[:, ::2], f"x {STRIDED}"),
    ("pre_broadcast", "scale", lambda t: t[:1], r"scale must be float32 \[3\], got float32 \[1\]"),
    ("pre_broadcast", "base", lambda t: t.to("meta"), "base must be on cpu, got meta"),
    ("pre_broadcast-collapse", "base", lambda t: t[:8], r"base must be float32 \[24\], got float32 \[8\]"),
    ("post", "output", lambda t: t.float(), r"output must be bfloat16 \[T, H\], got float32 \[3, 64\]"),
    ("post", "residual", lambda t: t[:2], r"residual must be bfloat16 \[3, hc, 64\], got bfloat16 \[2, 4, 64\]"),
    ("post", "post", lambda t: t.squeeze(-1), r"post must be float32 \[3, 4, 1\], got float32 \[3, 4\]"),
    ("post", "comb", lambda t: t.flatten(1), r"comb must be float32 \[3, 4, 4\], got float32 \[3, 16\]"),
    ("post", "comb", lambda t: t.mT, f"comb {STRIDED}"),
    ("post-collapsed", "x", lambda t: t[:, :32], r"residual must be bfloat16 \[3, 64\], got bfloat16 \[3, 32\]"),
    ("post_pre", "comb", lambda t: t.to("meta"), "comb must be on cpu, got meta"),
    ("post_pre", "base", lambda t: t.bfloat16(), r"base must be float32 \[24\], got bfloat16 \[24\]"),
    (
        "post_pre-collapsed",
        "post",
        lambda t: t[:, :2].clone(),
        r"output and post .* H 64 and hc 4, got .* \[3, 2\]",
    ),
    ("head", "head_fn", lambda t: t[:2], r"fn must be float32 \[4, 256\], got float32 \[2, 256\]"),
    ("head", "head_scale", lambda t: t.repeat(3), r"scale must be float32 \[1\], got float32 \[3\]"),
    ("head", "head_base", lambda t: t.double(), r"base must be float32 \[4\], got float64 \[4\]"),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors that pass for CUDA ones; kernels that note their name and write nothing."""
    names: list[str] = []
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(launch, "kernel", lambda device, *name: lambda *tensors: names.append(name[0]))
    return names


@pytest.fixture(params=["torch's own allocation", "the public one"])
def allocated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way to make an output."""
    if request.param == "torch's own allocation":
        guards: Any = importlib.import_module("torch._C._dynamo.guards")
        monkeypatch.setattr(cuda, "allocator", lambda device: guards._empty_strided_cpu)


@pytest.mark.parametrize("eager_cuda", [False, True])
@pytest.mark.parametrize(("name", "argument", "change", "message"), REFUSED)
def test_refused(
    name: str, argument: str, change: Any, message: str, eager_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(CONFIG, 3)
    p = dataclasses.replace(p, **{argument: change(getattr(p, argument))})
    if eager_cuda:  # the host stub refuses first, in its own words
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr(launch, "kernel", lambda *name: refusing_stub)
    with pytest.raises(ValueError, match=message):
        CALLS[name](p)


def refusing_stub(*args: Any) -> None:
    raise TypeError("kernel: argument 0 does not fit")


def test_a_kernel_that_fails_on_good_arguments_says_why_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(launch, "kernel", lambda *name: refusing_stub)
    with pytest.raises(TypeError, match="argument 0 does not fit"):
        pre(problem(CONFIG, 3))


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"impl": "deepgemm"}, "auto, fused, two_launch, reference, got 'deepgemm'"),
        ({"impl": ""}, "auto, fused, two_launch, reference, got ''"),
        ({"impl": "two_launch", "collapse": True}, "auto, fused, reference, got 'two_launch'"),
    ],
)
def test_unknown_impl(options: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ValueError, match=f"impl must be one of {accepted}"):
        pre_broadcast(problem(CONFIG, 1), **options)


def test_post_pre_of_another_hidden_size() -> None:
    p, wide = problem(CONFIG, 2), problem(MHCConfig(128), 2)
    with pytest.raises(ValueError, match=r"output and post must be of H 64 and hc 4, got \[2, 128\]"):
        mhc.post_pre(wide.output, wide.residual, wide.post, wide.comb, p.fn, p.scale, p.base, p.norm_weight, CONFIG)


# ---- around the dispatcher ----

KERNELS = {
    "pre": ["streams"],
    "pre_broadcast": ["fused"],
    "pre_broadcast-two_launch": ["project", "finish"],
    "pre_broadcast-collapse": ["fused"],
    "post": ["post"],
    "post-collapsed": ["post"],
    "post_pre": ["streams"],
    "post_pre-collapsed": ["streams"],
    "head": ["streams"],
    "table": ["gather"],
    "table-collapse": ["gather"],
    "noise_rows": ["fused", "gather"],
}


UNNORMED = ("pre", "pre_broadcast", "post_pre", "table")


@pytest.mark.parametrize("name", [*KERNELS, *(f"{name}-unnormed" for name in UNNORMED)])
def test_an_eager_call_goes_straight_to_the_kernels(
    name: str, launched: list[str], allocated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(CONFIG, 3)
    monkeypatch.setattr(torch.ops, "mhc", None)  # whoever asks the dispatcher fails
    got = CALLS[name](p)
    assert launched == KERNELS[name.removesuffix("-unnormed")]
    monkeypatch.undo()
    assert layout(got) == layout(CALLS[name](p))


def test_every_output_is_a_tensor_of_its_own(launched: list[str], allocated: None) -> None:
    p = problem(CONFIG, 3)
    outputs = [t for _ in range(2) for t in pre_broadcast(p)]
    assert len({t.untyped_storage().data_ptr() for t in outputs}) == len(outputs)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in outputs)
    with torch.inference_mode():
        assert all(t.is_inference() for t in pre_broadcast(p))


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "noise_rows"])
def test_an_empty_call_is_checked_and_launches_nothing(name: str, launched: list[str]) -> None:
    assert all(t is None or not t.numel() for t in tensors(CALLS[name](problem(CONFIG, 0))))
    assert not launched


def test_reference_on_cuda_launches_nothing(launched: list[str]) -> None:
    pre_broadcast(problem(CONFIG, 3), impl="reference")
    assert not launched


ARGUMENTS = {
    "pre": ("residual", "fn", "scale", "base", "norm_weight"),
    "pre_broadcast": ("x", "scale", "base", "norm_weight"),
    "pre_broadcast-collapse": ("x", "scale", "base", "norm_weight"),
    "post": ("output", "residual", "post", "comb"),
    "post_pre": ("output", "residual", "post", "comb", "fn", "scale", "base", "norm_weight"),
    "head": ("residual", "head_fn", "head_scale", "head_base"),
    "table": ("embedding", "norm_weight"),
}
TRAINABLE = [(name, argument) for name, arguments in ARGUMENTS.items() for argument in arguments]


@pytest.mark.parametrize(("name", "argument"), TRAINABLE)
@pytest.mark.parametrize("eager_cuda", [False, True])
def test_a_gradient_is_never_lost_in_silence(
    name: str, argument: str, eager_cuda: bool, request: pytest.FixtureRequest
) -> None:
    """The ops have no gradient: whoever wants one hears so in backward, on either device."""
    p = problem(CONFIG, 3)
    getattr(p, argument).requires_grad_()
    if eager_cuda:
        request.getfixturevalue("launched")
    first = CALLS[name](p)
    last = first if isinstance(first, Tensor) else first[-1]
    assert last.requires_grad
    with pytest.raises((RuntimeError, NotImplementedError), match=r"mhc\.\w+.* no autograd formula"):
        last.sum().backward()
    with torch.no_grad():
        assert not tensors(CALLS[name](p))[-1].requires_grad  # type: ignore[union-attr]


def test_direct_needs_an_eager_cuda_tensor_without_gradient(launched: list[str]) -> None:
    x, weight = torch.zeros(2), torch.zeros(2, requires_grad=True)

    class Subclass(Tensor): ...

    assert ops._direct(x, None)
    assert not ops._direct(x, weight)
    assert not ops._direct(weight)
    assert not ops._direct(x.as_subclass(Subclass))
    assert not ops._direct(x[:0])
    with torch.no_grad():
        assert ops._direct(x, weight)
        assert ops._direct(torch.nn.Parameter(x))


class Seen(TorchDispatchMode):
    """Notes the ops of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mhc":
            self.names.append(func._opname)
        return func(*args, **kwargs or {})


def test_a_dispatch_mode_sees_the_op(launched: list[str]) -> None:
    """As it would any other: FLOP counters, fake tensors and tracers are such modes."""
    p = problem(CONFIG, 3)
    with Seen() as seen, torch.no_grad():
        assert not ops._direct(p.x)
        pre(p)
    assert seen.names == ["pre"]
    assert launched == ["streams"]
