"""The host side of every op in a process without a driver; run there by `test_host_without_gpu.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from cuda_on_cpu.launches import host_stub, taken_launches

from mhc import launch
from mhc.config import MHCConfig
from mhc.kernels.parts import PASS_CONFIGS

from .table import OPS, problem

TOKENS = 65


@functools.cache
def stub(device: int, *variant: Any) -> Any:
    """Stands in for `mhc.launch.kernel`."""
    return host_stub(launch.prim_func(*variant), PASS_CONFIGS)


def launches_by_op(hidden: int) -> dict[str, list[dict[str, Any]]]:
    """What each op asks the driver for."""
    launch.kernel = stub
    p = problem(MHCConfig(hidden), TOKENS)
    found = {}
    for op in OPS:
        if "unnormed" not in op.name:
            op.call(p)
            found[op.name] = taken_launches()
    return found


def refusals(hidden: int) -> dict[str, str]:
    """The errors of calls of the post kernel with one argument changed; none may launch."""
    p = problem(MHCConfig(hidden), TOKENS)
    out = torch.empty_like(p.residual)
    good = [p.output, p.residual, p.post, p.comb, out]
    run = stub(0, "post", hidden, p.config.hc_mult, False)
    run(*good)
    assert len(taken_launches()) == 1

    class OnCpu:
        """Keeps a tensor from passing for a CUDA tensor."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return p.output.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            return p.output.__dlpack__(**options)

    import tvm_ffi

    bad: dict[str, Any] = {
        "dtype": p.output.float(),
        "shape": p.output[:, : hidden // 2].contiguous(),
        "tokens": p.output[1:].contiguous(),
        "rank": p.output.unsqueeze(0),
        "strides": p.output.T.contiguous().T,
        "device": tvm_ffi.from_dlpack(OnCpu()),
    }
    errors = {}
    for name, argument in bad.items():
        try:
            run(argument, *good[1:])
        except Exception as error:
            errors[name] = str(error)
        assert not taken_launches(), name
    return errors
