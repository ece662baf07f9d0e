"""What the host side of a kernel asks the driver to do, seen without a GPU through `no_driver.c`.

`in_process` starts a Python whose CUDA driver only takes notes; code in there calls `host_stub`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .compile import cuda_home
from .lowering import TARGET, cache_dir

SOURCE = Path(__file__).with_name("no_driver.c")
VARIABLE = "MHC_TEST_NO_DRIVER"  # set in a process that has no driver to its library's path


def build_driver() -> Path:
    """The shared library of `no_driver.c`, cached."""
    library = cache_dir() / f"no_driver-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
            product = Path(folder, "driver.so")
            include = f"-I{cuda_home() / 'include'}"
            subprocess.run(["gcc", "-shared", "-fPIC", "-w", include, str(SOURCE), "-o", str(product)], check=True)
            product.replace(library)
    return library


def in_process(code: str, *paths: Path) -> Any:
    """Run Python code in a process without a driver.

    Args:
        code: assigns `result`, something JSON can hold.
        paths: further folders to import from.

    Returns:
        `result`.
    """
    library = str(build_driver())
    path = os.pathsep.join([str(p) for p in (Path(__file__).parents[1], *paths)] + [os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "LD_PRELOAD": library, VARIABLE: library, "PYTHONPATH": path}
    program = f"{code}\nimport json\nprint('\\n' + json.dumps(result))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process without a driver failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def host_stub(prim_func: Any, pass_configs: Mapping[str, Any] | None = None) -> Callable[..., None]:
    """The compiled host side of a kernel, for use inside `in_process`.

    Args:
        prim_func: the TileLang function.
        pass_configs: the kernel's TileLang pass configs.

    Returns:
        A function of CPU tensors, which pass for CUDA tensors; of others as they are.
    """
    import tilelang
    import tvm_ffi

    # the driver takes any image, so the device code need not be compiled
    tvm_ffi.register_global_func("tilelang_callback_cuda_compile", lambda *_: bytearray(b"image"), override=True)
    tilelang.disable_cache()
    kernel = tilelang.compile(prim_func, target=TARGET, pass_configs=dict(pass_configs or {}))
    executable = kernel.adapter.get_exportable_executable()

    def call(*arguments: Any) -> None:
        executable(*[tvm_ffi.from_dlpack(PassesForCuda(a)) if isinstance(a, Tensor) else a for a in arguments])

    return call


def taken_launches() -> list[dict[str, Any]]:
    """The launches since the last look: kernel, grid, block, shared_bytes and, where set, cluster, cooperative, pdl."""
    driver = ctypes.CDLL(os.environ[VARIABLE])
    driver.no_driver_log.restype = ctypes.c_char_p
    launches = [json.loads(line) for line in driver.no_driver_log().decode().splitlines()]
    driver.no_driver_clear()
    return launches


class PassesForCuda:
    """A CPU tensor that says it lives on CUDA device 0, to whoever takes it by DLPack."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = torch.utils.dlpack.to_dlpack(self.tensor)
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # a DLTensor begins with the data pointer, then device type and device id
        device = ctypes.cast(get_pointer(capsule, b"dltensor") + 8, ctypes.POINTER(ctypes.c_int32))
        device[0], device[1] = 2, 0
        return capsule
