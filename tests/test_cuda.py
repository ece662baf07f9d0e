"""What `mhc.cuda` keeps between calls and how it makes outputs, on CPU tensors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from kernels.table import problem
from ops_tools import CONFIG, H, pre, pre_broadcast
from torch import Tensor

from mhc import MHCConfig, cuda, launch


def test_a_kernel_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(launch, "kernel", mock.Mock(return_value=lambda *tensors: None))
    for _ in range(3):
        pre_broadcast(problem(CONFIG, 3))
    assert launch.kernel.call_count == 1  # type: ignore[attr-defined]
    pre_broadcast(problem(CONFIG, 4))
    pre_broadcast(problem(MHCConfig(H, 3), 4))
    assert launch.kernel.call_count == 3  # type: ignore[attr-defined]


def test_a_look_up_compares_no_fields_of_equal_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer may have a config of its own, and the dispatcher makes one a call."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(launch, "kernel", lambda *name: lambda *tensors: None)
    problems = [problem(MHCConfig(H), 3) for _ in range(2)]
    assert problems[0].config.shared is problems[1].config.shared
    pre_broadcast(problems[0])
    monkeypatch.setattr(MHCConfig, "__eq__", mock.Mock(side_effect=AssertionError))
    for p in problems:
        pre_broadcast(p)


def test_a_call_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    kernel = mock.Mock(side_effect=[RuntimeError("no compiler"), lambda *tensors: None])
    monkeypatch.setattr(launch, "kernel", kernel)
    with pytest.raises(RuntimeError, match="no compiler"):
        pre(problem(CONFIG, 3))
    pre(problem(CONFIG, 3))


@pytest.mark.parametrize("shape", [(5,), (3, 4), (3, 4, 1), (0, 4, 64), (1, 8, 3, 25)])
def test_spec(shape: tuple[int, ...]) -> None:
    assert cuda.spec(torch.float32, *shape) == (shape, torch.empty(shape).stride(), torch.float32)


def test_outputs_are_made_on_the_device_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own allocation takes the current device: it happens where the launch does."""
    current: list[int] = [0]
    made: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *error: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(cuda, "allocator", lambda device: lambda *spec: made.append(current[-1]))

    def kernel(device: int, *name: Any) -> Callable[..., None]:
        return lambda *tensors: made.append(current[-1])

    call = cuda.prepared(kernel, 1, cuda._post, 3, H, 4, False)
    assert call("output", "residual", "post", "comb") == (None,)
    assert made == [1, 1]
    assert current == [0]


SPEC = cuda.spec(torch.float32, 3, 4)


def without_torchs_own() -> ModuleType:
    """`mhc.cuda` where torch's allocation is not to be found."""
    spec: Any = importlib.util.spec_from_file_location("mhc_cuda_without", cuda.__file__)
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch.dict(sys.modules, {"mhc_cuda_without": module}),
        mock.patch.dict(sys.modules, {"torch._C._dynamo.guards": ModuleType("guards")}),
    ):
        spec.loader.exec_module(module)
    return module


def test_how_an_output_is_made() -> None:
    assert cuda.allocator(1) is cuda._empty_strided_cuda is not None
    on_cpu = cuda.allocator(-1)(*SPEC)
    assert (on_cpu.device.type, tuple(on_cpu.shape), on_cpu.dtype) == ("cpu", (3, 4), torch.float32)
    with mock.patch.object(torch, "empty_strided") as public:
        without_torchs_own().allocator(1)(*SPEC)
    gpu = torch.device("cuda", 1)
    public.assert_called_once_with((3, 4), (4, 1), dtype=torch.float32, device=gpu)
