"""Compile a PrimFunc's CUDA for sm_90a without a GPU and read what ptxas says about it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
from tvm import tirx

from .runner import cache_dir, lower


@dataclass(frozen=True)
class Usage:
    """What one kernel takes, from `ptxas -v`; spills and stack in bytes a thread, shared in static bytes a block."""

    kernel: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    barriers: int

    @property
    def spills(self) -> bool:
        """Whether anything that should be in a register is in memory."""
        return bool(self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)


def usage(prim_func: tirx.PrimFunc, pass_configs: Mapping[str, Any] | None = None) -> list[Usage]:
    """Lower and compile; see `compile_source`."""
    return compile_source(lower(prim_func, dict(pass_configs or {})).kernel_source)


def compile_source(source: str) -> list[Usage]:
    """Compile CUDA source for sm_90a.

    Args:
        source: what TileLang generated.

    Returns:
        One `Usage` a kernel, from the cache when this source was compiled before by this nvcc.

    Raises:
        RuntimeError: nvcc refused; its message.
    """
    home = cuda_home()
    nvcc = home / "bin" / "nvcc"
    # the options of TileLang's own build, and a report
    options = ["--cubin", "-O3", "-std=c++20", "-arch=sm_90a", "-Xptxas", "-v", "-w"]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    tilelang_version = importlib.metadata.version("tilelang")  # its headers are part of the source
    key = hashlib.sha256("\0".join([source, *options, version, tilelang_version]).encode()).hexdigest()[:24]
    report = cache_dir() / f"{key}.ptxas.json"
    if not report.exists():
        include = [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR, home / "include" / "cccl")]
        with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
            file = Path(folder, "kernel.cu")
            file.write_text(source)
            command = [str(nvcc), *options, *include, "-o", f"{folder}/kernel.cubin", str(file)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"nvcc refused the generated CUDA:\n{result.stderr[-3000:]}")
            written = Path(folder, "report")
            written.write_text(json.dumps([asdict(u) for u in parse_ptxas(result.stderr + result.stdout)]))
            written.replace(report)
    return [Usage(**fields) for fields in json.loads(report.read_text())]


def parse_ptxas(text: str) -> list[Usage]:
    """The kernels that `ptxas -v` speaks of."""

    def number(pattern: str, part: str) -> int:
        match = re.search(pattern, part)
        return int(match[1]) if match else 0

    parts = re.split(r"Compiling entry function '(\w+)' for 'sm_90a'", text)
    return [
        Usage(
            kernel=name,
            registers=number(r"Used (\d+) registers", part),
            stack_bytes=number(r"(\d+) bytes stack frame", part),
            spill_store_bytes=number(r"(\d+) bytes spill stores", part),
            spill_load_bytes=number(r"(\d+) bytes spill loads", part),
            shared_bytes=number(r"(\d+) bytes smem", part),
            barriers=number(r"used (\d+) barriers", part),
        )
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
    ]


def cuda_home() -> Path:
    """The toolkit out of the pinned nvidia-cuda-* wheels.

    Raises:
        RuntimeError: the wheels are not installed.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvcc":
            return Path(str(file.locate())).parent.parent
    raise RuntimeError("no nvcc: install the test extra, `pip install -e .[test]`")
