"""Compile generated CUDA for sm_90a without a GPU and read what ptxas says about it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from .lowering import cache_dir


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


def compile_sources(sources: Sequence[str]) -> list[list[Usage]]:
    """Compile CUDA sources for sm_90a, all in one call of nvcc: most of its time goes into headers they share.

    Args:
        sources: what TileLang generated.

    Returns:
        For each source a `Usage` for each of its kernels, from the cache where this nvcc has seen the source before.

    Raises:
        RuntimeError: nvcc refused; its message.
    """
    nvcc = cuda_home() / "bin" / "nvcc"
    include = (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR, cuda_home() / "include" / "cccl")
    # the options of TileLang's own build, and a report
    options = ["--cubin", "-O3", "-std=c++20", "-arch=sm_90a", "-Xptxas", "-v", "-w"]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    tilelang_version = importlib.metadata.version("tilelang")  # its headers are part of the source
    keys = ["\0".join([source, *options, version, tilelang_version]).encode() for source in sources]
    reports = [cache_dir() / f"{hashlib.sha256(key).hexdigest()[:24]}.ptxas.json" for key in keys]
    new = {report: source for report, source in zip(reports, sources, strict=True) if not report.exists()}
    if new:
        with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
            file = Path(folder, "kernels.cu")
            file.write_text("\n".join(_renamed(source, f"_of_{i}") for i, source in enumerate(new.values())))
            command = [
                str(nvcc),
                *options,
                *(f"-I{path}" for path in include),
                "-o",
                f"{folder}/kernels.cubin",
                str(file),
            ]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"nvcc refused the generated CUDA:\n{result.stderr[-3000:]}")
            found = parse_ptxas(result.stderr + result.stdout)
            for i, report in enumerate(new):
                end = f"_of_{i}"
                own = [asdict(u) | {"kernel": u.kernel.removesuffix(end)} for u in found if u.kernel.endswith(end)]
                written = Path(folder, report.name)
                written.write_text(json.dumps(own))
                written.replace(report)
    return [[Usage(**fields) for fields in json.loads(report.read_text())] for report in reports]


def _renamed(source: str, suffix: str) -> str:
    """The source with all its kernels' names extended, so that many fit one file."""
    names = set(re.findall(r"__launch_bounds__\([^)]*\) (\w+)\(", source))
    return re.sub(r"\b(" + "|".join(names) + r")\b", rf"\1{suffix}", source) if names else source


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
