"""The optimiser step: graphs chosen by shape and fed in place (replay acted out on a CPU), and really on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_tools import made_up, samples

from mhc.dspark import Target, V4Config, initialise
from mhc.dspark import tokenizer as tokenizers
from mhc.dspark.optimise import Plan, _optimiser
from mhc.dspark.step import PLAIN_STEPS, Step, _Captured
from mhc.dspark.train_draft import train_draft
from mhc.dspark.train_target import train_target

PLAN = Plan(steps=12, lr=1e-2, weight_decay=0.1, minutes=5.0, log_every=1, dev_every=12, checkpoint_every=12)


class OnCpu(Step):
    """A captured step whose replay runs the step again, into the same outputs."""

    captures = 0

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> _Captured:
        self.captures += 1
        losses = {name: torch.zeros(()) for name in ("loss", "grad_norm")}

        def replay() -> None:
            for name, value in self.run(inputs).items():
                losses[name].copy_(value)

        return _Captured(SimpleNamespace(replay=replay), inputs, losses)  # type: ignore[arg-type]


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are none."""
    stream = lambda *_: SimpleNamespace(wait_stream=lambda other: None)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def model_and_step(kind: type[Step], graphs: bool) -> tuple[torch.nn.Module, Step]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, kind(model, _optimiser(model, PLAN), lambda x: {"loss": model(x).square().mean()}, 1.0, graphs)


def test_replayed_steps_equal_plain_ones(no_cuda: None) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4 if n % 3 else 6, 3, generator=generator) for n in range(12)]
    plain, step = model_and_step(Step, graphs=False)
    graphed, fake = model_and_step(OnCpu, graphs=True)
    for x in inputs:
        want, got = step((x,)), fake((x,))
        assert got.keys() == want.keys() == {"loss", "grad_norm"}
        assert all(torch.equal(got[name], want[name]) and not got[name].requires_grad for name in want)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), graphed.parameters(), strict=True))
    assert fake.captures == 2  # one a shape
    assert min(fake._seen.values()) == PLAIN_STEPS + 1


def test_a_rare_shape_is_never_captured(no_cuda: None) -> None:
    _, fake = model_and_step(OnCpu, graphs=True)
    for _ in range(PLAIN_STEPS):
        fake((torch.ones(2, 3),))
    assert fake.captures == 0


def test_a_capture_that_fails_names_eager(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    _, step = model_and_step(Step, graphs=True)
    for _ in range(PLAIN_STEPS):
        step((torch.ones(2, 3),))
    with pytest.raises(RuntimeError, match=r"inputs \[2, 3\] cannot be captured .* train with --eager .*not permitted"):
        step((torch.ones(2, 3),))


def test_the_rate_is_a_tensor_in_every_group() -> None:
    # a number would be frozen in a graph
    optimiser = _optimiser(torch.nn.Linear(3, 2), PLAN)
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimiser.param_groups)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("model", ["target", "draft"])
def test_graphs_train_as_plain_steps_do(model: str, tmp_path: Path) -> None:
    config = dataclasses.replace(V4Config.tiny("dense", vocab_size=300), num_layers=2, aux_layers=(0, 1))
    rows = made_up(30)
    tokenizer = tokenizers.train((f"{p.question} {p.answer}" for p in rows), 300)
    curves = []
    for eager in (False, True):
        path = tmp_path / f"{eager}.pt"
        if model == "target":
            _, state = train_target(config, tokenizer, rows[:24], rows[24:], PLAN, 4, path, "cuda", eager=eager)
        else:
            target = initialise(Target(config), config, 0).cuda()
            _, state = train_draft(target, samples(12), samples(4), PLAN, 4, 3, path, "cuda", eager=eager)
        curves.append([record["loss"] for record in state.curve if record["phase"] == "train"])
    assert len(curves[0]) == PLAN.steps
    # atomics add in any order: equal to rounding, not to the bit
    assert curves[0] == pytest.approx(curves[1], rel=2e-2)
    assert curves[0][-1] < curves[0][0]
