"""A vLLM engine for the serving bench: how it is started, asked and counted.

The plugin is registered by vLLM itself, through its entry point; the bench only sets the environment. Everything that
needs vLLM is imported when an engine is made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mhc.bench import serving_host
from mhc.bench.serving_model import BLOCK_SIZE, SPECULATIVE_TOKENS, prompts

WORKER = "mhc.bench.serving_worker.Extension"
# one step more than a request drafts is verified: the token before the drafts
VERIFIED_TOKENS = SPECULATIVE_TOKENS + 1
MAX_MODEL_LEN = 1024
MEMORY_SHARE = 0.6  # of the GPU: the graphs of all modes and the profiler need the rest
ENVIRONMENT = {
    serving_host.SWITCH: "1",
    "MHC_POST_PRE": "ours",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's loop in this process: fewer hops, the same work
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}


@dataclass(frozen=True)
class Settings:
    """How the engine is started.

    Attributes:
        tp: GPUs, with expert parallel where more than one.
        batches: the most requests at a time and all sizes whose graphs are captured.
        graphs: whether CUDA graphs are captured at all.
        acceptance_length: of vLLM's synthetic acceptance; 0 verifies for real, where random weights accept nothing.
    """

    tp: int = 1
    batches: tuple[int, ...] = (1, 16, 64)
    graphs: bool = True
    acceptance_length: float = 0.0

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ValueError(f"tp must be at least 1, got {self.tp}")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches must be positive numbers of requests, got {self.batches}")
        if self.acceptance_length and not 1 <= self.acceptance_length <= VERIFIED_TOKENS:
            raise ValueError(
                f"acceptance_length must be 0 or between 1 and {VERIFIED_TOKENS}, got {self.acceptance_length}"
            )


def graph_sizes(batches: Sequence[int]) -> list[int]:
    """Tokens of every graph that these batches replay: the draft's 7 and the target's 8 a request."""
    return sorted({batch * tokens for batch in batches for tokens in (SPECULATIVE_TOKENS, VERIFIED_TOKENS)})


def arguments(model: Path, settings: Settings, seed: int) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    most = max(settings.batches)
    speculative: dict[str, Any] = {"method": "dspark", "num_speculative_tokens": SPECULATIVE_TOKENS}
    if settings.acceptance_length:
        speculative |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": settings.acceptance_length,
        }
    given: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "kv_cache_dtype": "fp8",
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": most,
        # vLLM keeps a slot for every token that a draft may add
        "max_num_batched_tokens": max(1024, 2 * VERIFIED_TOKENS * most),
        "enforce_eager": not settings.graphs,
        "gpu_memory_utilization": MEMORY_SHARE,
        "enable_prefix_caching": False,  # every round computes the same
        "disable_log_stats": False,  # acceptance is read from the metrics
        "seed": seed,
        "worker_extension_cls": WORKER,
        "kernel_config": {"linear_backend": "auto", "enable_flashinfer_autotune": False},
        "speculative_config": speculative,
    }
    if settings.graphs:
        given["compilation_config"] = {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graph_sizes(settings.batches),
        }
    if settings.tp > 1:
        given |= {
            "tensor_parallel_size": settings.tp,
            "enable_expert_parallel": True,
            "disable_custom_all_reduce": True,
        }
    return given


@dataclass(frozen=True)
class Generated:
    """One batch: its wall time and every request's new tokens."""

    time_s: float
    tokens: list[list[int]]

    @property
    def tok_s(self) -> float:
        return sum(map(len, self.tokens)) / self.time_s


class Engine(Protocol):
    """What the bench asks of an engine; tests have one without a GPU."""

    def generate(self, batch: int, tokens: int, seed: int) -> Generated:
        """Serve `batch` prompts greedily until each has `tokens` new tokens."""

    def next_logprobs(self, prompt: list[int]) -> dict[int, float]:
        """The likeliest next tokens of one prompt and their log-probabilities."""

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker extension on all ranks; the first rank's answer."""

    def accepted(self) -> dict[str, float]:
        """vLLM's counters of speculative decoding since its start."""


class VllmEngine:
    """A real engine.

    Args:
        model: a folder with config.json.
        settings: how to start it.
        seed: of vLLM and of the prompts.
        prompt_tokens: length of a prompt.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """

    def __init__(self, model: Path, settings: Settings, seed: int, prompt_tokens: int) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm

        self._vllm, self._prompt_tokens = vllm, prompt_tokens
        self._llm = vllm.LLM(**arguments(model, settings, seed))

    def generate(self, batch: int, tokens: int, seed: int) -> Generated:
        wanted = [{"prompt_token_ids": prompt} for prompt in prompts(batch, self._prompt_tokens, seed)]
        greedy = self._vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = self._llm.generate(wanted, greedy, use_tqdm=False)
        time_s = time.perf_counter() - start
        return Generated(time_s, [list(output.outputs[0].token_ids) for output in outputs])

    def next_logprobs(self, prompt: list[int]) -> dict[int, float]:
        one = self._vllm.SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
        output = self._llm.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)[0]
        return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}

    def call(self, method: str, *args: Any) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def accepted(self) -> dict[str, float]:
        prefix = "vllm:spec_decode_"
        return {
            metric.name.removeprefix(prefix): float(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name.startswith(prefix) and hasattr(metric, "value")
        }
