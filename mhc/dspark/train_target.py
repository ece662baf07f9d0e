"""Training the target: GSM8K's train split, question to answer with its calculator notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mhc.dspark.config import V4Config
from mhc.dspark.corpus import Batch, Sample, batches, collate, encode
from mhc.dspark.initialise import initialise
from mhc.dspark.losses import next_token_loss
from mhc.dspark.optimise import Plan, State, train
from mhc.dspark.step import Inputs, Losses
from mhc.dspark.target import Target
from mhc.gsm8k.data import Problem

# the question is context, not the task: it is learnt a little, which helps while there is little text
QUESTION_WEIGHT = 0.2
DEV_BATCH = 64


def train_target(
    config: V4Config,
    tokenizer: Tokenizer,
    train_problems: Sequence[Problem],
    dev_problems: Sequence[Problem],
    plan: Plan,
    batch_size: int,
    checkpoint: Path,
    device: str,
    **options: Any,
) -> tuple[Target, State]:
    """Train from random weights, or on from the checkpoint.

    Args:
        config: shapes.
        tokenizer: of `config.vocab_size` entries.
        train_problems, dev_problems: disjoint; the second are only measured on.
        plan, batch_size, checkpoint, device, options: see `fit`.

    Returns:
        The target in fp32 and the final state.
    """
    target = Target(config)
    initialise(target, config, plan.seed).to(device)
    held_out = {"answer": encode(tokenizer, dev_problems)}
    samples = encode(tokenizer, train_problems)
    return target, fit("target", target, samples, held_out, plan, batch_size, checkpoint, device, **options)


def fit(
    name: str,
    target: Target,
    samples: Sequence[Sample],
    held_out: Mapping[str, Sequence[Sample]],
    plan: Plan,
    batch_size: int,
    checkpoint: Path,
    device: str,
    **options: Any,
) -> State:
    """Train a target on samples, from the checkpoint where there is one.

    Args:
        name: labels the records.
        target: in fp32, on `device`; trained in place.
        samples: trained on.
        held_out: sets that are only measured on, by the name of their loss.
        plan: the schedule.
        batch_size: sequences a step.
        checkpoint: file to resume from and to write.
        device: `cpu` or `cuda` (bf16 autocast).
        options: for `optimise.train`.
    """
    data = batches(samples, batch_size, plan.seed, resume_step(checkpoint))

    def inputs_of(step: int) -> Inputs:
        batch = next(data)
        return batch.ids, batch.lengths, batch.prompt_lengths

    def losses_of(ids: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Losses:
        batch = Batch(ids, lengths, prompt_lengths)
        answer = batch.answer_mask()
        weight = (answer + QUESTION_WEIGHT * ~answer) * batch.token_mask()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = target.logits(target(ids).hidden)
        loss = next_token_loss(logits, ids, weight)
        return {"loss": loss, "answer": next_token_loss(logits.detach(), ids, answer)}

    def dev() -> dict[str, float]:
        return {key: round(dev_loss(target, part, device), 5) for key, part in held_out.items()}

    return train(name, target, plan, inputs_of, losses_of, dev, checkpoint, **options)


def dev_loss(target: Target, samples: Sequence[Sample], device: str) -> float:
    """Mean answer loss over samples, in nats a token."""
    total, count = 0.0, 0
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        for at in range(0, len(samples), DEV_BATCH):
            batch: Batch = collate(samples[at : at + DEV_BATCH]).to(device)
            mask: Tensor = batch.answer_mask()
            loss = next_token_loss(target.logits(target(batch.ids).hidden), batch.ids, mask)
            total += loss.item() * int(mask.sum())
            count += int(mask.sum())
    return total / count


def resume_step(checkpoint: Path) -> int:
    """The step a checkpoint stands at, 0 where there is none."""
    if not checkpoint.is_file():
        return 0
    return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["state"]["step"])
