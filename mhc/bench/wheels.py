"""Offline package sets for GPU hosts that reach no network.

`python -m mhc bench wheels ours|peers` downloads wheels for the host's Python with pip, unpacks them into one tree,
leaves out what a run there never opens, and packs the tree as `site.txz`, cut into parts that fit a size limit.
`ours` is what this package needs beside torch and a CUDA toolkit; `peers` is vLLM's mHC kernels: its Python files,
DeepGEMM's extension and the TileLang version that vLLM pins, to be put in front of `ours` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

MIB = 2**20
PART_MIB = 60
VLLM = "vllm==0.26.0"

# the host is expected to hold torch, triton, numpy, cloudpickle, ml-dtypes, psutil, tqdm, transformers and ninja
SETS: dict[str, tuple[str, ...]] = {
    "ours": ("tilelang==0.1.12", "apache-tvm-ffi==0.1.11", "torch-c-dlpack-ext==0.1.5", "z3-solver==4.15.4.0"),
    "peers": (
        "tilelang==0.1.9",
        "apache-tvm-ffi==0.1.10",
        "z3-solver==4.15.4.0",  # TileLang looks for it beside itself
        "tile-kernels==1.0.0",
        "pyzmq==27.3.0",
        "cbor2==6.3.0",
        "sniffio==1.3.1",
        "distro==1.9.0",
        "blake3==1.0.11",
        "msgspec==0.23.0",
        "cachetools==8.0.2",
        "httpx2==2.16.2",
        "httpcore2==2.16.2",
        "truststore==0.10.5",
    ),
}
GLIBCS = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")

# parts of the wheels that only AMD builds, command-line users or test suites open
UNUSED = (
    "bin",
    "build_backend.py",
    "tilelang/3rdparty/composable_kernel",
    "tilelang/3rdparty/cutlass/tools",
    "z3/lib/libz3.so",  # a copy of libz3.so.4.15: a link to it takes its place
)
# vLLM's folders that its mHC kernels never import (checked by running their host code with the kernels stubbed)
VLLM_UNUSED = (
    "benchmarks",
    "entrypoints",
    "models",
    "model_executor/models",
    "transformers_utils",
    "vllm_flash_attn",
    "third_party/flash_linear_attention",
    "third_party/flashmla",
    "third_party/fmha_sm100",
    "third_party/tml_fa4",
    "third_party/triton_kernels",
)


def pip_flags(python: str) -> list[str]:
    """pip's flags for a foreign x86-64 Linux host with CPython `python` (`3.12`)."""
    flags = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        flags += ["--abi", abi]
    for glibc in (*(f"manylinux_{g}_x86_64" for g in GLIBCS), "manylinux2014_x86_64", "manylinux1_x86_64"):
        flags += ["--platform", glibc]
    return flags


def build(
    which: str, out: Path, python: str = "3.12", part_mib: int = PART_MIB, vllm_wheel: Path | None = None
) -> None:
    """Download, slim and pack one set into `out`, an empty or new folder.

    Args:
        which: `ours` or `peers`.
        out: gets `a/site.txz`, or `a/site.txz.00`, `b/site.txz.01`, ... when one part is not enough.
        python: the host's Python version.
        part_mib: largest part, MiB.
        vllm_wheel: vLLM's wheel where it is already on disk (300 MB); downloaded otherwise.

    Raises:
        ValueError: `which` is unknown.
        FileExistsError: `out` holds something.
        RuntimeError: pip failed, with its message.
    """
    if which not in SETS:
        raise ValueError(f"which must be one of {', '.join(SETS)}, got {which!r}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: remove it or name another folder")
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        _pip("download", *pip_flags(python), "-d", str(wheels), *SETS[which])
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        if which == "peers":
            if vllm_wheel is None:
                _pip("download", *pip_flags(python), "-d", scratch, VLLM)
                vllm_wheel = next(Path(scratch).glob("vllm-*.whl"))
            unpack(vllm_wheel, site, keep=lambda name: keep_vllm(name, python))
        slim(site)
        pack(site, out, part_mib)


def unpack(wheel: Path, site: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
    """Unzip a wheel into `site`, without its `.data` scripts."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".data/" in name or not keep(name):
                continue
            archive.extract(name, site)


def keep_vllm(name: str, python: str) -> bool:
    """Whether a member of vLLM's wheel is part of the peer set: Python files, and DeepGEMM with its headers."""
    path = PurePosixPath(name)
    if path.parts[0] != "vllm":
        return True  # its metadata: the version
    inner = PurePosixPath(*path.parts[1:])
    if any(inner.is_relative_to(folder) for folder in VLLM_UNUSED):
        return False
    if inner.is_relative_to("third_party/deep_gemm"):
        return path.suffix != ".so" or f"cpython-{python.replace('.', '')}" in path.name
    return path.suffix == ".py"


def slim(site: Path) -> None:
    """Delete what a run never opens, and strip the symbols that only a debugger reads."""
    for name in UNUSED:
        path = site / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if (site / "z3/lib/libz3.so.4.15").exists():
        (site / "z3/lib/libz3.so").symlink_to("libz3.so.4.15")
    for path in [*site.rglob("*.pyi"), *site.rglob("__pycache__")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if shutil.which("strip"):
        for folder in ("tilelang/lib", "tvm_ffi/lib", "z3/lib"):
            for library in (site / folder).glob("*.so*"):
                if not library.is_symlink():
                    subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)


def pack(site: Path, out: Path, part_mib: int) -> list[Path]:
    """Pack `site` as `site.txz` in `out`, cut into parts; returns them."""
    out.mkdir(parents=True, exist_ok=True)
    whole = out / "site.txz"
    # like files side by side and a dictionary larger than the distance between copies: a quarter smaller
    files = sorted((p for p in site.rglob("*") if not p.is_dir()), key=lambda p: (p.suffix, p.name, str(p)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 192 * MIB}]
    with lzma.open(whole, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for path in files:
            tar.add(path, path.relative_to(site))
    parts = list(_cut(whole, out, part_mib * MIB))
    whole.unlink(missing_ok=True)
    return parts


def _cut(whole: Path, out: Path, limit: int) -> Iterator[Path]:
    data = whole.read_bytes()
    pieces = [data[i : i + limit] for i in range(0, len(data), limit)]
    for n, piece in enumerate(pieces):
        folder = out / "abcdefghij"[n]
        folder.mkdir()
        path = folder / ("site.txz" if len(pieces) == 1 else f"site.txz.{n:02d}")
        path.write_bytes(piece)
        yield path


def install_line(parts: Iterable[Path], target: str) -> str:
    """The shell line that unpacks the parts on the host."""
    return f"mkdir -p {target} && cat {' '.join(map(str, parts))} | tar xJ -C {target}"


def _pip(*args: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *args, "-q"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip {args[0]} failed: {done.stderr.strip().splitlines()[-1]}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", choices=[*SETS])
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder")
    parser.add_argument("--python", default="3.12", help="the host's Python (default: %(default)s)")
    parser.add_argument("--part-mib", type=int, default=PART_MIB, help="largest part, MiB (default: %(default)s)")
    parser.add_argument("--vllm-wheel", type=Path, help="vLLM's wheel where it is already on disk")


def run(args: argparse.Namespace) -> int:
    build(args.which, args.out, args.python, args.part_mib, args.vllm_wheel)
    parts = sorted(path for path in args.out.rglob("site.txz*"))
    target = {"ours": "/tmp/site", "peers": "/tmp/peers"}[args.which]
    for path in parts:
        print(f"{path}  {path.stat().st_size / MIB:.1f} MiB")
    print(f"on the host: {install_line(parts, target)}")
    order = "/tmp/site" if args.which == "ours" else "/tmp/peers:/tmp/site"
    print(f"then:        export PYTHONPATH={order}:$PWD")
    return 0
