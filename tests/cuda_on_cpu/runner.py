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
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tilelang
import torch
from torch import Tensor
from tvm import arith, tirx
from tvm.target import Target

from .guarded import POISON, Guarded, KernelError

HERE = Path(__file__).parent
TARGET = {"kind": "cuda", "arch": "sm_90a"}
# What the emulator has no model of; T.gemm becomes mma.sync and pipelines become cp.async.
SIMT = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True, "tl.disable_wgmma": True}
SCALARS: dict[str, Any] = {"int": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def cache_dir() -> Path:
    """The folder of compiled kernels, made if missing."""
    path = Path(os.environ.get("MHC_TEST_CACHE", Path.home() / ".cache" / "mhc-tests"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def run(
    prim_func: tirx.PrimFunc,
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


def emulated(prim_func: tirx.PrimFunc, pass_configs: Mapping[str, Any] | None = None) -> Emulated:
    """The built emulation of `prim_func`, made once per object and configs."""
    key = (id(prim_func), repr(pass_configs))
    if key not in _emulated:  # it keeps the function alive, so the id stays its own
        _emulated[key] = Emulated(prim_func, pass_configs=pass_configs)
    return _emulated[key]


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


class Kernel:
    """One `__global__` function: its launch shape and its signature.

    Args:
        function: the device function, for its launch attributes.
        source: the generated CUDA, for the signature.
    """

    def __init__(self, function: tirx.PrimFunc, source: str) -> None:
        attrs = function.attrs
        self.name = str(attrs["global_symbol"])
        self.extents = {str(axis): extent for axis, extent in attrs["thread_extent"].items()}
        self.dynamic_shared = int(attrs["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in attrs else 0
        self.cooperative = "use_cooperative_groups" in attrs
        self.cluster = [int(n) for n in attrs["cluster_dims"]] if "cluster_dims" in attrs else [1, 1, 1]
        head = re.search(rf"void __launch_bounds__\([^)]*\) {self.name}\(([^)]*)\) {{", source)
        assert head, f"no definition of {self.name} in the generated source"
        self.position = head.start()
        # e.g. `const float* __restrict__ x` -> ("const float*", "x")
        parameters = [p.replace("__restrict__", "").rsplit(maxsplit=1) for p in head[1].split(",")]
        self.parameters = [(ctype.strip(), name) for ctype, name in parameters]

    def entry(self) -> str:
        """A C function that unpacks an array of pointers into the arguments."""
        arguments = ", ".join(f"*({ctype}*)a[{i}]" for i, (ctype, _) in enumerate(self.parameters))
        return f'extern "C" void enter_{self.name}(void** a) {{ {self.name}({arguments}); }}\n'


class Emulated:
    """A PrimFunc compiled for the CPU.

    Args:
        prim_func: the TileLang function.
        edit: changes the generated CUDA before it is compiled; for tests that plant a bug.
        pass_configs: further TileLang pass configs.
    """

    def __init__(
        self,
        prim_func: tirx.PrimFunc,
        edit: Callable[[str], str] | None = None,
        pass_configs: Mapping[str, Any] | None = None,
    ) -> None:
        self.prim_func = prim_func
        artifact = lower(prim_func, {**SIMT, **(pass_configs or {})})
        self.source: str = artifact.kernel_source
        if edit:
            edited = edit(self.source)
            assert edited != self.source, "the edit changed nothing"
            self.source = edited
        kernels = [Kernel(function, self.source) for function in artifact.device_mod.functions.values()]
        self.kernels = sorted(kernels, key=lambda kernel: kernel.position)
        text, self.static_shared = to_cpp(self.source, self.kernels)
        self.library = build(text)

    def __call__(self, seed: int = 0, *, concurrent: bool = False, **tensors: Tensor) -> None:
        """Launch; see `run`."""
        sizes = bind(self.prim_func, tensors)
        guarded = {name: Guarded(tensor) for name, tensor in tensors.items()}
        try:
            for kernel in self.kernels:
                self._launch(kernel, sizes, guarded, seed, concurrent)
            for kernel in self.kernels:
                for ctype, name in kernel.parameters:
                    if "*" in ctype and "const" not in ctype:
                        guarded[name].check_and_copy_back(name)
        finally:
            for copy in guarded.values():
                copy.free()

    def _launch(
        self, kernel: Kernel, sizes: dict[str, int], guarded: dict[str, Guarded], seed: int, concurrent: bool
    ) -> None:
        grid, block = (
            [evaluate(kernel.extents.get(f"{which}.{axis}", 1), sizes) for axis in "xyz"]
            for which in ("blockIdx", "threadIdx")
        )
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


def lower(prim_func: tirx.PrimFunc, pass_configs: dict[str, Any]) -> Any:
    """TileLang's CompiledArtifact: `.kernel_source` and `.device_mod`."""
    target = Target(TARGET)
    with tilelang.transform.PassContext(opt_level=3, config=pass_configs), target:
        return tilelang.lower(prim_func, target=target)


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
    entries = "".join(kernel.entry() for kernel in kernels)
    run_function = (
        'extern "C" int emu_run(const emu::Launch* launch, char* message, uint64_t* fault) '
        "{ return emu::guarded_run(launch, message, fault); }\n"
    )
    return f'#include "tilelang_names.h"\n#line 1 "kernel.cu"\n{source}\n{entries}{run_function}', static


SIZES = {"uchar": 1, "bfloat16_t": 2, "float": 4, "int": 4, "uint": 4, "int64_t": 8, "float2": 8, "float4": 16}


def build(text: str) -> ctypes.CDLL:
    """Compile C++ into a shared library, or take it from the cache.

    Raises:
        NotImplementedError: the kernel uses something that the headers do not know.
    """
    headers = "".join(
        (HERE / name).read_text() for name in ("fibers.h", "emulator.h", "cuda_names.h", "tilelang_names.h")
    )
    command = ["g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-fvisibility=default", f"-I{HERE}", *_flags()]
    digest = hashlib.sha256("\0".join([text, headers, *command[1:]]).encode()).hexdigest()[:24]
    library = cache_dir() / f"{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
            source, product = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            source.write_text(text)
            result = subprocess.run([*command, str(source), "-o", str(product)], capture_output=True, text=True)
            if result.returncode:
                errors = "\n".join(line for line in result.stderr.splitlines() if "error" in line)[:2000]
                raise NotImplementedError(f"the emulator cannot compile this kernel:\n{errors}")
            product.replace(library)  # atomic: another process may be at the same kernel
    return ctypes.CDLL(str(library))


@functools.cache
def _flags() -> list[str]:
    """Code generation flags: no assumptions on aliasing, FMA contraction as nvcc does it, poisoned locals."""
    flags = ["-fno-strict-aliasing", "-fwrapv", "-fno-stack-protector", "-U_FORTIFY_SOURCE", "-ffp-contract=fast"]
    flags.append("-ftrivial-auto-var-init=pattern")
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and re.search(r"^flags.*\bfma\b.*$", cpu.read_text(), re.MULTILINE):
        flags += ["-mfma", "-mavx2"]
    return flags


def bind(prim_func: tirx.PrimFunc, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Check the tensors against the parameters; return the values of the symbolic sizes."""
    buffers = {prim_func.buffer_map[p].name: prim_func.buffer_map[p] for p in prim_func.params}
    if buffers.keys() != tensors.keys():
        raise ValueError(f"tensors must be {', '.join(buffers)}, got {', '.join(tensors)}")
    sizes: dict[str, int] = {}
    for name, buffer in buffers.items():
        tensor = tensors[name]
        want = [dim.name if isinstance(dim, tirx.Var) else int(dim) for dim in buffer.shape]
        got = [sizes.setdefault(d, n) if isinstance(d, str) else d for d, n in zip(want, tensor.shape, strict=False)]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != str(buffer.dtype) or len(want) != tensor.dim() or got != list(tensor.shape):
            raise ValueError(f"{name} must be {buffer.dtype} {want}, got {dtype} {list(tensor.shape)}")
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"{name} must be a contiguous CPU tensor, got {tensor.stride()} on {tensor.device}")
    return sizes


def evaluate(extent: Any, sizes: dict[str, int]) -> int:
    """A launch extent, e.g. `(T + 63) // 64`, as a number."""
    if isinstance(extent, int):
        return extent
    values: dict[Any, Any] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Var):
            values[node] = tirx.const(sizes[node.name], node.dtype)

    tirx.stmt_functor.post_order_visit(tirx.Evaluate(extent), visit)
    return int(arith.Analyzer().simplify(tirx.stmt_functor.substitute(extent, values)))


_emulated: dict[tuple[int, str], Emulated] = {}
