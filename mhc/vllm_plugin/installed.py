"""Where the installed vLLM's sources are: looked up, never imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

MODELS = ("deepseek_v4", "deepseek_v41")


def draft_module(model: str) -> str:
    """The dotted name of a model's DSpark module on NVIDIA GPUs."""
    return f"vllm.models.{model}.nvidia.dspark"


def find() -> tuple[str, Path] | None:
    """The version and package folder of the installed vLLM, or None."""
    spec = importlib.util.find_spec("vllm")
    # a folder that only happens to be called vllm has no origin
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return version, Path(next(iter(spec.submodule_search_locations)))


def read(package: Path, model: str) -> tuple[str, str] | None:
    """The sources of a model's draft and decoder layer; None where this vLLM has no such model.

    Args:
        package: the folder `vllm`.
        model: one of `MODELS`.
    """
    folder = package / "models" / model / "nvidia"
    if not (folder / "dspark.py").exists():
        return None
    return (folder / "dspark.py").read_text(encoding="utf-8"), (folder / "model.py").read_text(encoding="utf-8")
