"""One decoding round, plain or speculative: device tensors in, state updated in place, no host sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mhc.dspark.batch import Batch
from mhc.dspark.draft import DSparkDraft
from mhc.dspark.drafting import propose, truncate
from mhc.dspark.philox import Stream, uniform
from mhc.dspark.prefill import Caches
from mhc.dspark.sampling import distribution, pick
from mhc.dspark.target import Target
from mhc.dspark.verification import verify


@dataclass(frozen=True)
class Settings:
    """How to decode; see `generate`."""

    temperature: float
    seed: int
    block_size: int
    confidence_threshold: float
    expansion: str
    width: int


def first_token(batch: Batch, logits: Tensor, settings: Settings) -> None:
    """Emit the first anchor from the prefill's logits [R, V]."""
    batch.emit(_sample(batch, logits, settings), torch.ones_like(batch.count))


def plain_round(target: Target, caches: Caches, batch: Batch, settings: Settings) -> None:
    """Run the anchor, emit the next token. Rows beyond the first only give the step the shapes of verification."""
    offsets = torch.arange(settings.width, device=batch.anchor.device)
    token_ids = torch.where(offsets == 0, batch.anchor.unsqueeze(1), target.config.pad_token_id)
    valid = batch.live.unsqueeze(1) & (offsets == 0)
    output = target.step(token_ids, batch.position.unsqueeze(1) + offsets, caches.target, valid)
    logits = target.logits(output.hidden)[:, 0]
    batch.emit(_sample(batch, logits, settings), torch.ones_like(batch.count))


def draft_round(target: Target, draft: DSparkDraft, caches: Caches, batch: Batch, settings: Settings) -> None:
    """Draft a block behind the anchor, cut it by confidence, verify, emit, and insert the verified rows' context."""
    assert caches.context is not None
    size, was_live = settings.block_size, batch.live.clone()
    block, positions = draft.block(batch.anchor, batch.position, size)
    next_positions = torch.cat((positions, positions[:, -1:] + 1), dim=1) + 1  # of the tokens that the rows predict
    backbone = draft(block, positions, caches.context, expansion=settings.expansion)
    noise, accept, emit = _uniform(settings, (Stream.DRAFT, Stream.ACCEPT, Stream.TARGET), batch, next_positions)
    proposal = propose(draft, backbone, batch.anchor, settings.temperature, noise[:, :size])
    length = truncate(proposal.confidence, settings.confidence_threshold)

    rows = torch.arange(size + 1, device=block.device)
    token_ids = torch.cat((batch.anchor.unsqueeze(1), proposal.tokens), dim=1)
    fed = batch.live.unsqueeze(1) & (rows <= length.unsqueeze(1))
    output = target.step(token_ids, next_positions - 1, caches.target, fed)
    verdict = verify(
        target.logits(output.hidden),
        proposal,
        length,
        settings.temperature,
        accept[:, :size],
        emit,
    )
    verified = batch.live.unsqueeze(1) & (rows <= verdict.accepted.unsqueeze(1))
    draft.insert_context(caches.context, output.aux, next_positions - 1, verified)
    kept = batch.emit(verdict.tokens, verdict.accepted + 1)
    batch.record(was_live, proposal, length, verdict.accepted, kept)


def _sample(batch: Batch, logits: Tensor, settings: Settings) -> Tensor:
    """The token behind the anchor, [R, 1], from logits [R, V]."""
    if settings.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    (draw,) = _uniform(settings, (Stream.TARGET,), batch, batch.position.unsqueeze(1) + 1)
    return pick(distribution(logits, settings.temperature), draw.squeeze(1)).unsqueeze(1)


def _uniform(settings: Settings, streams: Sequence[Stream], batch: Batch, positions: Tensor) -> Sequence[Tensor]:
    if settings.temperature == 0:  # greedy needs no numbers
        return [torch.zeros((), dtype=torch.float64, device=positions.device).expand(positions.shape)] * len(streams)
    return uniform(settings.seed, streams, batch.requests, positions)
