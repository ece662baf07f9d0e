"""The state of a batch while it decodes: device tensors only, updated in place, so that rounds need no host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mhc.dspark.drafting import Proposal


class Round(NamedTuple):
    """One draft of one request, for calibration and for finding where two arms part."""

    tokens: list[int]  # [k], as drafted
    confidence: list[float]  # [k], predicted acceptance
    drafted: int  # how many went to the verifier
    accepted: int  # how many it took


@dataclass(frozen=True)
class Completion:
    """What one request became.

    Mean acceptance length = 1 + sum(accepted) / sum(drafts), over requests: the bonus token counts.
    """

    tokens: list[int]  # the end token included when it was reached, nothing after it
    finish_reason: str  # eos or length
    drafts: int = 0  # rounds of draft and verification
    drafted: int = 0  # tokens that went to the verifier
    accepted_per_position: list[int] = field(default_factory=list)  # [k], never increasing
    rounds: list[Round] = field(default_factory=list)  # [drafts], with `trace` only


class Batch:
    """R requests under way.

    Args:
        requests: ids that key the random streams.
        positions: [R] int64, where each request's first new token goes (prompt length, prefix included).
        max_new_tokens: tokens a request may emit.
        eos: the end token.
        block_size: `k`; 0 for plain decoding.
        trace: keep every round.
    """

    def __init__(
        self,
        requests: Sequence[int],
        positions: Tensor,
        max_new_tokens: int,
        eos: int,
        block_size: int,
        trace: bool = False,
    ) -> None:
        device, count = positions.device, positions.shape[0]
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        self.max_new_tokens, self.eos = max_new_tokens, eos
        self.requests = torch.tensor(list(requests), dtype=torch.int64, device=device).unsqueeze(1)
        self.output = torch.zeros(count, max_new_tokens + 1, dtype=torch.int64, device=device)  # last column: bin
        self.count = zeros.clone()
        self.position = positions - 1  # of the anchor; `emit` moves it on to the first emitted token
        self.anchor = zeros.clone()
        self.live = torch.ones_like(zeros, dtype=torch.bool)
        self.ended = torch.zeros_like(self.live)
        self.drafts = zeros.clone()
        self.drafted = zeros.clone()
        self.accepted = torch.zeros(count, block_size, dtype=torch.int64, device=device)
        # a request has at most a round a token; the last row is a bin for those that are done
        rows = max_new_tokens + 1 if trace else 0
        self.trace_tokens = torch.zeros(count, rows, block_size + 2, dtype=torch.int64, device=device)
        self.trace_confidence = torch.zeros(count, rows, block_size, device=device)

    def emit(self, tokens: Tensor, number: Tensor) -> Tensor:
        """Append the first `number` [R] of `tokens` [R, n] to every live request.

        Cut behind an end token and at `max_new_tokens`; the last token becomes the anchor.

        Returns:
            [R, n] bool, which tokens were kept.
        """
        column = torch.arange(tokens.shape[1], device=tokens.device)
        ends = tokens == self.eos
        ended_before = ends.long().cumsum(-1) - ends.long() > 0
        slot = self.count.unsqueeze(1) + column
        kept = self.live.unsqueeze(1) & (column < number.unsqueeze(1)) & ~ended_before & (slot < self.max_new_tokens)
        self.output.scatter_(1, slot.where(kept, self.max_new_tokens), tokens)
        moved = kept.sum(-1)
        last = tokens.gather(1, (moved - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        self.anchor.copy_(last.where(moved > 0, self.anchor))
        self.position.add_(moved)
        self.count.add_(moved)
        self.ended.logical_or_((kept & ends).any(-1))
        self.live.copy_(self.live & ~self.ended & (self.count < self.max_new_tokens))
        return kept

    def record(self, was_live: Tensor, proposal: Proposal, length: Tensor, accepted: Tensor, kept: Tensor) -> None:
        """Count a round of draft and verification: verified tokens [R], accepted prefix [R], kept tokens [R, k + 1]."""
        if self.trace_tokens.shape[1]:
            slot = self.drafts.where(was_live, self.max_new_tokens).view(-1, 1, 1)
            row = torch.cat((proposal.tokens, length.unsqueeze(1), accepted.unsqueeze(1)), dim=1).unsqueeze(1)
            self.trace_tokens.scatter_(1, slot.expand_as(row), row)
            confidence = proposal.confidence.unsqueeze(1)
            self.trace_confidence.scatter_(1, slot.expand_as(confidence), confidence)
        position = torch.arange(self.accepted.shape[1], device=kept.device)
        self.drafts.add_(was_live.long())
        self.drafted.add_(length * was_live)
        self.accepted.add_((position < accepted.unsqueeze(1)) & kept[:, :-1])

    def completions(self) -> list[Completion]:
        """Move the results to the host, once."""
        self.trace_tokens, self.trace_confidence = self.trace_tokens.cpu(), self.trace_confidence.cpu()
        output, count, ended = self.output.tolist(), self.count.tolist(), self.ended.tolist()
        drafts, drafted, accepted = self.drafts.tolist(), self.drafted.tolist(), self.accepted.tolist()
        traced = self.trace_tokens.shape[1] > 0
        return [
            Completion(
                output[r][: count[r]],
                "eos" if ended[r] else "length",
                drafts[r],
                drafted[r],
                accepted[r],
                self._rounds(r, drafts[r]) if traced else [],
            )
            for r in range(len(count))
        ]

    def _rounds(self, request: int, drafts: int) -> list[Round]:
        rows = zip(
            self.trace_tokens[request, :drafts].tolist(), self.trace_confidence[request, :drafts].tolist(), strict=True
        )
        return [Round(row[:-2], confidence, row[-2], row[-1]) for row, confidence in rows]
