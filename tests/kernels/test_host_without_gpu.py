"""The host side of every kernel: how many launches, of what shape, and what it refuses, all without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu.launches import in_process

import mhc

from .table import OPS, Op

HIDDEN = 64
MOST_SHARED_BYTES = 232448


@pytest.fixture(scope="module")
def host() -> Any:
    return in_process(
        f"from kernels.host import launches_by_op, refusals\nresult = [launches_by_op({HIDDEN}), refusals({HIDDEN})]",
        Path(mhc.__file__).parents[1],
    )


@pytest.mark.parametrize("op", [op for op in OPS if "unnormed" not in op.name], ids=str)
def test_an_op_is_the_launches_it_promises(op: Op, host: Any) -> None:
    launches = host[0][op.name]
    assert len(launches) == op.launches
    for launch in launches:
        assert launch["shared_bytes"] <= MOST_SHARED_BYTES
        assert not launch.get("cooperative"), "grid barriers lose the cooperative attribute beside clusters and PDL"
        if "cluster" in launch:
            assert launch["cluster"] == [8, 1, 1]
            assert launch["grid"][0] % 8 == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("dtype", "dtype"),
        ("shape", "shape"),
        ("tokens", "shape|tokens"),
        ("rank", "ndim"),
        ("strides", "stride"),
        ("device", "device"),
    ],
)
def test_the_host_stub_refuses(wrong: str, says: str, host: Any) -> None:
    assert any(word in host[1][wrong] for word in says.split("|")), host[1][wrong]
