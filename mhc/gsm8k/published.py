"""Published acceptance figures, each with what it was measured on: lengths of different harnesses do not compare."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """One published run on GSM8K; `mean_length` counts the bonus token."""

    target: str
    draft: str
    k: int
    accuracy: float | None
    mean_length: float
    setting: str
    source: str


VLLM = "5-shot completions, all 1,319 questions"
PAPER = "chat prompts, temperature 1, block 7, 500 questions"

FIGURES = (
    Published("DeepSeek-V4-Flash-0731, 2 x H20", "DSpark", 7, 0.9431, 4.386, f"{VLLM}, probabilistic", "vLLM #53972"),
    Published("Qwen3-4B-FP8", "DSpark", 7, 0.801, 3.994, f"{VLLM}, temperature 1", "vLLM's tests"),
    Published("Qwen3-4B", "DSpark", 7, None, 6.11, PAPER, "DSpark paper"),
    Published("Qwen3-8B", "DSpark", 7, None, 6.17, PAPER, "DSpark paper"),
    Published("Qwen3-14B", "DSpark", 7, None, 6.21, PAPER, "DSpark paper"),
    Published("Gemma4-12B", "DSpark", 7, None, 6.05, PAPER, "DSpark paper"),
    Published("Qwen3-4B", "Eagle3", 7, None, 5.14, PAPER, "DSpark paper"),
    Published("Qwen3-8B", "Eagle3", 7, None, 5.30, PAPER, "DSpark paper"),
    Published("Qwen3-14B", "Eagle3", 7, None, 5.24, PAPER, "DSpark paper"),
    Published("Gemma4-12B", "Eagle3", 7, None, 5.87, PAPER, "DSpark paper"),
    Published("Qwen3-4B", "DFlash", 7, None, 5.40, PAPER, "DSpark paper"),
    Published("Qwen3-8B", "DFlash", 7, None, 5.33, PAPER, "DSpark paper"),
    Published("Qwen3-14B", "DFlash", 7, None, 5.41, PAPER, "DSpark paper"),
    Published("Gemma4-12B", "DFlash", 7, None, 5.45, PAPER, "DSpark paper"),
)
