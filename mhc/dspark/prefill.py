"""Prefill of ragged prompts, in column chunks, with a shared prefix run only once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mhc.dspark.cache import LatentCache
from mhc.dspark.draft import DSparkDraft
from mhc.dspark.target import Target

SCORE_ELEMENTS = 1 << 28  # attention scores of one prefill chunk, 1 GiB in fp32


class Caches(NamedTuple):
    """What a batch keeps between rounds."""

    target: LatentCache
    context: LatentCache | None  # the draft's, where there is one

    def copy_prefix(self, prefix: Caches, length: int) -> None:
        """A prefix-cache hit: the draft's context rows come with the target's keys, or the draft would miss them."""
        self.target.copy_prefix(prefix.target, length)
        if self.context is not None and prefix.context is not None:
            self.context.copy_prefix(prefix.context, length)


def prefill(
    target: Target, draft: DSparkDraft | None, prompts: Sequence[Sequence[int]], prefix: Sequence[int], room: int
) -> tuple[Caches, Tensor, Tensor]:
    """Run the prompts.

    Args:
        target: the model; draft: gets its context rows, if given.
        prompts: R token lists of any lengths >= 1.
        prefix: tokens before every prompt.
        room: positions to keep free behind the longest prompt.

    Returns:
        The caches, the logits [R, V] of every prompt's last token, and the prompts' lengths [R], prefix included.
    """
    start = len(prefix)
    capacity = start + max(len(prompt) for prompt in prompts) + room
    caches = _caches(target, draft, len(prompts), capacity)
    if prefix:
        shared = _caches(target, draft, 1, start)
        _run(target, draft, shared, [prefix], 0)
        caches.copy_prefix(shared, start)
    last = _run(target, draft, caches, prompts, start)
    lengths = torch.tensor([start + len(prompt) for prompt in prompts], device=last.device)
    return caches, target.logits(last), lengths


def _caches(target: Target, draft: DSparkDraft | None, requests: int, capacity: int) -> Caches:
    context = None if draft is None else draft.context(requests, capacity)
    return Caches(target.cache(requests, capacity), context)


def _run(
    target: Target, draft: DSparkDraft | None, caches: Caches, prompts: Sequence[Sequence[int]], start: int
) -> Tensor:
    """Fill the caches from position `start`; returns the normed hidden state [R, H] of every prompt's last token."""
    config, device = target.config, target.embed.weight.device
    longest = max(len(prompt) for prompt in prompts)
    padded = [list(prompt) + [config.pad_token_id] * (longest - len(prompt)) for prompt in prompts]
    token_ids = torch.tensor(padded, dtype=torch.int64, device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device).unsqueeze(1)
    last = torch.zeros(len(prompts), config.hidden_size, dtype=target.embed.weight.dtype, device=device)
    chunk = max(16, SCORE_ELEMENTS // (len(prompts) * config.num_heads * caches.target.capacity))
    for left in range(0, longest, chunk):
        part = token_ids[:, left : left + chunk]
        column = torch.arange(left, left + part.shape[1], device=device).expand_as(part)
        valid = column < lengths
        output = target.step(part, start + column, caches.target, valid)
        if draft is not None and caches.context is not None:
            draft.insert_context(caches.context, output.aux, start + column, valid)
        index = (lengths - 1 - left).clamp(0, part.shape[1] - 1).unsqueeze(-1).expand(-1, 1, config.hidden_size)
        here = (lengths - 1 >= left) & (lengths - 1 < left + part.shape[1])
        last = torch.where(here, output.hidden.gather(1, index).squeeze(1), last)
    return last
