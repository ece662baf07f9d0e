"""Time one draft round on this GPU, part by part, in every arm, and record it.

Example: python -m mhc draft-split --preset v4_flash --requests 1 16 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from mhc.bench import hardware, records, timing
from mhc.dspark.config import V4Config
from mhc.dspark.draft import DSparkDraft
from mhc.dspark.expansion import EXPANSIONS
from mhc.dspark.parts import arms_difference, draft_parts, random_draft

PRESETS = {"v4_flash": V4Config.v4_flash, "mini": V4Config.mini, "tiny": V4Config.tiny}
FIELDS: records.Fields = {
    "part": (str,),
    "expansion": (str,),
    "requests": (int,),
    "T": (int,),
    "timer": (str,),
    "l2": (str,),
    "round": (int,),
    "calls_per_sample": (int,),
    "samples_us": (list,),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m mhc draft-split`."""
    parser.add_argument("--preset", choices=sorted(PRESETS), default="v4_flash", help="shapes (default: v4_flash)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64], help="batch sizes (default: 1 16 64)")
    parser.add_argument("--block-size", type=int, help="k (default: the preset's)")
    parser.add_argument("--context", type=int, default=128, help="context rows a request (default: 128)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--samples", type=int, default=20, help="samples a round (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("notebooks/data"), help="folder of the record")


def run(args: argparse.Namespace) -> int:
    """Measure and print; one sentence where no GPU is present."""
    if not torch.cuda.is_available():
        print("mhc draft-split: needs an NVIDIA GPU; recorded runs are in notebooks/data", file=sys.stderr)
        return 1
    config = PRESETS[args.preset]()
    config = replace(config, block_size=args.block_size or config.block_size)
    draft = random_draft(config, "cuda", args.seed)
    line = records.run_line(
        "draft-split", seed=args.seed, limits=hardware.limits(), preset=args.preset, context=args.context
    )
    with records.Recorder(records.free_path(args.out, line), line, FIELDS) as recorder:
        points = list(measure(draft, args.requests, args.context, args.rounds, args.samples, args.seed))
        for point in points:
            recorder.point(**point)
        arms = [arm for arm in EXPANSIONS if arm != "repeat"]
        apart = {arm: arms_difference(draft, max(args.requests), args.context, arm) for arm in arms}
        recorder.close(difference_to_repeat=apart)
    print(table(points))
    for arm, values in apart.items():
        print(f"{arm} against repeat: " + ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
    print(f"recorded in {recorder.path}")
    return 0


def measure(
    draft: DSparkDraft,
    requests: list[int],
    context_length: int,
    rounds: int,
    samples: int,
    seed: int,
    timer: str = "cuda_graph",
) -> Iterator[dict[str, object]]:
    """Every part in every arm, all arms and parts of one batch size interleaved in random order."""
    for count in requests:
        timers: dict[tuple[str, str], timing.Timer] = {}
        for expansion in EXPANSIONS:
            for part, call in draft_parts(draft, count, context_length, expansion, seed).items():
                # the other parts are the same in every arm; the first post + pre reads what the arm's first pre left
                if part in ("forward", "first_pre", "post_pre") or expansion == "broadcast":
                    timers[part, expansion] = timing.TIMERS[timer]([call])
        steps = list(timing.interleave(list(timers), rounds, seed))
        for round_, _, (part, expansion) in tqdm(steps, desc=f"{count} requests", unit="part", leave=False):
            clock = timers[part, expansion]
            yield {
                "part": part,
                "expansion": expansion,
                "requests": count,
                "T": count * draft.config.block_size,
                "timer": timer,
                "l2": "warm",
                "round": round_,
                "calls_per_sample": clock.calls_per_sample,
                "samples_us": clock.sample(samples),
            }


def table(points: list[dict[str, object]]) -> str:
    """Medians in microseconds, and each part's share of the forward of its arm."""
    merged: dict[tuple[object, object, object], list[float]] = {}
    for point in points:
        key = (point["requests"], point["expansion"], point["part"])
        merged.setdefault(key, []).extend(point["samples_us"])  # type: ignore[arg-type]
    lines = [f"{'requests':>8}  {'arm':10} {'part':10} {'time_us':>10} {'share':>7}"]
    for (count, arm, part), samples in merged.items():
        time_us, whole = median(samples), median(merged[count, arm, "forward"])
        lines.append(f"{count:>8}  {arm:10} {part:10} {time_us:>10.2f} {time_us / whole:>7.1%}")
    return "\n".join(lines)
