"""Reading DeepSeek-V4 checkpoints: safetensors shards with an index, of which only the wanted tensors are read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mhc.config import HC_MULT_RANGE, MHCConfig

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PARTS = ("attn", "ffn")
PIECES = ("fn", "base", "scale")


class Checkpoint:
    """Names and files of a checkpoint; tensors are read one at a time.

    Args:
        path: a folder with `model.safetensors.index.json` and its shards, a folder with one or more `*.safetensors`
            and no index, or a single safetensors file.

    Raises:
        FileNotFoundError: nothing readable at `path`.
        ValueError: the index is no index, or two files hold the same tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._shards: dict[Path, safe_open] = {}
        self.files = self._locate()

    def _locate(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index = self.path / INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                return {name: self.path / str(file) for name, file in weight_map.items()}
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} must be a JSON object with a weight_map, got {error!r}") from error
        shards = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        if not shards:
            raise FileNotFoundError(
                f"no {INDEX} and no *.safetensors at {self.path}: give a checkpoint's folder or file"
            )
        files: dict[str, Path] = {}
        for shard in shards:
            for name in self.keys(shard):
                if name in files:
                    raise ValueError(f"{name} is in both {files[name]} and {shard}")
                files[name] = shard
        return files

    def keys(self, file: Path) -> list[str]:
        """The names that a shard really holds, whatever the index says."""
        return list(self._shard(file).keys())

    def _shard(self, file: Path) -> safe_open:
        """An open shard: its header is read and checked against the file's size, its tensors are not."""
        if file not in self._shards:
            try:
                self._shards[file] = safe_open(file, framework="pt")
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{file} is missing from the checkpoint {self.path}") from error
            except SafetensorError as error:
                raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
        return self._shards[file]

    def require(self, wanted: Iterable[str], within: Iterable[str]) -> None:
        """Check that all `wanted` names exist and that no other name starts with one of the prefixes in `within`.

        Raises:
            ValueError: naming the missing or unexpected tensor, how many there are, and the file.
        """
        names, prefixes = set(wanted), tuple(within)
        missing = sorted(names - self.files.keys())
        if missing:
            raise ValueError(f"{missing[0]} is missing from {self.path} ({len(missing)} of {len(names)} are)")
        held = dict(self.files)
        for file in sorted({self.files[name] for name in names}):
            try:
                present = set(self.keys(file))
            except (FileNotFoundError, ValueError) as error:
                first = min(name for name in names if self.files[name] == file)
                raise type(error)(f"{first} cannot be read: {error}") from error
            lost = sorted(name for name in names - present if self.files[name] == file)
            if lost:
                raise ValueError(f"{lost[0]} is missing from {file}, where {INDEX} places it ({len(lost)} are)")
            held |= dict.fromkeys(present, file)
        unexpected = sorted(name for name in held if name.startswith(prefixes) and name not in names)
        if unexpected:
            raise ValueError(f"{unexpected[0]} in {held[unexpected[0]]} is unexpected ({len(unexpected)} such tensors)")

    def check(self, name: str, shape: tuple[int, ...] | None = None) -> torch.dtype:
        """Look at a tensor's header only.

        Args:
            name: full name.
            shape: what it must be; None takes any.

        Returns:
            The stored dtype.

        Raises:
            ValueError: the tensor is missing, quantised or of another shape, or its shard is truncated.
        """
        if name not in self.files:
            raise ValueError(f"{name} is missing from {self.path}")
        file = self.files[name]
        try:
            part = self._shard(file).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{name} is missing from {file}, where {INDEX} places it") from error
        if part.get_dtype() not in DTYPES:
            raise ValueError(
                f"{name} in {file} is quantised ({part.get_dtype()}): convert the checkpoint to bf16 first, "
                "fp8 and fp4 weights are not read"
            )
        if shape is not None and tuple(part.get_shape()) != tuple(shape):
            raise ValueError(f"{name} in {file} must have shape {list(shape)}, got {list(part.get_shape())}")
        return DTYPES[part.get_dtype()]

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read one floating-point tensor to the CPU, in its stored dtype; raises as `check`."""
        self.check(name, shape)
        return self._shard(self.files[name]).get_tensor(name)


def load_mhc_tensors(path: str | Path, prefix: str = "mtp.0", config: MHCConfig | None = None) -> dict[str, Tensor]:
    """Read the mHC tensors of one layer, and of the head where the layer has one, and nothing else.

    Args:
        path: a real-layout DeepSeek-V4 checkpoint, see `Checkpoint`.
        prefix: the layer: `mtp.0` is the draft's first, `layers.0` the target's; the empty string reads the head that
            stands at the top level.
        config: checks the shapes against this model; by default they only have to agree with each other.

    Returns:
        Without the prefix: `hc_attn_fn` [M, hc * H], `hc_attn_base` [M], `hc_attn_scale` [3], the same for `hc_ffn_*`,
        and `hc_head_fn` [hc, hc * H], `hc_head_base` [hc], `hc_head_scale` [1] where the checkpoint holds any of them;
        all fp32, on the CPU.

    Raises:
        FileNotFoundError: no checkpoint, or a shard is missing.
        ValueError: naming the tensor and the file: missing, unexpected (any other `hc_*` under the prefix), truncated,
            wrong shape, or not fp32.
    """
    checkpoint = Checkpoint(path)
    stem = f"{prefix}." if prefix else ""
    wanted = [f"hc_{part}_{piece}" for part in PARTS for piece in PIECES] if prefix else []
    head = [f"hc_head_{piece}" for piece in PIECES]
    if not prefix or any(f"{stem}{name}" in checkpoint.files for name in head):
        wanted += head
    checkpoint.require([stem + name for name in wanted], [stem + "hc_"])
    tensors = {name: checkpoint.read(stem + name) for name in wanted}
    for name, shape in _shapes(checkpoint, stem, tensors, config).items():
        file = checkpoint.files[stem + name]
        if tensors[name].dtype != torch.float32:
            raise ValueError(f"{stem}{name} in {file} must be float32, got {tensors[name].dtype}")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{stem}{name} in {file} must have shape {list(shape)}, got {list(tensors[name].shape)}")
    return tensors


def _shapes(
    checkpoint: Checkpoint, stem: str, tensors: dict[str, Tensor], config: MHCConfig | None
) -> dict[str, tuple[int, ...]]:
    """What every tensor's shape must be: by the config, or by the first projection."""
    if config is None:
        first = next(iter(tensors))
        hc, width = _streams(f"{stem}{first} in {checkpoint.files[stem + first]}", first, tensors[first])
    else:
        hc, width = config.hc_mult, config.hc_mult * config.hidden_size
    rows = hc * (hc + 2)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in tensors:
        count = hc if "_head_" in name else rows
        scales = 1 if "_head_" in name else 3
        shapes[name] = {"fn": (count, width), "base": (count,), "scale": (scales,)}[name.rsplit("_", 1)[-1]]
    return shapes


def _streams(where: str, name: str, fn: Tensor) -> tuple[int, int]:
    """`hc` and `hc * H` of a projection."""
    for hc in HC_MULT_RANGE:
        rows = hc if "_head_" in name else hc * (hc + 2)
        if fn.dim() == 2 and fn.shape[0] == rows and fn.shape[1] % hc == 0:
            return hc, fn.shape[1]
    raise ValueError(
        f"{where} must have shape [hc * (hc + 2), hc * H] ([hc, hc * H] in the head), got {list(fn.shape)}"
    )
