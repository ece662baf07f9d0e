"""Figures that others published and an earlier run of ours, as tables; none of them has a record with samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PublishedRange:
    """An eager time that was published as a range over T = 1 to 256."""

    impl: str
    low_us: float
    high_us: float

    @property
    def middle_us(self) -> float:
        return (self.low_us + self.high_us) / 2


H20_SOURCE = "vLLM pull request 53972, NVIDIA H20, H = 4096, T = 1 to 256, eager"
H20_EAGER = (PublishedRange("vllm_repeat", 105.72, 110.11), PublishedRange("vllm_broadcast", 68.18, 73.23))
H20_SPEEDUP = 1.512
H20_TOKENS = (1, 256)

# the same pull request's serving result: two H20s, tensor and expert parallel, 16 prompts x 128 tokens, 8 repeats
SERVING_SOURCE = "vLLM pull request 53972, two NVIDIA H20, TP 2 + EP, 16 prompts x 128 tokens, 8 repeats, no interval"
SERVING_TOK_S = {"mean": (751.73, 769.06), "median": (756.52, 772.00)}
SERVING_LATENCY_S = (2.7071, 2.6528)
SERVING_ACCEPTANCE = (0.875, 0.884)
SERVING_PROMPTS, SERVING_TOKENS, SERVING_DRAFT_TOKENS = 16, 128, 7

# the GPU's data sheet: multiprocessors and peak memory bandwidth
H20_SM_COUNT, H20_PEAK_GBS = 78, 4000.0
H200_PEAK_GBS = 4800.0

PRIOR_SOURCE = (
    "earlier run on one NVIDIA H200 (torch 2.11, vLLM 0.26.0, H = 4096, graph replay of 40 calls, warm L2): "
    "medians only, samples not kept"
)
PRIOR_EMPTY_LAUNCH_US = 0.63
PRIOR_COPY_GBS = 4300.0
# host time of an eager call, low and high
PRIOR_HOST_US = {"vllm_repeat": (100.0, 190.0), "vllm_broadcast": (55.0, 105.0)}
PRIOR_EAGER_US = {"vllm_repeat": (85.0, 200.0), "vllm_broadcast": (25.0, 95.0)}
_PRIOR_FIRST = {
    "T": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096),
    "vllm_repeat": (9.84, 10.91, 11.23, 12.46, 13.95, 17.05, 24.24, 37.39, 65.05, 245.2),
    "vllm_broadcast": (6.80, 6.81, 7.09, 7.45, 8.06, 8.65, 10.14, 14.13, 21.48, 70.84),
    "floor_copy": (1.24, 1.29, 1.35, 1.49, 1.67, 2.09, 3.00, 4.61, 12.65, 48.8),
}
_PRIOR_PAIR = {
    "T": (1, 16, 64, 256, 1024, 4096),
    "vllm_repeat": (16.2, 19.6, 23.5, 38.9, 105.9, 409.0),
    "vllm_broadcast": (13.4, 16.2, 18.4, 25.1, 63.5, 239.0),
}

PRIOR_SERVING_SOURCE = (
    "earlier sketch on NVIDIA H200s with vLLM 0.26.0 and the model of `mhc/bench/serving_model.py`: means with "
    "standard errors of 200 alternating replays, samples not kept"
)
# (GPUs, draft tokens): whole draft step, saved by removing the repeat, its standard error, us
PRIOR_SAVED_US = {
    (1, 7): (1652.0, 5.4, 0.5),
    (1, 112): (3408.7, 6.4, 0.4),
    (1, 448): (7075.3, 24.8, 0.9),
    (2, 112): (4176.9, 8.3, 0.8),
}
PRIOR_ENGINE_STEP_US = {112: 10600.0, 448: 18000.0}  # one GPU, 4 target layers


def prior_saved() -> pd.DataFrame:
    """The sketch in the columns of `serving_stats.saved`, with `tp`; 95 % intervals from its standard errors."""
    import pandas as pd

    rows = [
        (tokens, "vllm_kernel", step, saved, saved - 1.96 * se, saved + 1.96 * se, saved / step, 200, tp)
        for (tp, tokens), (step, saved, se) in PRIOR_SAVED_US.items()
    ]
    columns = ["T", "impl", "step_us", "saved_us", "low_us", "high_us", "share", "n", "tp"]
    return pd.DataFrame(rows, columns=columns)


def prior() -> pd.DataFrame:
    """The earlier run: columns op, impl, T, H, time_us."""
    import pandas as pd

    frames = [
        pd.DataFrame(table).melt("T", var_name="impl", value_name="time_us").assign(op=op, H=4096)
        for op, table in (("first_pre", _PRIOR_FIRST), ("first_pre_then_post_pre", _PRIOR_PAIR))
    ]
    return pd.concat(frames, ignore_index=True)[["op", "impl", "T", "H", "time_us"]]
