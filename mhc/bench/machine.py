"""What a measurement was made on: GPU, driver, clocks, versions, commit, sources. Every reader works without a GPU."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KERNEL_SOURCES = ("mhc/kernels/*.py", "mhc/launch.py")  # the kernels, and which variant is launched when
PACKAGES = ("torch", "tilelang", "apache-tvm-ffi", "triton", "vllm", "numpy")
_SMI = (
    "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,"
    "clocks_event_reasons.active,clocks_event_reasons.applications_clocks_setting"
)


def git_state() -> tuple[str, bool]:
    """The commit and whether tracked files differ from it.

    `MHC_GIT_SHA` (`<sha>` or `<sha>-dirty`) wins over the repository: it is how a copied tree says what it is.

    Raises:
        RuntimeError: neither is there.
    """
    if given := os.environ.get("MHC_GIT_SHA"):
        sha, _, mark = given.partition("-")
        return sha, mark == "dirty"
    here = Path(__file__).parent
    try:
        sha = _output(["git", "-C", str(here), "rev-parse", "HEAD"])
        return sha, bool(_output(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"]))
    except (OSError, subprocess.CalledProcessError):
        raise RuntimeError("the commit is unknown: run inside the git repository or set MHC_GIT_SHA=<sha>") from None


def python_path(*first: str) -> str:
    """PYTHONPATH of another process of this package: these folders, the package's, what is there already."""
    return os.pathsep.join([*first, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def kernels_sha256() -> str:
    """Digest of what a kernel's time on the device depends on: paths and bytes of the files of `KERNEL_SOURCES`.

    It tells what was timed where the commit cannot: in a modified tree, or after a rebase. Times of the host depend on
    more.
    """
    digest = hashlib.sha256()
    for path in sorted(path for pattern in KERNEL_SOURCES for path in ROOT.glob(pattern)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def gpu_state() -> dict[str, Any]:
    """GPU 0 as the driver shows it now; every value is None without a CUDA GPU.

    `clocks_mhz["locked"]` is whether the driver reports application clocks as the reason for the current clock: it
    has no direct getter for locked clocks.
    """
    import torch

    keys = ("gpu", "sm_count", "driver", "cuda", "clocks_mhz", "power_limit_w", "temp_c", "throttle", "l2_mib")
    state: dict[str, Any] = dict.fromkeys(keys)
    if not torch.cuda.is_available():
        return state
    properties = torch.cuda.get_device_properties(0)
    state |= {
        "gpu": properties.name,
        "sm_count": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size / 2**20,
        "cuda": torch.version.cuda,
    }
    if shutil.which("nvidia-smi") is None:
        return state
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={_SMI}", "--format=csv,noheader,nounits"]
    try:
        fields = [field.strip() for field in _output(query).splitlines()[0].split(",")]
        driver, sm, mem, sm_max, power, temp, reasons, application = fields
    except (subprocess.CalledProcessError, IndexError, ValueError):
        return state
    return state | {
        "driver": driver,
        "clocks_mhz": {
            "sm": _number(sm),
            "mem": _number(mem),
            "sm_max": _number(sm_max),
            "locked": application == "Active",
        },
        "power_limit_w": _number(power),
        "temp_c": _number(temp),
        "throttle": reasons,
    }


def versions() -> dict[str, str]:
    """Installed versions of Python and of the packages that matter to a timing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def host_cpu() -> str:
    """The CPU's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def command_line() -> str:
    """The command as typed, its program without the folder; options as given."""
    name = "python -m mhc" if Path(sys.argv[0]).name == "__main__.py" else Path(sys.argv[0]).name
    return " ".join([name, *map(shlex.quote, sys.argv[1:])])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]" on cards without that sensor


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
