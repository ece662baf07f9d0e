"""Train the miniature pair on GSM8K's train split: the target, then its draft.

`train target` makes tokenizer, target and card. It ends with a sharpening: the target is trained on its own greedy
answers to train questions, after which, as in post-trained models, little is left to chance at temperature 1.
`train draft` adds a draft, from the target's own generations at temperature 1. Both resume where a kill left them
(checkpoints in --work), and write a loss curve as JSONL. The test split is never read.

  python -m mhc train target --data GSM8K --out DIR --work WORK     generations, and at most 3 minutes of training
  python -m mhc train draft --data GSM8K --out DIR --work WORK      generations, and at most 6 minutes of training
  python -m mhc gsm8k record --data GSM8K --model DIR --out DIR     the evaluation

Trial of all three: --steps 30 for both, --sharpen-steps 0 for the target, --rounds 1 --questions 600 for the draft,
--questions 64 --max-tokens 64 for the record. Without TileLang: --maps torch for all three. On CUDA a training step is
one CUDA graph for each padded length; --eager does without. The draft's last record holds `tau`, the acceptance length
to expect at temperature 1 from anchors spread evenly, which is more than decoding reaches: it stops at hard places.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from mhc.bench import machine
from mhc.bench.records import free_path, run_line
from mhc.config import MHCConfig
from mhc.dspark import hyper
from mhc.dspark import tokenizer as tokenizers
from mhc.dspark.artifacts import CARD, TOKENIZER, load_pair, read_card, save_weights, update_card
from mhc.dspark.config import V4Config
from mhc.dspark.corpus import DEV_QUESTIONS, Sample, encode, split
from mhc.dspark.initialise import to_inference
from mhc.dspark.optimise import Plan, State
from mhc.dspark.target import Target
from mhc.dspark.tokenizer import EOS_ID
from mhc.gsm8k.data import SHA256, Problem, load, sha256
from mhc.gsm8k.journal import Journal
from mhc.gsm8k.prompts import prompt


def micro() -> V4Config:
    """A pair that trains in a minute on a CPU: the same code in small, for tests and trials."""
    tiny = V4Config.tiny("dense", vocab_size=384)
    return dataclasses.replace(
        tiny, sliding_window=128, block_size=7, ffn_width=128, markov_rank=16, mhc=MHCConfig(64, sinkhorn_iters=4)
    )


SHARPEN_MINUTES, SHARPEN_LR = 1.0, 1e-3
PRESETS: dict[str, Callable[[], V4Config]] = {"mini": V4Config.mini, "micro": micro}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`train target|draft`; the defaults make the committed pair, whose draft trained for 5 minutes, on an H200."""
    parser.add_argument("model", choices=("target", "draft"))
    parser.add_argument("--data", help="folder with GSM8K's train.jsonl (default: MHC_GSM8K_DIR, else a download)")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, tokenizer, card and loss curves")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (default: <out>-work)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--maps", default="kernels", choices=("kernels", "torch"), help="mHC in inference; torch needs no TileLang"
    )
    parser.add_argument("--preset", default="mini", choices=sorted(PRESETS), help="shapes (target only)")
    parser.add_argument("--steps", type=int, help="optimiser steps (default: target 1000, draft 9000)")
    parser.add_argument("--minutes", type=float, help="end the schedule there (default: target 2, draft 6)")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: target 2e-3, draft 1e-3)")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=32, help="random anchors a sequence (draft only)")
    parser.add_argument("--rounds", type=int, help="generations a train question (default: target 3, draft 4)")
    parser.add_argument("--sharpen-steps", type=int, default=800, help="of a target on its own greedy answers; 0: none")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, neither in training nor while generating")
    parser.add_argument("--questions", type=int, help="use only the first questions of the split, for trials")
    parser.add_argument("--dev-questions", type=int, default=DEV_QUESTIONS, help="held out of the train split's end")
    parser.add_argument("--checkpoint-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Train one model; 0 when its weights are written."""
    try:
        return _run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"mhc train: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    hyper.OPS = args.maps == "kernels"
    machine.git_state()  # the card names the commit: an unknown one is an error now, not after the training
    path = args.out / f"{args.model}.safetensors"
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it to train again, or name another --out")
    args.work = args.work or args.out.with_name(args.out.name + "-work")
    args.out.mkdir(parents=True, exist_ok=True)
    problems = load("train", args.data)
    chosen = problems[: args.questions] if args.questions else problems
    train_problems, dev_problems = split(chosen, args.dev_questions)
    torch.manual_seed(args.seed)
    (_target if args.model == "target" else _draft)(args, train_problems, dev_problems)
    print(f"wrote {path}")
    return 0


def _plan(args: argparse.Namespace, steps: int, minutes: float, lr: float, weight_decay: float) -> Plan:
    return Plan(
        steps=_given(args.steps, steps),
        minutes=_given(args.minutes, minutes),
        lr=_given(args.lr, lr),
        weight_decay=weight_decay,
        checkpoint_every=args.checkpoint_every,
        seed=args.seed,
    )


def _target(args: argparse.Namespace, train_problems: list[Problem], dev_problems: list[Problem]) -> None:
    from mhc.dspark.train_target import train_target

    config = PRESETS[args.preset]()
    corpus = (f"{prompt(problem.question)} {problem.answer}" for problem in train_problems)
    tokenizer = tokenizers.train(corpus, config.vocab_size)
    plan = _plan(args, steps=1000, minutes=2.0, lr=2e-3, weight_decay=0.1)
    checkpoint = args.work / "target.pt"
    target, state = train_target(
        config,
        tokenizer,
        train_problems,
        dev_problems,
        plan,
        args.batch_size,
        checkpoint,
        args.device,
        eager=args.eager,
    )
    states = [state]
    extra: dict[str, Any] = {}
    if args.sharpen_steps:
        sharpening = dataclasses.replace(plan, steps=args.sharpen_steps, minutes=SHARPEN_MINUTES, lr=SHARPEN_LR)
        states.append(_sharpen(args, target, tokenizer, train_problems, dev_problems, sharpening))
        extra = {"sharpening": dataclasses.asdict(sharpening) | {"final": states[1].curve[-1]}}
    if not (args.out / TOKENIZER).exists():
        tokenizer.save(str(args.out / TOKENIZER))
    save_weights(args.out, "target", target)
    _finish(args, config, plan, states, train_problems, dev_problems, **extra)


def _sharpen(
    args: argparse.Namespace,
    target: Target,
    tokenizer: Tokenizer,
    train_problems: list[Problem],
    dev_problems: list[Problem],
    plan: Plan,
) -> State:
    """Train the target on, in place, on its own greedy answers: those that come to an end."""
    from mhc.dspark.train_target import fit

    frozen = copy.deepcopy(target)
    to_inference(frozen, _inference_dtype(args.device))
    before = sha256((args.work / "target.pt").read_bytes())
    train_samples, dev_samples, checkpoint = _answers(
        args,
        "sharpening",
        before,
        frozen,
        tokenizer,
        train_problems,
        dev_problems,
        _given(args.rounds, 3),
        temperature=0.0,
    )
    ended = [sample for sample in train_samples if sample.ids[-1] == EOS_ID]
    if len(ended) < args.batch_size:
        raise ValueError(
            f"only {len(ended)} of {len(train_samples)} greedy answers end: train for more --steps, or do without "
            "sharpening (--sharpen-steps 0)"
        )
    held_out = {"own": dev_samples, "answer": encode(tokenizer, dev_problems)}
    return fit("sharpening", target, ended, held_out, plan, args.batch_size, checkpoint, args.device, eager=args.eager)


def _answers(
    args: argparse.Namespace,
    name: str,
    digest: str,
    target: Target,
    tokenizer: Tokenizer,
    train_problems: list[Problem],
    dev_problems: list[Problem],
    rounds: int,
    temperature: float,
) -> tuple[list[Sample], list[Sample], Path]:
    """The target's answers to train and to held-out questions, made once for the target with this digest.

    Returns:
        Both, and the checkpoint of what is trained on them: other answers never resume it.
    """
    from mhc.dspark import generations

    key = f"{digest}/{args.seed}/{rounds}/{len(train_problems)}/{len(dev_problems)}"
    store = args.work / f"{name}.json"
    asked = [*train_problems, *dev_problems]
    samples = generations.cached(store, key)
    if samples is None:
        made = generations.answer(
            target, tokenizer, asked, rounds, args.seed, temperature=temperature, capture=not args.eager
        )
        samples = generations.cached(store, key, made)
        assert samples is not None
    # a question is held out with all its rounds
    train_samples = [sample for i, sample in enumerate(samples) if i % len(asked) < len(train_problems)]
    checkpoint = args.work / f"{name}-{sha256(key.encode())[:12]}.pt"
    return train_samples, samples[len(train_problems) : len(asked)], checkpoint


def _given(value: Any, default: Any) -> Any:
    """An option, or its default where it was left out: 0 is refused later, not replaced."""
    return default if value is None else value


def _inference_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _draft(args: argparse.Namespace, train_problems: list[Problem], dev_problems: list[Problem]) -> None:
    from mhc.dspark.train_draft import train_draft

    pair = load_pair(args.out, args.device, _inference_dtype(args.device), with_draft=False)
    digest, rounds = read_card(args.out)["sha256"]["target"], _given(args.rounds, 4)
    train_samples, dev_samples, checkpoint = _answers(
        args, "draft", digest, pair.target, pair.tokenizer, train_problems, dev_problems, rounds, temperature=1.0
    )
    plan = _plan(args, steps=9000, minutes=6.0, lr=1e-3, weight_decay=0.0)
    draft, state = train_draft(
        pair.target,
        train_samples,
        dev_samples,
        plan,
        args.batch_size,
        args.anchors,
        checkpoint,
        args.device,
        eager=args.eager,
    )
    save_weights(args.out, "draft", draft)
    extra = {"generations": len(train_samples), "rounds": rounds, "anchors": args.anchors}
    _finish(args, pair.target.config, plan, [state], train_problems, dev_problems, **extra)


def _finish(
    args: argparse.Namespace,
    config: V4Config,
    plan: Plan,
    states: list[State],
    train_problems: list[Problem],
    dev_problems: list[Problem],
    **extra: object,
) -> None:
    """Loss curve and card, last: a folder with a card is a finished one."""
    header = run_line(f"train-{args.model}", seed=args.seed, plan=dataclasses.asdict(plan))
    with Journal(free_path(args.out, header), header) as journal:
        for state in states:
            for record in state.curve:
                journal.append(record)
    minutes = sum(state.elapsed_s for state in states) / 60
    summary = {
        "steps": sum(state.step for state in states),
        "minutes": round(minutes, 2),
        "batch_size": args.batch_size,
        "train_questions": len(train_problems),
        "dev_questions": len(dev_problems),
        "train_sha256": SHA256["train"],
        "plan": dataclasses.asdict(plan),
        "final": states[0].curve[-1],
    }
    update_card(args.out, args.model, config, args.seed, **summary, **extra)
    print(f"{args.model}: {summary['steps']} steps in {minutes:.1f} min, held out: {states[-1].curve[-1]}")
    assert (args.out / CARD).is_file()
