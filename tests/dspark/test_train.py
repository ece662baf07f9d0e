"""Training: losses by hand, anchors, a resumed run equal to the bit, and the commands end to end."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from train_tools import made_up, samples

from mhc.__main__ import main
from mhc.dspark import DSparkDraft, Target, V4Config, anchored_forward, initialise
from mhc.dspark import tokenizer as tokenizers
from mhc.dspark.artifacts import Pair, load_pair, read_card
from mhc.dspark.batch import Completion
from mhc.dspark.corpus import Sample, collate, encode
from mhc.dspark.expansion import EXPANSIONS
from mhc.dspark.losses import draft_losses, next_token_loss
from mhc.dspark.optimise import Plan, train
from mhc.dspark.train_draft import draw_anchors, start_from_target, train_draft
from mhc.dspark.train_target import train_target
from mhc.gsm8k.data import SHA256, sha256
from mhc.gsm8k.record import Scope, throughput
from mhc.gsm8k.rows import questions, read


def plan(steps: int = 4, **changes: object) -> Plan:
    """A short schedule."""
    fields = {"lr": 1e-2, "weight_decay": 0.1, "minutes": 5.0, "log_every": 1, "dev_every": 2, "checkpoint_every": 2}
    return Plan(steps=steps, **(fields | changes))  # type: ignore[arg-type]


# ---- losses and anchors ----


def test_next_token_loss_by_hand() -> None:
    logits = torch.randn(1, 3, 5)
    ids = torch.tensor([[4, 2, 3]])
    weight = torch.tensor([[9.0, 1.0, 0.5]])
    logs = logits.log_softmax(-1)
    want = -(logs[0, 0, 2] + 0.5 * logs[0, 1, 3]) / 1.5
    assert next_token_loss(logits, ids, weight) == pytest.approx(want.item())


def test_draft_losses_by_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    n, k, v = 3, 7, 6
    q, p = (torch.randn(n, k, v, generator=generator) for _ in range(2))
    labels = torch.randint(v, (n, k), generator=generator)
    confidence = torch.randn(n, k, generator=generator)
    valid = torch.tensor([[True] * 7, [True] * 3 + [False] * 4, [True] * 7])
    total = ce = l1 = bce = 0.0
    taus = []
    for block in range(n):
        survival, expected = 1.0, 1.0
        for i in range(k):
            if not valid[block, i]:
                continue
            weight = torch.tensor(-i / 4).exp().item()
            distance = (q[block, i].softmax(-1) - p[block, i].softmax(-1)).abs().sum().item()
            accept, c = 1 - distance / 2, confidence[block, i].sigmoid().item()
            total += weight
            ce += weight * -q[block, i].log_softmax(-1)[labels[block, i]].item()
            l1 += weight * distance
            bce += weight * -(accept * torch.tensor(c).log() + (1 - accept) * torch.tensor(1 - c).log()).item()
            survival *= accept
            expected += survival
        if valid[block].all():
            taus.append(expected)
    got = draft_losses(q, p, labels, confidence, valid)
    want = {"ce": ce / total, "l1": l1 / total, "bce": bce / total, "tau": sum(taus) / 2}
    want["loss"] = 0.1 * want["ce"] + 0.9 * want["l1"] + want["bce"]
    assert {key: value.item() for key, value in got.items()} == pytest.approx(want, rel=1e-5)


def test_a_perfect_draft_has_full_length() -> None:
    logits = torch.randn(2, 7, 5)
    ones = torch.ones(2, 7)
    losses = draft_losses(logits, logits, ones.long(), ones * 20, ones.bool())
    assert losses["tau"].item() == pytest.approx(8)
    assert losses["l1"].item() == 0


def test_anchors_lie_in_the_answer() -> None:
    batch = collate(samples(6, 9, 20))
    anchors = draw_anchors(batch, 5, torch.Generator().manual_seed(0))
    for row, prompt, length in zip(
        anchors.tolist(), batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True
    ):
        assert all(prompt <= anchor < length - 1 for anchor in row)
        eligible = length - 1 - prompt
        assert len(set(row)) == min(5, eligible)  # without replacement while there are enough
    again = draw_anchors(batch, 5, torch.Generator().manual_seed(0))
    assert torch.equal(anchors, again)


def test_padding_never_reaches_the_draft_loss() -> None:
    # the same sequence alone and padded far beyond its end
    config = V4Config.tiny("dense")
    target = initialise(Target(config), config, 0)
    draft = initialise(DSparkDraft(config).bind(target), config, 1)
    sample = samples(1)[0]
    results = []
    for batch in (collate([sample]), collate([sample, Sample((0, *([5] * 90), 1), 5)])):
        output = target(batch.ids)
        anchors = torch.tensor([[sample.prompt_length, len(sample.ids) - 3]])
        block = anchored_forward(draft, batch.ids[:1], output.aux[:1].detach(), anchors)
        valid = block.valid & (block.rows + 1 < batch.lengths[:1, None, None])
        p = target.logits(output.hidden)[:1][0, block.rows[0]]
        losses = draft_losses(
            block.logits[0], p, block.labels[0], block.confidence_logits[0], valid[0]
        )  # fmt: skip
        results.append({key: value.item() for key, value in losses.items()})
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_draft_starts_as_the_end_of_the_target() -> None:
    config = V4Config.tiny("dense")
    target, draft = initialise(Target(config), config, 0), initialise(DSparkDraft(config), config, 1)
    start_from_target(draft, target)
    ends = target.layers[-config.draft_layers :]
    for block, source in zip(draft.layers, ends, strict=True):
        for (name, got), want in zip(block.named_parameters(), source.parameters(), strict=True):
            assert torch.equal(got, want), name
    assert torch.equal(draft.hc_head_fn, target.hc_head_fn)
    draft.bind(target)
    assert draft.fn_broadcast is not None  # the derived weight followed


# ---- the loop ----


def test_rate_warms_up_and_ends_at_zero() -> None:
    p = plan(lr=1.0, warmup=0.1)
    assert p.rate(0.05) == pytest.approx(0.5)
    assert p.rate(0.1) == pytest.approx(1.0)
    assert p.rate(0.55) == pytest.approx(0.5)
    assert p.rate(1.0) == pytest.approx(0.0)


def ones(step: int) -> tuple[torch.Tensor]:
    return (torch.ones(1, 2),)


def test_time_bounds_the_schedule(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    bounded = plan(steps=10**9, minutes=0.002, checkpoint_every=10**9, log_every=10**9, dev_every=10**9)
    losses = lambda x: {"loss": model(x).square().sum()}  # noqa: E731
    state = train("target", model, bounded, ones, losses, dict, tmp_path / "c.pt")
    assert 0.1 <= state.elapsed_s < 5
    assert state.curve[-1]["finished"]


def test_a_loss_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    losses = lambda x: {"loss": model(x).sum() * float("nan")}  # noqa: E731
    with pytest.raises(RuntimeError, match="the loss is nan at step 1"):
        train("target", model, plan(), ones, losses, dict, tmp_path / "c.pt")


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_interrupted_target_equals_uninterrupted(tmp_path: Path) -> None:
    config = dataclasses.replace(V4Config.tiny("dense", vocab_size=300), num_layers=2, aux_layers=(0, 1))
    rows = made_up(30)
    tokenizer = tokenizers.train((f"{p.question} {p.answer}" for p in rows), 300)
    given = (config, tokenizer, rows[:24], rows[24:], plan(), 4)
    whole, state = train_target(*given, tmp_path / "a.pt", "cpu")
    train_target(*given, tmp_path / "b.pt", "cpu", stop_after=3)  # the third step is lost with the kill
    resumed, again = train_target(*given, tmp_path / "b.pt", "cpu")
    assert same_weights(whole, resumed)
    losses = [[(r["step"], r.get("loss")) for r in s.curve] for s in (state, again)]
    assert losses[0] == losses[1]
    assert state.curve[-1]["answer"] < state.curve[1]["answer"]
    with pytest.raises(RuntimeError, match="is of another plan"):
        train_target(*given[:4], plan(steps=5), 4, tmp_path / "b.pt", "cpu")


def test_interrupted_draft_equals_uninterrupted(tmp_path: Path) -> None:
    config = dataclasses.replace(V4Config.tiny("dense"), num_layers=2, aux_layers=(0, 1))
    target = initialise(Target(config), config, 0)
    frozen = {name: value.clone() for name, value in target.state_dict().items()}
    given = (target, samples(12), samples(4), plan(lr=3e-3), 4, 3)
    whole, state = train_draft(*given, tmp_path / "a.pt", "cpu")
    train_draft(*given, tmp_path / "b.pt", "cpu", stop_after=3)
    resumed, _ = train_draft(*given, tmp_path / "b.pt", "cpu")
    assert same_weights(whole, resumed)
    assert all(torch.equal(value, frozen[name]) for name, value in target.state_dict().items())
    assert {"loss", "ce", "l1", "bce", "tau"} <= state.curve[-1].keys()
    whole.fn_broadcast.sum()  # up to date after the last optimiser step


# ---- the commands ----


@pytest.fixture
def gsm8k_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made-up files that pass for GSM8K."""
    monkeypatch.setenv("MHC_GIT_SHA", "0" * 40)
    for name, rows in (("train", made_up(40)), ("test", made_up(6, seed=1))):
        content = "".join(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in rows).encode()
        (tmp_path / f"{name}.jsonl").write_bytes(content)
        monkeypatch.setitem(SHA256, name, sha256(content))
    return tmp_path


def test_commands_end_to_end(gsm8k_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(
        V4Config.tiny("dense", vocab_size=300), num_layers=2, aux_layers=(0, 1), draft_layers=1, block_size=3
    )
    monkeypatch.setattr("mhc.dspark.train_command.PRESETS", {"mini": lambda: tiny})
    out = gsm8k_folder / "pair"
    common = ["--data", str(gsm8k_folder), "--out", str(out), "--device", "cpu", "--batch-size", "4"]
    common += ["--dev-questions", "4"]
    assert main(["train", "target", *common, "--steps", "120", "--sharpen-steps", "2"]) == 0
    assert read_card(out)["training"]["target"]["sharpening"]["final"]["own"] > 0
    common += ["--steps", "3"]
    assert main(["train", "draft", *common, "--rounds", "1", "--anchors", "4"]) == 0
    card = read_card(out)
    assert card["training"]["target"]["train_questions"] == 36
    assert {"target", "draft", "tokenizer"} == card["sha256"].keys()
    assert main(["train", "draft", *common]) == 1  # nothing is overwritten
    # what was trained on other answers is never resumed
    (first,) = out.with_name("pair-work").glob("draft-*.pt")
    again = ["--out", str(gsm8k_folder / "again"), "--work", str(out.with_name("pair-work")), "--rounds", "2"]
    shutil.copytree(out, gsm8k_folder / "again")
    (gsm8k_folder / "again" / "draft.safetensors").unlink()
    assert main(["train", "draft", *common, "--anchors", "4", *again]) == 0
    assert len(set(out.with_name("pair-work").glob("draft-*.pt")) - {first}) == 1

    # a test question appears nowhere in what was trained on
    text = (out.with_name("pair-work") / "draft.json").read_text()
    assert json.loads(text)["samples"]
    pair = load_pair(out)
    trained = {tuple(ids[:length]) for ids, length in json.loads(text)["samples"]}
    assert not trained & {sample.ids[: sample.prompt_length] for sample in encode(pair.tokenizer, made_up(6, seed=1))}

    record = ["--data", str(gsm8k_folder), "--device", "cpu", "--model", str(out), "--max-tokens", "6", "--k", "3"]
    assert main(["gsm8k", "record", *record, "--out", str(out)]) == 0
    records = read(next(out.glob("*-gsm8k-*.jsonl")))
    assert records[0]["model_sha256"] == card["sha256"]
    assert records[-1]["record"] == "end"
    for expansion in EXPANSIONS:
        for temperature in (0.0, 1.0):
            assert len(questions(records, arm=expansion, k=3, temperature=temperature)) == 6
    assert [r["arm"] for r in records if r["record"] == "difference"] == [arm for arm in EXPANSIONS if arm != "repeat"]
    assert all(not r["differing_ids"] for r in records if r["record"] == "equality")
    asked = ["--temperature", "1", "--batch-size", "4", "--out", str(gsm8k_folder / "ask.jsonl")]
    assert main(["gsm8k", *record, *asked]) == 0
    alone = questions(read(gsm8k_folder / "ask.jsonl"))
    whole = questions(records, arm="broadcast", k=3, temperature=1.0)
    assert [row["id"] for row in alone] == [row["id"] for row in whole]

    (out / "draft.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="its card says"):
        load_pair(out)


def test_a_target_that_never_ends_an_answer_is_not_sharpened(
    gsm8k_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = dataclasses.replace(V4Config.tiny("dense", vocab_size=300), num_layers=2, aux_layers=(0, 1))
    monkeypatch.setattr("mhc.dspark.train_command.PRESETS", {"mini": lambda: tiny})
    asked = [
        "--data",
        str(gsm8k_folder),
        "--out",
        str(gsm8k_folder / "pair"),
        "--device",
        "cpu",
        "--dev-questions",
        "4",
    ]
    assert main(["train", "target", *asked, "--batch-size", "4", "--steps", "1", "--rounds", "1"]) == 1
    assert "only 0 of 36 greedy answers end" in capsys.readouterr().err
    for option, refused in (("--rounds", "rounds must be at least 1, got 0"), ("--steps", "must be positive, got 0")):
        assert main(["train", "target", *asked, "--batch-size", "4", "--steps", "1", option, "0"]) == 1
        assert refused in capsys.readouterr().err


def test_an_unknown_commit_is_an_error_before_the_training(
    gsm8k_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown() -> tuple[str, bool]:
        raise RuntimeError("the commit is unknown")

    monkeypatch.setattr("mhc.bench.machine.git_state", unknown)
    out = gsm8k_folder / "pair"
    assert main(["train", "target", "--data", str(gsm8k_folder), "--out", str(out), "--device", "cpu"]) == 1
    assert "the commit is unknown" in capsys.readouterr().err
    assert not out.exists()


def test_speed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def generate(target: object, prompts: list[list[int]], max_new_tokens: int, **options: object) -> list[Completion]:
        asked.append((len(prompts), max_new_tokens))
        return [Completion([5] * 3, "length") for _ in prompts]

    monkeypatch.setattr("mhc.gsm8k.record.generate", generate)
    pair = Pair(Target(V4Config.tiny("dense")), None, None)  # type: ignore[arg-type]
    bounded = Scope(speed_requests=(1, 64), speed_s=0.0)
    lines = list(throughput(pair, [[0]] * 64, bounded))
    assert [len(line["wall_s"]) for line in lines] == [1] * 6  # three arms, two batch sizes, one round recorded
    assert set(asked) == {(2, 96), (64, 96)}
    assert len(next(throughput(pair, [[0]] * 64, Scope(max_tokens=9)))["wall_s"]) == 3
    assert asked[-1] == (2, 9)
