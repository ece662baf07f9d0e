"""The real sources of three vLLM releases, out of their wheels: fetched once, only the .py files kept."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

VERSIONS = ("0.26.0", "0.30.0", "0.33.0")
CACHE = Path(os.environ.get("MHC_VLLM_WHEELS", "~/.cache/mhc-tests/vllm-wheels")).expanduser()
KEEP = (
    "vllm/models/deepseek_v4/",
    "vllm/models/deepseek_v41/",
    "vllm/model_executor/custom_op.py",
    "vllm/model_executor/kernels/mhc/",
    "vllm/model_executor/layers/quantization/base_config.py",
    "vllm/model_executor/layers/vocab_parallel_embedding.py",
    "vllm/model_executor/model_loader/",
    "vllm/model_executor/utils.py",
    "vllm/plugins/",
    "vllm/utils/deep_gemm.py",
    "vllm/v1/worker/gpu/spec_decode/",
)
DOWNLOAD_S = 420


@functools.cache
def missing() -> str | None:
    """Fetch what is not cached yet; one sentence when that fails, None when all is there."""
    try:
        for version in VERSIONS:
            if not _folder(version).is_dir():
                _fetch(version)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return (
            f"the vLLM wheels {', '.join(VERSIONS)} are not in {CACHE} and could not be fetched: "
            f"{said.strip().splitlines()[-1]}"
        )
    return None


def package(version: str) -> Path:
    """The folder `vllm` of a release."""
    return _folder(version) / "vllm"


def _folder(version: str) -> Path:
    """Where a release is cached; another selection of files is another folder."""
    return CACHE / f"{version}-{zlib.crc32(repr(KEEP).encode()):08x}"


def _fetch(version: str) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        subprocess.run(
            [*command, "--quiet", "--dest", folder, f"vllm=={version}"],
            check=True, capture_output=True, text=True, timeout=DOWNLOAD_S,
        )  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        tree = Path(folder) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".py") and n.startswith(KEEP)]
            archive.extractall(tree, names)
        # the last step, so that an interrupted fetch leaves nothing that looks complete
        shutil.move(tree, _folder(version))
