"""Training the draft: the paper's losses on the target's own generations for train questions.

Source: the DSpark paper; teacher forcing from random anchors, target and its embeddings frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mhc.dspark.anchored import anchored_forward
from mhc.dspark.corpus import Batch, Sample, batches, collate
from mhc.dspark.draft import DSparkDraft
from mhc.dspark.initialise import initialise
from mhc.dspark.losses import draft_losses
from mhc.dspark.optimise import Plan, State, step_generator, train
from mhc.dspark.step import Inputs, Losses
from mhc.dspark.target import Target
from mhc.dspark.train_target import resume_step

DEV_BATCH, DEV_ANCHORS = 64, 16


def train_draft(
    target: Target,
    samples: Sequence[Sample],
    dev_samples: Sequence[Sample],
    plan: Plan,
    batch_size: int,
    anchors: int,
    checkpoint: Path,
    device: str,
    **options: Any,
) -> tuple[DSparkDraft, State]:
    """Train a draft for a target.

    Args:
        target: frozen, in its inference dtype (bf16 on CUDA; fp32 on CPU, where nothing is autocast).
        samples, dev_samples: the target's generations for train questions, and for held-out train questions.
        plan: the schedule.
        batch_size, anchors: sequences a step, and random anchors in each.
        checkpoint: file to resume from and to write.
        device: `cpu` or `cuda`.
        options: for `optimise.train`.

    Returns:
        The draft in fp32, bound to the target, and the final state.
    """
    draft = DSparkDraft(target.config)
    initialise(draft, target.config, plan.seed + 1).to(device)
    start_from_target(draft, target)
    draft.bind(target)
    data = batches(samples, batch_size, plan.seed, resume_step(checkpoint))

    def inputs_of(step: int) -> Inputs:
        batch = next(data)
        return batch.ids, batch.lengths, draw_anchors(batch, anchors, step_generator(plan.seed, step))

    def losses_of(ids: Tensor, lengths: Tensor, starts: Tensor) -> Losses:
        return _losses(draft, target, ids, lengths, starts)

    def dev() -> dict[str, float]:
        return dev_figures(draft, target, dev_samples, device)

    state = train("draft", draft, plan, inputs_of, losses_of, dev, checkpoint, **options)
    draft.process_weights_after_loading()  # the optimiser wrote to the weights that one is derived from
    return draft, state


def start_from_target(draft: DSparkDraft, target: Target) -> None:
    """Copy the target's last blocks and its final norm and head maps into the draft, whose blocks have the same shape.

    The draft then begins as the end of the target does, and learns to do without the beginning.
    """
    count = len(draft.layers)
    with torch.no_grad():
        for block, source in zip(draft.layers, target.layers[-count:], strict=True):
            _copy(block, source)
        _copy(draft.norm, target.norm)
        for name in ("hc_head_fn", "hc_head_base", "hc_head_scale"):
            draft.get_parameter(name).copy_(target.get_parameter(name))
    draft.process_weights_after_loading()


def draw_anchors(batch: Batch, count: int, generator: torch.Generator) -> Tensor:
    """Anchors [B, count], uniform over the answer ids that have an answer id after them.

    Without replacement while a sequence has enough of them; the rest repeat, so that shapes stay fixed.
    """
    answer = batch.answer_mask()
    eligible = answer & answer.roll(-1, 1)
    eligible[:, -1] = False
    noise = torch.rand(eligible.shape, generator=generator, device=eligible.device)
    order = torch.where(eligible, noise, -1.0).argsort(dim=1, descending=True)
    ranks = torch.arange(count, device=order.device) % eligible.sum(1, keepdim=True).clamp(min=1)
    return order.gather(1, ranks)


def _losses(draft: DSparkDraft, target: Target, ids: Tensor, lengths: Tensor, starts: Tensor) -> Losses:
    """`draft_losses` of blocks from anchors `starts` [B, A] in `ids` [B, S], of which `lengths` [B] are text."""
    with torch.no_grad():
        output = target(ids)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        block = anchored_forward(draft, ids, output.aux.float(), starts)
    with torch.no_grad():
        batch_index = torch.arange(len(starts), device=ids.device)[:, None, None]
        target_logits = target.logits(output.hidden[batch_index, block.rows])
    return draft_losses(
        block.logits.flatten(0, 1),
        target_logits.flatten(0, 1),
        block.labels.flatten(0, 1),
        block.confidence_logits.flatten(0, 1),
        (block.valid & (block.rows + 1 < lengths[:, None, None])).flatten(0, 1),
    )


def dev_figures(draft: DSparkDraft, target: Target, samples: Sequence[Sample], device: str) -> dict[str, float]:
    """Means of the losses and of the expected acceptance length over held-out generations, anchors fixed.

    Runs under autograd, as training does: a draft in fp32 with a bf16 target's embeddings has no inference form.
    """
    sums: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for at in range(0, len(samples), DEV_BATCH):
        batch = collate(samples[at : at + DEV_BATCH])
        starts = draw_anchors(batch, DEV_ANCHORS, generator).to(device)
        losses = _losses(draft, target, batch.ids.to(device), batch.lengths.to(device), starts)
        for key, value in losses.items():
            sums[key] = sums.get(key, 0.0) + value.item() * len(batch.ids)
    return {key: round(value / len(samples), 5) for key, value in sums.items()}


def _copy(into: nn.Module, source: nn.Module) -> None:
    into.load_state_dict({key: value.to(torch.float32) for key, value in source.state_dict().items()})
