"""The training loop of target and draft alike: seeded, resumable to the bit, bounded in time, its losses recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from mhc.dspark.step import Inputs, Losses, Step


@dataclass(frozen=True)
class Plan:
    """How long and how fast.

    Args:
        steps: optimiser steps.
        lr: peak learning rate; warm-up over the first `warmup` share, then a cosine to 0.
        weight_decay: AdamW's, on matrices only.
        minutes: a bound on training time: the schedule ends there if `steps` would take longer.
        clip: largest gradient norm.
        log_every, dev_every, checkpoint_every: steps between records.
        seed: of everything random; step n draws from `seed` and n alone.
    """

    steps: int
    lr: float
    weight_decay: float
    minutes: float
    warmup: float = 0.04
    clip: float = 1.0
    log_every: int = 20
    dev_every: int = 500
    checkpoint_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0 or not self.minutes > 0:
            raise ValueError(f"steps, lr and minutes must be positive, got {self.steps}, {self.lr}, {self.minutes}")

    def rate(self, progress: float) -> float:
        """Learning rate at a share of the schedule in [0, 1]."""
        if progress < self.warmup:
            return self.lr * max(progress / self.warmup, 0.01)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))


@dataclass
class State:
    """What a checkpoint holds beside the weights and the optimiser."""

    step: int = 0
    elapsed_s: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


def train(
    name: str,
    model: nn.Module,
    plan: Plan,
    inputs_of: Callable[[int], Inputs],
    losses_of: Callable[..., Losses],
    dev: Callable[[], dict[str, float]],
    checkpoint: Path,
    *,
    eager: bool = False,
    stop_after: int | None = None,
) -> State:
    """Run the plan, from the checkpoint where there is one.

    Args:
        name: `target` or `draft`: labels the records and the progress bar.
        model: its parameters that require gradients are trained.
        inputs_of: step number -> tensors on the host, everything random drawn. Few shapes may occur: each is a graph.
        losses_of: those tensors on the model's device -> losses, see `Step`; all of them are recorded.
        dev: held-out figures.
        checkpoint: file written every `checkpoint_every` steps and at the end.
        eager: no CUDA graphs, where there is CUDA.
        stop_after: leave after this many steps of this call, as a kill would (for tests).

    Returns:
        The final state; its curve holds a record every `log_every` steps and one a dev measurement.

    Raises:
        RuntimeError: the loss is not finite, a step cannot be captured, or the checkpoint is of another plan.
    """
    optimiser = _optimiser(model, plan)
    rate_on_device = optimiser.param_groups[0]["lr"]
    state = _resume(checkpoint, model, optimiser, plan)
    for group in optimiser.param_groups:
        group["lr"] = rate_on_device  # loading replaced it
    step = Step(model, optimiser, losses_of, plan.clip, rate_on_device.is_cuda and not eager)
    first, began = state.step, time.perf_counter() - state.elapsed_s
    bar = tqdm(total=plan.steps, initial=state.step, desc=name, unit="step", mininterval=1.0)
    while (progress := max(state.step / plan.steps, state.elapsed_s / (60 * plan.minutes))) < 1:
        if stop_after is not None and state.step - first >= stop_after:
            return state
        rate = plan.rate(progress)
        rate_on_device.fill_(rate)
        losses = step(inputs_of(state.step))
        state.step += 1
        state.elapsed_s = time.perf_counter() - began
        bar.update()
        if state.step % plan.log_every == 0 or state.step == plan.steps:
            # the only wait for the device: it also keeps the clock that bounds the schedule honest
            values = {key: round(value.item(), 5) for key, value in losses.items()}
            if not math.isfinite(values["loss"]):
                raise RuntimeError(
                    f"{name}: the loss is {values['loss']} at step {state.step}; lower the rate {plan.lr}"
                )
            bar.set_postfix(loss=f"{values['loss']:.3f}")
            _note(state, name, "train", lr=rate, **values)
        if state.step % plan.dev_every == 0:
            _note(state, name, "dev", **dev())
        if state.step % plan.checkpoint_every == 0:
            _save(checkpoint, model, optimiser, plan, state)
    bar.close()
    if not state.curve or state.curve[-1].get("finished") is None:
        _note(state, name, "dev", finished=True, **dev())
        _save(checkpoint, model, optimiser, plan, state)
    return state


def step_generator(plan_seed: int, step: int) -> torch.Generator:
    """A random stream for one step on the host, the same however often the run was interrupted."""
    return torch.Generator().manual_seed(plan_seed * 1_000_003 + step)


def _note(state: State, name: str, phase: str, **values: Any) -> None:
    record = {"record": "training", "model": name, "phase": phase, "step": state.step}
    state.curve.append(record | {"elapsed_s": round(state.elapsed_s, 2)} | values)


def _optimiser(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    # the rate is a tensor because a graph would freeze a number
    rate = torch.tensor(plan.lr, dtype=torch.float32, device=trained[0].device)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=rate.is_cuda)


def _save(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, plan: Plan, state: State) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # written aside and renamed: a kill leaves the old checkpoint or the new one, never half of one
    partial = path.with_suffix(".part")
    torch.save(
        {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "plan": vars(plan), "state": vars(state)},
        partial,
    )
    partial.replace(path)


def _resume(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, plan: Plan) -> State:
    if not path.is_file():
        return State()
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if saved["plan"] != vars(plan):
        raise RuntimeError(f"{path} is of another plan ({saved['plan']}): remove it or name another --work folder")
    model.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    print(f"resumed from {path} at step {saved['state']['step']}")
    return State(**saved["state"])
