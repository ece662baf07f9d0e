"""What the vLLM plugin would change in the installed vLLM, and why; needs neither a GPU nor to import vLLM."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mhc.vllm_plugin import installed
from mhc.vllm_plugin.source import DRAFT_CLASS, Mismatch, examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m mhc vllm-status`."""
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="the folder `vllm` of another installation")


def run(args: argparse.Namespace) -> int:
    """Print one line a model; 0 when every model found would be patched, 1 otherwise."""
    if args.vllm is not None:
        if not (args.vllm / "models").is_dir():
            print(f"mhc vllm-status: --vllm must be a folder vllm with its models, got {args.vllm}", file=sys.stderr)
            return 1
        version, package = "of --vllm", args.vllm
    else:
        found = installed.find()
        if found is None:
            print("vLLM is not installed here: the plugin does nothing. Install it, or name its folder with --vllm.")
            return 1
        version, package = found
    print(f"vLLM {version} in {package}")
    lines = [line(package, model) for model in installed.MODELS]
    print("\n".join(text for _, text in lines))
    return 0 if all(fits for fits, _ in lines) else 1


def line(package: Path, model: str) -> tuple[bool, str]:
    """Whether all is well with a model, and the sentence that says so."""
    sources = installed.read(package, model)
    if sources is None:
        return True, f"{model}: this vLLM has no such DSpark model, nothing to patch"
    try:
        match = examine(*sources)
    except Mismatch as error:
        return False, f"{model}: left alone, {error}"
    if match.delayed:
        kernel = "vLLM's kernel only (its pre is delayed)"
    elif match.no_table is not None:
        kernel = f"our kernel or vLLM's; no token table, {match.no_table}"
    else:
        kernel = (
            "a token table, our kernel or vLLM's. The table needs a whole bf16 embedding: "
            "whether this model's is one (not sharded, not quantised) shows when it is loaded"
        )
    return True, (
        f"{model}: would be patched. {DRAFT_CLASS}.forward, line {match.line}: `{match.statement}` is kept from "
        f"running, the first layer takes its own branch for 2-D embeddings; first pre by {kernel}"
    )
