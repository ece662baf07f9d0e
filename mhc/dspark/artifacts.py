"""A trained pair on disk: bf16 safetensors, tokenizer, configuration and a card that says how they were made."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from mhc.bench.records import run_line
from mhc.config import MHCConfig
from mhc.dspark import tokenizer as tokenizers
from mhc.dspark.config import V4Config
from mhc.dspark.draft import DSparkDraft
from mhc.dspark.initialise import KEPT_FP32, to_inference
from mhc.dspark.target import Target
from mhc.gsm8k.data import sha256

TOKENIZER, CARD = "tokenizer.json", "card.json"
Module = TypeVar("Module", bound=nn.Module)


class Pair(NamedTuple):
    """A target, its draft (None before it is trained) and their tokenizer."""

    target: Target
    draft: DSparkDraft | None
    tokenizer: Tokenizer


def save_weights(folder: Path, name: str, module: nn.Module) -> Path:
    """Write `<name>.safetensors`: bf16, but mHC weights, sinks and the confidence head in fp32 as in inference."""
    path = folder / f"{name}.safetensors"
    state = {
        key: value.detach().to("cpu", torch.float32 if any(part in key for part in KEPT_FP32) else torch.bfloat16)
        for key, value in module.state_dict().items()
    }
    save_file({key: value.contiguous() for key, value in state.items()}, str(path), metadata={"model": name})
    return path


def load_pair(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    with_draft: bool = True,
) -> Pair:
    """Read a trained pair for inference.

    Args:
        folder: holds the card, the tokenizer, `target.safetensors` and, once trained, `draft.safetensors`.
        device: where to.
        dtype: bf16, or fp32 / fp64 for exactness checks (mHC weights stay fp32).
        with_draft: False leaves the draft out, whether or not there is one.

    Raises:
        FileNotFoundError: a file is missing.
        RuntimeError: names or shapes do not fit the card's configuration.
        ValueError: a weight file is not the one whose hash the card holds.
    """
    folder = Path(folder)
    card = read_card(folder)
    config = config_of(card)
    target = _load(Target(config), folder, "target", card)
    draft = None
    if with_draft and "draft" in card["sha256"]:
        draft = _load(DSparkDraft(config), folder, "draft", card)
    for module in (target, draft):
        if module is not None:
            to_inference(module, dtype).to(device)
    if draft is not None:
        draft.bind(target)
    return Pair(target, draft, tokenizers.load(folder / TOKENIZER))


def _load(module: Module, folder: Path, name: str, card: dict[str, Any]) -> Module:
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: `python -m mhc train {name}` makes it")
    digest = sha256(path.read_bytes())
    if digest != card["sha256"][name]:
        raise ValueError(f"{path} has sha256 {digest}, its card says {card['sha256'][name]}")
    module.load_state_dict(load_file(str(path)))
    return module


def config_of(card: dict[str, Any]) -> V4Config:
    """The configuration a card holds."""
    fields = dict(card["config"])
    return V4Config(**fields | {"mhc": MHCConfig(**fields["mhc"]), "aux_layers": tuple(fields["aux_layers"])})


def read_card(folder: str | Path) -> dict[str, Any]:
    """The card of a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(folder) / CARD
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: `python -m mhc train target` makes the folder")
    return json.loads(path.read_text())


def update_card(folder: Path, name: str, config: V4Config, seed: int, **training: Any) -> None:
    """Record how a model was trained: provenance, losses, and the hashes of what is in the folder."""
    path = folder / CARD
    card = json.loads(path.read_text()) if path.is_file() else {"sha256": {}, "training": {}}
    card["config"] = asdict(config)
    for file in (f"{name}.safetensors", TOKENIZER):
        card["sha256"][file.split(".")[0]] = sha256((folder / file).read_bytes())
    card["training"][name] = {"run": run_line(f"train-{name}", seed=seed), **training}
    path.write_text(json.dumps(card, indent=1) + "\n")
