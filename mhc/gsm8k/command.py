"""Ask GSM8K's test questions, of the miniature pair or of any OpenAI-compatible server, and record every answer.

  python -m mhc gsm8k --engine mini --model DIR --arm broadcast --k 7 --temperature 1 --out answers.jsonl
  python -m mhc gsm8k --engine openai --base-url http://localhost:8000 --model NAME --shots 5 --out answers.jsonl
  python -m mhc gsm8k record --model DIR --out DIR      every arm, length, threshold and speed of the miniature pair

The file of `record` holds every line as soon as it is measured, so an interrupted one keeps what was done. A run of the
other forms that was killed goes on where it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhc.gsm8k.data import SHA256, Problem, load
from mhc.gsm8k.journal import Journal
from mhc.gsm8k.prompts import MAX_TOKENS, RULES, SEED, prompts
from mhc.gsm8k.stats import wilson

GATE_ACCURACY, GATE_TOLERANCE, GATE_LENGTH = 0.92, 0.08, 1.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of all three forms."""
    parser.add_argument("action", nargs="?", default="ask", choices=("ask", "record"))
    parser.add_argument("--engine", choices=("mini", "openai"), default="mini")
    parser.add_argument("--model", required=True, help="folder of the trained pair, or the server's model name")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to; `record`: a folder")
    parser.add_argument("--data", help="folder with GSM8K's files (default: MHC_GSM8K_DIR, else a download)")
    parser.add_argument("--questions", type=int, help="only the first so many test questions")
    parser.add_argument("--shots", type=int, help="solved examples before each question (default: mini 0, openai 5)")
    parser.add_argument("--rule", choices=RULES, default="vllm", help="how an answer is read off a text")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--seed", type=int, help=f"default: mini 0, openai {SEED}")
    parser.add_argument("--k", type=int, default=7, help="draft length; openai: what the server was started with")
    mini = parser.add_argument_group("mini")
    mini.add_argument("--arm", default="broadcast", help="plain, repeat, broadcast, table or collapsed")
    mini.add_argument("--threshold", type=float, default=0.0, help="cut drafts at the first confidence below")
    mini.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    mini.add_argument("--maps", default="kernels", choices=("kernels", "torch"), help="torch needs no TileLang")
    mini.add_argument("--eager", action="store_true", help="no CUDA graphs")
    mini.add_argument("--batch-size", type=int, default=64, help="questions decoded together and saved together")
    server = parser.add_argument_group("openai")
    server.add_argument("--base-url", default="http://localhost:8000")
    server.add_argument("--api", choices=("completions", "chat"), default="completions")
    server.add_argument("--concurrency", type=int, default=256)
    server.add_argument("--attempts", type=int, default=6)
    server.add_argument(
        "--gate", action="store_true", help="fail unless accuracy and acceptance length reach V4-Flash's"
    )


def run(args: argparse.Namespace) -> int:
    """0 when every question is answered (and the gate, if asked for, is passed)."""
    try:
        problems = load("test", args.data)[: args.questions]
        if args.action == "record":
            return _record(args, problems)
        return (_mini if args.engine == "mini" else _openai)(args, problems)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"mhc gsm8k: {error}", file=sys.stderr)
        return 1


def _header(args: argparse.Namespace, problems: Sequence[Problem], **fields: Any) -> dict[str, Any]:
    """What makes two runs the same run, and may therefore share a file."""
    return {
        "what": "gsm8k",
        "engine": args.engine,
        "model": args.model,
        "data_sha256": SHA256["test"],
        "questions": len(problems),
        "rule": args.rule,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "k": args.k,
        **fields,
    }


def _journal(args: argparse.Namespace, header: dict[str, Any]) -> Journal:
    from mhc.bench.records import run_line

    journal = Journal(args.out, header, run_line("gsm8k", seed=header["seed"]))
    if journal.torn_bytes:
        print(f"{args.out}: dropped {journal.torn_bytes} bytes of a line that was never finished", file=sys.stderr)
    return journal


def _mini(args: argparse.Namespace, problems: Sequence[Problem]) -> int:
    import torch
    from tqdm import tqdm

    from mhc.dspark import hyper
    from mhc.dspark.artifacts import load_pair, read_card
    from mhc.gsm8k.mini import Arm, encode_prompts, run_arm

    hyper.OPS = args.maps == "kernels"
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    pair = load_pair(args.model, device)
    plain = args.arm == "plain"
    arm = Arm(None if plain else args.arm, 0 if plain else args.k, args.temperature, args.threshold)
    shots = load("train", args.data)[: args.shots or 0]
    seed = args.seed or 0
    header = _header(
        args, problems, arm=arm.name, shots=len(shots), seed=seed, model_sha256=read_card(args.model)["sha256"]
    )
    with _journal(args, header) as journal:
        done = {row["id"] for row in journal.records if row["record"] == "question"}
        todo = [problem for problem in problems if problem.id not in done]
        for at in tqdm(range(0, len(todo), args.batch_size), desc=arm.name, unit="batch"):
            part = todo[at : at + args.batch_size]
            texts = encode_prompts(pair, part, shots)
            outcome = run_arm(
                pair, part, texts, arm, rule=args.rule, seed=seed, max_tokens=args.max_tokens, capture=not args.eager
            )
            for row in outcome.rows:
                journal.append(row.record())
            journal.append(outcome.total)
        return _summary(args, journal)


def _openai(args: argparse.Namespace, problems: Sequence[Problem]) -> int:
    from mhc.gsm8k.openai_client import Sampling, Server, ask

    count = 5 if args.shots is None else args.shots
    texts = prompts(problems, load("train", args.data) if count else [], count)
    server = Server(args.base_url, args.model, args.api, args.concurrency, args.attempts)
    sampling = Sampling(args.temperature, args.max_tokens, SEED if args.seed is None else args.seed)
    header = _header(args, problems, shots=count, seed=sampling.seed, api=args.api, stop=list(sampling.stop))
    with _journal(args, header) as journal:
        asyncio.run(ask(server, sampling, problems, texts, journal, rule=args.rule, arm="server", k=args.k))
        return _summary(args, journal, *_counted(journal))


def _counted(journal: Journal) -> tuple[float | None, int]:
    """Mean acceptance length by the server's counters, and the questions it covers: not those of a killed session."""
    known = [line for line in journal.records if line["record"] == "session" and line["acceptance"]]
    drafts = sum(line["acceptance"]["drafts"] for line in known)
    length = 1 + sum(line["acceptance"]["accepted"] for line in known) / drafts if drafts else None
    return length, sum(line["questions"] for line in known)


def _record(args: argparse.Namespace, problems: Sequence[Problem]) -> int:
    import torch

    from mhc.dspark import hyper
    from mhc.gsm8k.record import Scope, record

    hyper.OPS = args.maps == "kernels"
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    scope = Scope(k=args.k, max_tokens=args.max_tokens, seed=args.seed or 0, rule=args.rule, graphs=not args.eager)
    print(f"wrote {record(args.model, args.out, problems, scope, device)}")
    return 0


def _summary(
    args: argparse.Namespace, journal: Journal, server_length: float | None = None, counted: int | None = None
) -> int:
    rows = [line for line in journal.records if line["record"] == "question"]
    right = sum(row["correct"] for row in rows)
    accuracy = wilson(right, len(rows))
    length = server_length
    drafts = sum(row["drafts"] or 0 for row in rows)
    if drafts:
        length = 1 + sum(sum(row["accepted_per_position"]) for row in rows) / drafts
    partly = f" (over {counted} of them)" if length is not None and counted not in (None, len(rows)) else ""
    print(
        f"{len(rows)} questions: accuracy {accuracy.value:.4f} (95 % {accuracy.low:.4f} to {accuracy.high:.4f}), "
        f"invalid {sum(row['invalid'] for row in rows) / len(rows):.4f}, mean acceptance length "
        f"{'not reported' if length is None else f'{length:.3f}'}{partly}; rows in {journal.path}"
    )
    if not getattr(args, "gate", False):
        return 0
    passed = accuracy.value >= GATE_ACCURACY - GATE_TOLERANCE and length is not None and length >= GATE_LENGTH
    wanted = f"accuracy >= {GATE_ACCURACY - GATE_TOLERANCE:.2f}, length >= {GATE_LENGTH}"
    print(f"gate ({wanted}): {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1
