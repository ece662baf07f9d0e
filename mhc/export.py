"""Compile every kernel that a model can reach into a folder, for servers that must not compile.

    python -m mhc export-kernels kernels --hidden 4096 --max-tokens 8192
    MHC_KERNELS=kernels vllm serve ...

Exporting needs nvcc but no GPU. A process with `MHC_KERNELS` loads from the folder what it finds there; a kernel that
is missing (other sizes, sources, TileLang or GPU) is compiled as ever.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mhc import launch
from mhc.config import MHCConfig

FOLDER = "MHC_KERNELS"  # environment variable: the folder of exported kernels
HOPPER = "sm_90a"

Kernel = tuple[Any, ...]  # its name and its factory's arguments
WORKER = """
import pickle, sys
from mhc.export import export
for call in pickle.load(sys.stdin.buffer):
    export(*call)
"""

_modules: list[Any] = []  # a library stays loaded as long as its functions are
_folders: list[Path] = []  # looked into before `MHC_KERNELS`


def export_kernels(folder: Path, config: MHCConfig, max_tokens: int, arch: str = HOPPER, jobs: int = 1) -> list[Path]:
    """Export every kernel that `config` can reach with up to `max_tokens` tokens; those already there are kept.

    Args:
        folder: made if missing.
        config: shapes and constants.
        max_tokens: the most tokens of a call, at least 1.
        arch: of the GPU that will run them, `sm_90a` on Hopper.
        jobs: processes that compile at a time.

    Returns:
        The files, one a kernel.

    Raises:
        ValueError: `max_tokens` or `jobs` is below 1.
        RuntimeError: a kernel does not compile in one of several processes.
    """
    for name, value in (("max_tokens", max_tokens), ("jobs", jobs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    folder.mkdir(parents=True, exist_ok=True)
    kernels = launch.reachable(config, max_tokens)
    if jobs > 1:
        _in_processes(folder, arch, kernels, jobs)
    return [export(folder, arch, *kernel) for kernel in kernels]


def _in_processes(folder: Path, arch: str, kernels: Sequence[Kernel], jobs: int) -> None:
    """Export in new processes: a fork would break CUDA, multiprocessing's spawn would import the caller's script.

    Threads would take turns: lowering a kernel is mostly Python.
    """
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # no GPU, so that no process makes itself a CUDA context
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}
    workers = []
    for share in (kernels[i::jobs] for i in range(min(jobs, len(kernels)))):
        worker = subprocess.Popen([sys.executable, "-c", WORKER], env=environment, stdin=subprocess.PIPE)
        assert worker.stdin
        with worker.stdin as calls:
            pickle.dump([(folder, arch, *kernel) for kernel in share], calls)
        workers.append(worker)
    failed = sum(worker.wait() != 0 for worker in workers)
    if failed:
        raise RuntimeError(f"{failed} of {len(workers)} processes that compile kernels failed: their errors are above")


@contextlib.contextmanager
def compiled_ahead(kernels: Sequence[Kernel], arch: str, jobs: int) -> Iterator[None]:
    """Compile in `jobs` processes; until it ends, `load` finds these kernels too."""
    with tempfile.TemporaryDirectory(prefix="mhc-kernels-") as name:
        folder = Path(name)
        _in_processes(folder, arch, [kernel for kernel in kernels if not _exported(arch, *kernel)], jobs)
        _folders.append(folder)
        try:
            yield
        finally:
            _folders.remove(folder)


def export(folder: Path, arch: str, name: str, *args: Any) -> Path:
    """Compile one kernel into `folder`, unless it is there: `<name>-<digest>.<function>.so`."""
    found = find(folder, arch, name, *args)
    if found:
        return found
    compiled, symbol = launch.compiled({"kind": "cuda", "arch": arch}, name, *args)
    path = folder / f"{stem(arch, name, *args)}.{symbol}.so"
    # a server that starts meanwhile never sees half a file
    unfinished = folder / f"{os.getpid()}.unfinished.so"
    cached = getattr(compiled.adapter, "libpath", None)
    if cached:  # TileLang found the library on disk and can no longer export it, but it is one already
        shutil.copyfile(cached, unfinished)
    else:
        compiled.export_library(str(unfinished))
    unfinished.replace(path)
    return path


def load(target: Mapping[str, str], name: str, *args: Any) -> Callable[..., None] | None:
    """The entry point of a kernel out of the folder that `MHC_KERNELS` names; None where it has to be compiled.

    Raises:
        FileNotFoundError: `MHC_KERNELS` names no folder.
    """
    path = _exported(target["arch"], name, *args)
    return open_library(path) if path else None


def _exported(arch: str, name: str, *args: Any) -> Path | None:
    """The file of a kernel in any folder that this process looks into."""
    folders = list(_folders)
    if os.environ.get(FOLDER):
        folders.append(Path(os.environ[FOLDER]))
        if not folders[-1].is_dir():
            raise FileNotFoundError(
                f"{FOLDER} must name a folder of exported kernels, got {folders[-1]}: "
                f"run `python -m mhc export-kernels {folders[-1]}`"
            )
    return next((path for folder in folders if (path := find(folder, arch, name, *args))), None)


def open_library(path: Path) -> Callable[..., None]:
    """The entry point in an exported file."""
    import tvm_ffi

    _load_runtime()
    module = tvm_ffi.load_module(str(path))
    _modules.append(module)
    return module[path.name.split(".")[1]]


def find(folder: Path, arch: str, name: str, *args: Any) -> Path | None:
    """The exported file of a kernel, if `folder` has it."""
    return next(folder.glob(f"{stem(arch, name, *args)}.*.so"), None)


def stem(arch: str, name: str, *args: Any) -> str:
    """A kernel's name and a digest of all that its code depends on."""
    parts = (arch, name, repr(args), _sources(), importlib.metadata.version("tilelang"), platform.machine())
    return f"{name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}"


@functools.cache
def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("kernels/*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _load_runtime() -> None:
    """What runs CUDA modules, out of TileLang's folder; TileLang itself is not imported."""
    spec = importlib.util.find_spec("tilelang")
    assert spec is not None
    assert spec.origin is not None
    ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m mhc export-kernels`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if missing; kernels already there are kept")
    parser.add_argument("--hidden", type=int, default=4096, help="H (default: %(default)s, DeepSeek-V4-Flash)")
    parser.add_argument("--hc", type=int, default=4, help="streams (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="most tokens of a call (default: %(default)s)")
    parser.add_argument("--arch", default=HOPPER, help="of the GPU that will run them (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at a time (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Export and say how to use what was exported."""
    try:
        config = MHCConfig(args.hidden, args.hc)
        files = export_kernels(args.folder, config, args.max_tokens, args.arch, args.jobs)
    except ValueError as error:
        print(f"mhc export-kernels: {error}", file=sys.stderr)
        return 1
    size_mib = sum(file.stat().st_size for file in files) / 2**20
    print(f"{len(files)} kernels, {size_mib:.1f} MiB; use them with {FOLDER}={args.folder}")
    return 0
