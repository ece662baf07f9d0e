"""Run the CUDA source that TileLang generates for a PrimFunc on the CPU.

    run(prim_func, seed=0, x=x, y=y)   # tensors by parameter name; outputs are written in place, as on a GPU

The source is lowered for sm_90a with TMA, warp specialisation and wgmma off, compiled by g++ against the headers here
and run thread by thread. What is caught and what is not modelled stands at the top of `emulator.h`.
Compiled kernels are kept under $MHC_TEST_CACHE (default ~/.cache/mhc-tests), named by a hash of their content.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .guarded import POISON, Guarded, KernelError
from .lowering import SIMT, Kernel, Lowered, cache_dir, lower

HERE = Path(__file__).parent
HEADERS = ("emulator.h", "cuda_names.h", "tilelang_names.h")  # what a kernel sees; each includes the one before
EMULATOR = ("fibers.h", "emulator.cpp")  # the rest
SCALARS: dict[str, Any] = {"int": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def run(
    prim_func: Any,
    seed: int = 0,
    *,
    concurrent: bool = False,
    pass_configs: Mapping[str, Any] | None = None,
    **tensors: Tensor,
) -> None:
    """Launch `prim_func` on CPU tensors, outputs written in place.

    Args:
        prim_func: a TileLang PrimFunc; every T.Kernel in it is one launch.
        seed: thread order: 0 forward, 1 backward, others random.
        concurrent: keep all blocks alive at once (a cooperative launch always does).
        pass_configs: the kernel's own TileLang pass configs, as it is compiled for the GPU.
        tensors: contiguous CPU tensors by the names of the parameters.

    Raises:
        ValueError: a tensor is missing, unknown, or of the wrong dtype, shape or stride.
        KernelError: the kernel misbehaved; the message says how and where.
    """
    emulated(prim_func, pass_configs)(seed, concurrent=concurrent, **tensors)


def emulated(prim_func: Any, pass_configs: Mapping[str, Any] | None = None) -> Emulated:
    """The built emulation of `prim_func`, made once per object and configs."""
    key = (id(prim_func), repr(pass_configs))
    if key not in _emulated:  # it keeps the function alive, so the id stays its own
        _emulated[key] = (prim_func, Emulated(lower(prim_func, {**SIMT, **(pass_configs or {})})))
    return _emulated[key][1]


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output filled with 0xFF bytes: NaN as bf16 and fp32."""
    return torch.full((*shape, dtype.itemsize), POISON, dtype=torch.uint8).view(dtype).squeeze(-1)


def still_poisoned(tensor: Tensor) -> int:
    """How many elements no one has written."""
    return int((tensor.unsqueeze(-1).view(torch.uint8) == POISON).all(dim=-1).sum())


class Launch(ctypes.Structure):
    """`emu::Launch` of emulator.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint64),
        ("shared", ctypes.c_uint64),
        ("seed", ctypes.c_uint32),
        ("concurrent", ctypes.c_uint32),
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
    )


class Emulated:
    """A lowered PrimFunc compiled for the CPU.

    Args:
        lowered: what TileLang made of it, with the features in `SIMT` off.
        edit: changes the generated CUDA before it is compiled; for tests that plant a bug.
    """

    def __init__(self, lowered: Lowered, edit: Callable[[str], str] | None = None) -> None:
        self.lowered, self.source = lowered, edit(lowered.source) if edit else lowered.source
        if edit and self.source == lowered.source:
            raise ValueError("the edit changed nothing in the generated CUDA")
        text, self.static_shared = to_cpp(self.source, lowered.kernels)
        self.library = build(text)

    @property
    def written(self) -> list[str]:
        """The tensors that may be written, in the order of the parameters."""
        names = {name for kernel in self.lowered.kernels for name in kernel.written}
        return [name for name in self.lowered.tensors if name in names]

    def __call__(self, seed: int = 0, *, concurrent: bool = False, **tensors: Tensor) -> None:
        """Launch; see `run`."""
        sizes = bind(self.lowered, tensors)
        guarded = {name: Guarded(tensor) for name, tensor in tensors.items()}
        try:
            for kernel in self.lowered.kernels:
                self._launch(kernel, sizes, guarded, seed, concurrent)
            for name in self.written:
                guarded[name].check_and_copy_back(name)
        finally:
            for copy in guarded.values():
                copy.free()

    def _launch(
        self, kernel: Kernel, sizes: dict[str, int], guarded: dict[str, Guarded], seed: int, concurrent: bool
    ) -> None:
        shape = kernel.shape(sizes)
        grid, block = shape[:3], shape[3:]
        if 0 in grid:
            raise KernelError(
                f"{kernel.name}: grid {grid} is empty, which the driver refuses; return early on the host"
            )
        values = [
            ctypes.c_void_p(guarded[name].address) if "*" in ctype else SCALARS[ctype](sizes[name])
            for ctype, name in kernel.parameters
        ]
        arguments = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        launch = Launch(
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*block),
            (ctypes.c_uint32 * 3)(*kernel.cluster),
            kernel.dynamic_shared,
            kernel.dynamic_shared + self.static_shared,
            seed,
            concurrent or kernel.cooperative,
            ctypes.cast(getattr(self.library, f"enter_{kernel.name}"), ctypes.c_void_p),
            ctypes.addressof(arguments),
        )
        message, address = ctypes.create_string_buffer(1024), ctypes.c_uint64()
        if self.library.emu_run(ctypes.byref(launch), message, ctypes.byref(address)):
            raise KernelError(f"{kernel.name}: {message.value.decode()}{self._explain(message, address, guarded)}")

    def _explain(self, message: Any, address: ctypes.c_uint64, guarded: dict[str, Guarded]) -> str:
        lines = self.source.splitlines()
        numbers = {int(n) for n in re.findall(r"line (\d+)", message.value.decode())}
        text = "".join(f"\n  line {n}: {lines[n - 1].strip()}" for n in sorted(numbers) if 0 < n <= len(lines))
        for name, copy in guarded.items():
            if address.value and copy.owns(address.value):
                text += f"\n  that is {address.value - copy.address} bytes into {name}, which has {copy.nbytes}"
        return text


def to_cpp(source: str, kernels: list[Kernel]) -> tuple[str, int]:
    """The CUDA source as C++ against tilelang_names.h, and the bytes of its static shared memory."""
    dynamic = max(kernel.dynamic_shared for kernel in kernels)
    static = 0

    def place_static(match: re.Match[str]) -> str:
        nonlocal static
        ctype, name, count = match[1], match[2], int(match[3])
        offset = -(-(dynamic + static) // 128) * 128
        static = offset + count * (SIZES[ctype]) - dynamic
        return f"{ctype}* {name} = ({ctype}*)(emu::self->block->shared + {offset});"

    source = re.sub(r"#include <[^\n]*>", "", source)
    source = re.sub(
        r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", r"\1* \2 = (\1*)emu::self->block->shared;", source
    )
    source = re.sub(r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[(\d+)\];", place_static, source)
    entries = "".join(_entry(kernel) for kernel in kernels)
    return f'#include "tilelang_names.h"\n#line 1 "kernel.cu"\n{source}\n{entries}', static


def _entry(kernel: Kernel) -> str:
    """A C function that unpacks an array of pointers into the kernel's arguments."""
    arguments = ", ".join(f"*({ctype}*)a[{i}]" for i, (ctype, _) in enumerate(kernel.parameters))
    return f"EMU_EXPORT void enter_{kernel.name}(void** a) {{ {kernel.name}({arguments}); }}\n"


SIZES = {
    "uchar": 1,
    "bfloat16_t": 2,
    "float": 4,
    "int": 4,
    "uint": 4,
    "int64_t": 8,
    "uint64_t": 8,
    "float2": 8,
    "float4": 16,
}


def build(text: str) -> ctypes.CDLL:
    """Compile C++ into a shared library, or take it from the cache.

    Raises:
        NotImplementedError: the kernel uses something that the headers do not know.
    """
    prepared = _prepared(*_flags())
    command = ["g++", *_flags(), "-shared", f"-I{prepared}", f"-I{HERE}", str(prepared / "emulator.o")]
    digest = hashlib.sha256("\0".join([text, *command]).encode()).hexdigest()[:24]
    library = cache_dir() / f"{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as work:
            source, product = Path(work, "kernel.cpp"), Path(work, "kernel.so")
            source.write_text(text)
            result = subprocess.run([*command, str(source), "-o", str(product)], capture_output=True, text=True)
            if result.returncode:
                errors = "\n".join(line for line in result.stderr.splitlines() if "error" in line)[:2000]
                raise NotImplementedError(f"the emulator cannot compile this kernel:\n{errors}")
            product.replace(library)  # atomic: another process may be at the same kernel
    return ctypes.CDLL(str(library))


@functools.cache
def _prepared(*flags: str) -> Path:
    """A folder with the headers precompiled and the emulator compiled, most of the work of a kernel otherwise."""
    texts = [(HERE / name).read_text() for name in (*HEADERS, *EMULATOR)]
    folder = cache_dir() / ("emulator-" + hashlib.sha256("\0".join([*texts, *flags]).encode()).hexdigest()[:24])
    folder.mkdir(exist_ok=True)
    header = [f"{HEADERS[-1]}.gch", "-x", "c++-header", HERE / HEADERS[-1]]
    for name, *options in header, ["emulator.o", "-c", HERE / EMULATOR[-1]]:
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=cache_dir()) as work:
                product = Path(work, name)
                subprocess.run(["g++", *flags, *options, "-o", product], check=True)
                product.replace(folder / name)
    return folder


@functools.cache
def _flags() -> list[str]:
    """Code generation flags: no assumptions on aliasing, FMA contraction as nvcc does it, poisoned locals."""
    flags = [
        "-std=c++20",
        "-O2",
        "-w",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-strict-aliasing",
        "-fwrapv",
        "-fno-stack-protector",
        "-U_FORTIFY_SOURCE",
        "-ffp-contract=fast",
    ]
    flags.append("-ftrivial-auto-var-init=pattern")
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and re.search(r"^flags.*\bfma\b.*$", cpu.read_text(), re.MULTILINE):
        flags += ["-mfma", "-mavx2"]
    return flags


def bind(lowered: Lowered, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Check the tensors against the parameters; return the values of the symbolic sizes."""
    if lowered.tensors.keys() != tensors.keys():
        raise ValueError(f"tensors must be {', '.join(lowered.tensors)}, got {', '.join(tensors)}")
    sizes: dict[str, int] = {}
    for name, (dtype, want) in lowered.tensors.items():
        tensor = tensors[name]
        got = [sizes.setdefault(d, n) if isinstance(d, str) else d for d, n in zip(want, tensor.shape, strict=False)]
        given = str(tensor.dtype).removeprefix("torch.")
        if given != dtype or len(want) != tensor.dim() or got != list(tensor.shape):
            raise ValueError(f"{name} must be {dtype} {want}, got {given} {list(tensor.shape)}")
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"{name} must be a contiguous CPU tensor, got {tensor.stride()} on {tensor.device}")
    return sizes


_emulated: dict[tuple[int, str], tuple[Any, Emulated]] = {}
