"""Decoding, plain or with a draft: the same prefill, the same random streams, the same output distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from mhc.dspark.batch import Batch, Completion
from mhc.dspark.draft import DSparkDraft
from mhc.dspark.prefill import prefill
from mhc.dspark.rounds import Settings, draft_round, first_token, plain_round
from mhc.dspark.target import Target

COLDEST = 1e-5  # below it logits / temperature could overflow fp32
SYNC_EVERY = 8  # rounds between looks at whether all requests are done


@torch.no_grad()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    *,
    draft: DSparkDraft | None = None,
    block_size: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    request_ids: Sequence[int] | None = None,
    expansion: str = "broadcast",
    confidence_threshold: float = 0.0,
    prefix: Sequence[int] = (),
    batch_size: int | None = None,
    width: int = 1,
    capture: bool = False,
    trace: bool = False,
    progress: bool = False,
) -> list[Completion]:
    """Complete every prompt; with a draft faster, never differently.

    Random numbers are keyed by seed, request id and position, so a request's result depends neither on its place in
    the batch nor on its neighbours (up to floating-point differences between batch shapes).

    Args:
        target: in inference mode, on its device.
        prompts: token ids, each prompt at least one token.
        max_new_tokens: limit of each completion.
        draft: bound to `target`; None decodes plainly.
        block_size: `k`, by default the draft's own.
        temperature: 0 is greedy.
        seed: of all random streams, 0 to 2^64 - 1.
        request_ids: keys of the requests' streams, by default 0, 1, 2, ...
        expansion: how the draft's first layer gets its streams.
        confidence_threshold: drafted tokens from the first one less confident than this are not verified; 0 keeps all.
        prefix: tokens before every prompt, run once and copied to every request's caches.
        batch_size: requests a batch, by default all.
        width: rows of a plain step. `block_size + 1` gives it the shapes of verification, and with them its rounding:
            greedy texts can then be compared token by token in bf16.
        capture: replay a round as a CUDA graph (CUDA only).
        trace: keep every round's drafted tokens, confidences and outcome in `Completion.rounds`.
        progress: show a bar over the batches.

    Returns:
        One completion a prompt, in order.

    Raises:
        ValueError: naming the argument, its value and what is accepted.
    """
    ids = list(range(len(prompts))) if request_ids is None else list(request_ids)
    size = 0 if draft is None else draft.config.block_size if block_size is None else block_size
    settings = Settings(temperature, seed, size, confidence_threshold, expansion, width)
    _check(target, draft, prompts, prefix, ids, max_new_tokens, batch_size, capture, settings)
    completions: list[Completion] = []
    step = batch_size or max(len(prompts), 1)
    for first in tqdm(range(0, len(prompts), step), disable=not progress, unit="batch"):
        part = prompts[first : first + step]
        caches, logits, positions = prefill(target, draft, part, prefix, max_new_tokens + max(size + 1, width))
        batch = Batch(ids[first : first + step], positions, max_new_tokens, target.config.eos_token_id, size, trace)
        first_token(batch, logits, settings)

        def one_round(caches=caches, batch=batch) -> None:  # type: ignore[no-untyped-def]
            if draft is None:
                plain_round(target, caches, batch, settings)
            else:
                draft_round(target, draft, caches, batch, settings)

        _drive(one_round, batch, capture)
        completions += batch.completions()
    return completions


def _drive(one_round: Callable[[], None], batch: Batch, capture: bool) -> None:
    """Run rounds until every request is done: at most one a token."""
    run = one_round
    for done in range(batch.max_new_tokens):
        if done % SYNC_EVERY == 0 and not batch.live.any():
            break
        if capture and done == 3:  # three ordinary rounds have warmed kernels and allocator up
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one_round()
            run = graph.replay
        run()


def _check(
    target: Target,
    draft: DSparkDraft | None,
    prompts: Sequence[Sequence[int]],
    prefix: Sequence[int],
    ids: list[int],
    max_new_tokens: int,
    batch_size: int | None,
    capture: bool,
    settings: Settings,
) -> None:
    vocabulary, device = target.config.vocab_size, target.embed.weight.device
    for index, prompt in enumerate([prefix, *prompts]):
        name = f"prompts[{index - 1}]" if index else "prefix"
        if index and not prompt:
            raise ValueError(f"{name} must hold at least one token, got none")
        bad = [token for token in prompt if not 0 <= token < vocabulary]
        if bad:
            raise ValueError(f"{name} must hold token ids from 0 to {vocabulary - 1}, got {bad[0]}")
    if len(ids) != len(prompts) or len(set(ids)) != len(ids):
        raise ValueError(
            f"request_ids must be {len(prompts)} different ints, got {len(ids)}, {len(set(ids))} different"
        )
    at_least_one = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "width": settings.width}
    if draft is not None:
        at_least_one["block_size"] = settings.block_size
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if settings.temperature != 0 and not COLDEST <= settings.temperature < math.inf:
        raise ValueError(f"temperature must be 0 or finite and at least {COLDEST}, got {settings.temperature}")
    if not 0 <= settings.confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold must be 0 to 1, got {settings.confidence_threshold}")
    if capture and device.type != "cuda":
        raise ValueError(f"capture needs a model on a CUDA device, got {device}")
    if draft is not None and draft.shared is not target:
        raise ValueError("draft must be bound to target: call draft.bind(target)")
