"""Two looks at a draft that counting accepted tokens cannot give: calibration, and where arms first differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mhc.dspark import DSparkDraft, Target, anchored_forward
from mhc.dspark.artifacts import Pair
from mhc.dspark.corpus import Batch, Sample, collate
from mhc.dspark.drafting import propose
from mhc.dspark.train_draft import draw_anchors
from mhc.gsm8k.rows import Record
from mhc.gsm8k.stats import reliability

BATCH, ANCHORS, BINS, EXAMPLES = 128, 8, 10, 40


@torch.no_grad()
def calibration(pair: Pair, samples: Sequence[Sample], *, seed: int = 0) -> list[Record]:
    """Predicted against actual acceptance at temperature 1, by position, from random anchors of the target's own texts.

    Actual is the probability that verification accepts, `sum_v min(p(v), q(v))`, which needs no coin toss; both are
    conditional on every earlier token of the block being accepted.

    Returns:
        One `calibration` record a position: `confidence`, `accepted` and `count` by bin, and `expected_error` (ECE).
    """
    predicted, actual = [], []
    target, draft = pair.target, _draft(pair)
    for batch, anchors in _anchored(samples, target, seed):
        output = target(batch.ids)
        block = anchored_forward(draft, batch.ids, output.aux, anchors)
        index = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        p = target.logits(output.hidden)[index, block.rows].softmax(-1)
        overlap = torch.minimum(block.logits.softmax(-1), p).sum(-1)
        whole = (block.valid & (block.rows + 1 < batch.lengths[:, None, None])).all(-1)
        predicted.append(block.confidence_logits.sigmoid()[whole].cpu())
        actual.append(overlap.clamp(max=1.0)[whole].cpu())
    confidence, accepted = torch.cat(predicted), torch.cat(actual)
    records = []
    for position in range(confidence.shape[1]):
        curve = reliability(confidence[:, position].numpy(), accepted[:, position].numpy(), BINS)
        records.append(
            {
                "record": "calibration",
                "position": position + 1,
                "confidence": [round(float(value), 5) for value in curve.confidence],
                "accepted": [round(float(value), 5) for value in curve.accepted],
                "count": [int(value) for value in curve.count],
                "expected_error": round(curve.expected_error, 5),
            }
        )
    return records


@torch.no_grad()
def differences(
    pair: Pair, samples: Sequence[Sample], baseline: str, others: Sequence[str], *, seed: int = 0
) -> list[Record]:
    """Greedy drafts of each other arm against the baseline's, from the same anchors of the same texts.

    Returns:
        For each other arm one `difference` record with the totals (`blocks`, `differing`, `first_position` [k] counts,
        `logit_error` the largest difference of base logits), then up to 40 `flip` records: sample, anchor, position,
        both tokens, and the baseline's gap between them beside the logits' difference there: a near-tie has a gap no
        larger than that.
    """
    draft = _draft(pair)
    found = {arm: _Difference([baseline, arm], [0] * draft.config.block_size) for arm in others}
    for number, (batch, anchors) in enumerate(_anchored(samples, pair.target, seed)):
        rows = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
        context = draft.context(len(rows), batch.ids.shape[1])
        draft.insert_context(context, pair.target(batch.ids).aux, rows)
        for start in anchors.unbind(1):
            anchor = batch.ids.gather(1, start[:, None]).squeeze(1)
            block = draft.block(anchor, start)
            zero = torch.zeros(block[1].shape, dtype=torch.float64, device=anchor.device)
            outputs = {arm: draft(*block, context, expansion=arm) for arm in (baseline, *others)}
            tokens = {arm: propose(draft, output, anchor, 0.0, zero).tokens for arm, output in outputs.items()}
            for arm, difference in found.items():
                logits = (outputs[baseline].logits, outputs[arm].logits)
                difference.add(pair, number * BATCH, anchor, start, logits, (tokens[baseline], tokens[arm]))
    return [record for difference in found.values() for record in difference.records()]


class _Difference:
    """Greedy drafts of two arms, compared block by block."""

    def __init__(self, arms: list[str], first_position: list[int]) -> None:
        self.arms, self.first_position = arms, first_position
        self.blocks, self.logit_error = 0, 0.0
        self.flips: list[Record] = []

    def add(
        self,
        pair: Pair,
        first_sample: int,
        anchor: Tensor,
        start: Tensor,
        logits: tuple[Tensor, Tensor],
        tokens: tuple[Tensor, Tensor],
    ) -> None:
        """One block of each of R samples: anchors and their positions [R], base logits [R, k, V], tokens [R, k]."""
        error = (logits[0] - logits[1]).abs()
        self.logit_error = max(self.logit_error, error.max().item())
        self.blocks += len(start)
        differ = tokens[0] != tokens[1]
        for row in differ.any(1).nonzero().flatten().tolist():
            place = int(differ[row].long().argmax())
            self.first_position[place] += 1
            if len(self.flips) == EXAMPLES:
                continue
            both = torch.stack([arm[row, place] for arm in tokens])
            previous = tokens[0][row, place - 1] if place else anchor[row]
            head = _draft(pair).markov_head
            gap = (logits[0][row, place] + head(head.embed(previous[None]))[0])[both]
            self.flips.append(
                {
                    "record": "flip",
                    "arm": self.arms[1],
                    "sample": first_sample + row,
                    "anchor": int(start[row]),
                    "position": place + 1,
                    "tokens": [pair.tokenizer.id_to_token(int(token)) for token in both],
                    "gap": round(float(gap[0] - gap[1]), 6),
                    "logit_error": round(float(error[row, place, both].sum()), 6),
                }
            )

    def records(self) -> list[Record]:
        """The totals, then the flips."""
        total = {
            "record": "difference",
            "arms": self.arms,
            "arm": self.arms[1],
            "blocks": self.blocks,
            "differing": sum(self.first_position),
            "first_position": self.first_position,
            "logit_error": self.logit_error,
        }
        return [total, *self.flips]


def _anchored(samples: Sequence[Sample], target: Target, seed: int) -> Iterator[tuple[Batch, Tensor]]:
    """Batches in order, with random anchors [B, 8] in their answers."""
    device = target.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    usable = [sample for sample in samples if len(sample.ids) > sample.prompt_length + 1]
    for at in range(0, len(usable), BATCH):
        batch = collate(usable[at : at + BATCH]).to(device)
        yield batch, draw_anchors(batch, ANCHORS, generator)


def _draft(pair: Pair) -> DSparkDraft:
    if pair.draft is None:
        raise ValueError("the model folder holds no draft: run `mhc train draft`")
    return pair.draft
