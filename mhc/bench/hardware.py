"""The two limits that every timing is held against, measured on this GPU: copy bandwidth and an empty launch."""

from __future__ import annotations

from statistics import median

import torch

from mhc.bench import floor
from mhc.bench.timing import GraphTimer

COPY_BYTES = 2 << 30  # far above any L2
LAUNCHES = 40


def copy_bandwidth_gbs(nbytes: int = COPY_BYTES, samples: int = 15) -> float:
    """GB/s of a large device-to-device copy by a kernel, counting bytes read plus bytes written; median.

    Not `copy_`: a graph turns it into a memcpy node, which reached two thirds of what kernels reach on an H200.

    Raises:
        RuntimeError: no CUDA GPU.
    """
    _need_gpu()
    source = torch.randn(nbytes // 4, device="cuda")
    target = torch.empty_like(source)
    timer = GraphTimer([lambda: torch.mul(source, 1.0, out=target)], repeats=4)
    return 2 * nbytes / (median(timer.sample(samples)) * 1e3)


def empty_launch_us(samples: int = 50) -> float:
    """Time of an empty kernel inside a graph of empty kernels, us; median.

    Raises:
        RuntimeError: no CUDA GPU.
    """
    _need_gpu()
    return median(GraphTimer([floor.launch()], repeats=LAUNCHES).sample(samples))


def limits() -> dict[str, float]:
    """Both, under the names that a record's run line gives them."""
    return {"copy_bandwidth_gbs": copy_bandwidth_gbs(), "empty_launch_us": empty_launch_us()}


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA GPU here: run this on a machine with one, or replay a record")
