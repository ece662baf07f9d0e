"""Two looks at a draft that counting accepted tokens cannot give: calibration, and where two arms first differ."""

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
def differences(pair: Pair, samples: Sequence[Sample], arms: tuple[str, str], *, seed: int = 0) -> list[Record]:
    """Greedy drafts of two arms from the same anchors of the same texts: how often, where and why they differ.

    Returns:
        One `difference` record with the totals (`blocks`, `differing`, `first_position` [k] counts, `logit_error` the
        largest difference of base logits), then up to 40 `flip` records: sample, anchor, position, both tokens, and the
        first arm's gap between them beside the logits' difference there: a near-tie has a gap no larger than that.
    """
    target, draft = pair.target, _draft(pair)
    size = draft.config.block_size
    blocks, first_position, worst = 0, [0] * size, 0.0
    flips: list[Record] = []
    for number, (batch, anchors) in enumerate(_anchored(samples, target, seed)):
        rows = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
        context = draft.context(len(rows), batch.ids.shape[1])
        draft.insert_context(context, target(batch.ids).aux, rows)
        for column in range(anchors.shape[1]):
            start = anchors[:, column]
            anchor = batch.ids.gather(1, start[:, None]).squeeze(1)
            ids, positions = draft.block(anchor, start)
            outputs = [draft(ids, positions, context, expansion=arm) for arm in arms]
            zero = torch.zeros(positions.shape, dtype=torch.float64, device=ids.device)
            first, second = (propose(draft, output, anchor, 0.0, zero) for output in outputs)
            error = (outputs[0].logits - outputs[1].logits).abs()
            worst = max(worst, error.max().item())
            blocks += len(start)
            differ = first.tokens != second.tokens
            for row in differ.any(1).nonzero().flatten().tolist():
                place = int(differ[row].long().argmax())
                first_position[place] += 1
                if len(flips) < EXAMPLES:
                    pair_of = torch.stack((first.tokens[row, place], second.tokens[row, place]))
                    previous = first.tokens[row, place - 1] if place else anchor[row]
                    markov = draft.markov_head(draft.markov_head.embed(previous))
                    gap = (outputs[0].logits[row, place] + markov)[pair_of]
                    flips.append(
                        {
                            "record": "flip",
                            "sample": number * BATCH + row,
                            "anchor": int(start[row]),
                            "position": place + 1,
                            "tokens": [pair.tokenizer.id_to_token(int(token)) for token in pair_of],
                            "gap": round(float(gap[0] - gap[1]), 6),
                            "logit_error": round(float(error[row, place, pair_of].sum()), 6),
                        }
                    )
    total = {
        "record": "difference",
        "arms": list(arms),
        "blocks": blocks,
        "differing": sum(first_position),
        "first_position": first_position,
        "logit_error": worst,
    }
    return [total, *flips]


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
