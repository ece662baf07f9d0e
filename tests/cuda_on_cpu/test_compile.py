"""Compiling for sm_90a and reading the launches, both without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from . import sample_kernels
from .compile import compile_sources, parse_ptxas
from .launches import in_process
from .lowering import SIMT, lower


def test_a_sample_compiles_without_spills() -> None:
    (kernel,) = compile_sources([lower(sample_kernels.reverse()).source])[0]
    assert kernel.kernel == "reverse_kernel_kernel"
    assert 0 < kernel.registers <= 64
    assert not kernel.spills


def test_a_forced_spill_is_seen() -> None:
    source = lower(sample_kernels.gemm(64, 256, 128), SIMT).source
    starved = re.sub(r"__launch_bounds__\([^)]*\)", "__launch_bounds__(1024, 2)", source)
    (as_is,), (spilling,) = compile_sources([source, starved])
    assert not as_is.spills
    assert spilling.spills
    assert as_is.kernel == spilling.kernel


def test_nvcc_errors_are_passed_on() -> None:
    with pytest.raises(RuntimeError, match="nvcc refused"):
        compile_sources(["__global__ void f() { undeclared(); }"])


def test_the_report_is_parsed() -> None:
    report = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    104 bytes stack frame, 164 bytes spill stores, 140 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 104 bytes cumulative stack size, 2048 bytes smem
"""
    (k,) = parse_ptxas(report)
    assert (k.registers, k.stack_bytes, k.spill_store_bytes, k.spill_load_bytes) == (32, 104, 164, 140)
    assert (k.shared_bytes, k.barriers, k.spills) == (2048, 1, True)


def test_launches_are_read() -> None:
    calls: Any = in_process(
        """
import torch
from cuda_on_cpu import sample_clusters
from cuda_on_cpu import sample_kernels as samples
from cuda_on_cpu.launches import host_stub, taken_launches

def launches(kernel, *shapes):
    host_stub(kernel)(*[torch.zeros(shape) for shape in shapes])
    return taken_launches()

result = {
    "plain": launches(samples.reverse(), (3, 96), (3, 96)),
    "two": launches(samples.two_kernels(), (3, 64), (3, 64), (3, 64)),
    "cluster": launches(sample_clusters.cluster_sum(), (3, 4, 128), (3, 4, 128)),
    "grid": launches(samples.grid_shift(), (5,), (5,), (1,), (5,)),
}
"""
    )
    assert calls["plain"] == [
        {"kernel": "reverse_kernel_kernel", "grid": [1, 1, 1], "block": [96, 1, 1], "shared_bytes": 384}
    ]
    assert [launch["grid"][0] for launch in calls["two"]] == [3, 2]
    (cluster,) = calls["cluster"]
    # a cluster launch always allows programmatic overlap, hence the kernels' pdl_sync
    assert (cluster["grid"], cluster["cluster"], cluster["pdl"]) == ([4, 3, 1], [4, 1, 1], True)
    assert calls["grid"][0]["cooperative"]
