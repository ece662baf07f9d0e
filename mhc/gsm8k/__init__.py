"""GSM8K: data, prompts, scoring, acceptance statistics, and two engines that answer it."""

from mhc.gsm8k.data import Problem, load
from mhc.gsm8k.prompts import extract, gold, prompt, prompts
from mhc.gsm8k.stats import (
    Acceptance,
    Interval,
    mcnemar_exact,
    mean_length_interval,
    paired_length_difference,
    ratio_interval,
    reliability,
    wilson,
)

__all__ = [
    "Acceptance",
    "Interval",
    "Problem",
    "extract",
    "gold",
    "load",
    "mcnemar_exact",
    "mean_length_interval",
    "paired_length_difference",
    "prompt",
    "prompts",
    "ratio_interval",
    "reliability",
    "wilson",
]
