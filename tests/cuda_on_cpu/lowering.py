"""TileLang's CUDA source for a PrimFunc, and how to launch it: lowered without a GPU, kept on disk."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TARGET = {"kind": "cuda", "arch": "sm_90a"}
# What the emulator has no model of is turned off; T.gemm becomes mma.sync and pipelines become cp.async.
SIMT = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True, "tl.disable_wgmma": True}
AXES = [f"{which}.{axis}" for which in ("blockIdx", "threadIdx") for axis in "xyz"]


def cache_dir() -> Path:
    """The folder of everything built for tests, $MHC_TEST_CACHE or ~/.cache/mhc-tests; made if missing."""
    path = Path(os.environ.get("MHC_TEST_CACHE", Path.home() / ".cache" / "mhc-tests"))
    path.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True)
class Kernel:
    """One `__global__` function.

    `parameters` are (C type, name), e.g. ("const float*", "x"); `extents` the six sizes of grid and block, each a
    number or TVM's JSON of an expression of the symbolic sizes.
    """

    name: str
    parameters: list[tuple[str, str]]
    extents: list[int | str]
    cluster: list[int]
    dynamic_shared: int
    cooperative: bool

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        """Grid and block, x to z each, for these symbolic sizes."""
        return [extent if isinstance(extent, int) else _evaluate(extent, sizes) for extent in self.extents]

    @property
    def written(self) -> list[str]:
        """The tensors that the kernel may write."""
        return [name for ctype, name in self.parameters if "*" in ctype and "const" not in ctype]


@dataclass(frozen=True)
class Lowered:
    """What TileLang made of a PrimFunc: `tensors` are (dtype, shape) by name, a shape being numbers and symbols."""

    source: str
    tensors: dict[str, tuple[str, list[int | str]]]
    kernels: list[Kernel] = field(default_factory=list)


def lower(prim_func: Any, pass_configs: Mapping[str, Any] | None = None) -> Lowered:
    """Lower for sm_90a.

    Args:
        prim_func: a TileLang PrimFunc; its kernels are launched in the order of the source.
        pass_configs: TileLang pass configs.
    """
    import tilelang
    from tvm import tirx
    from tvm.target import Target

    target = Target(TARGET)
    with tilelang.transform.PassContext(opt_level=3, config=dict(pass_configs or {})), target:
        artifact = tilelang.lower(prim_func, target=target)
    source = artifact.kernel_source
    buffers = [prim_func.buffer_map[p] for p in prim_func.params]
    tensors: dict[str, tuple[str, list[int | str]]] = {
        b.name: (str(b.dtype), [d.name if isinstance(d, tirx.Var) else int(d) for d in b.shape]) for b in buffers
    }
    kernels = [_kernel(function.attrs, source) for function in artifact.device_mod.functions.values()]
    return Lowered(source, tensors, sorted(kernels, key=lambda k: source.index(f"{k.name}(")))


def lower_cached(key: str, make: Any, pass_configs: Mapping[str, Any] | None = None) -> Lowered:
    """`lower(make(), pass_configs)`, or what an earlier process kept of it.

    Args:
        key: stands for everything that `make` depends on, sources included.
        make: returns the PrimFunc.
        pass_configs: TileLang pass configs.
    """
    parts = [key, repr(pass_configs), importlib.metadata.version("tilelang"), Path(__file__).read_text()]
    file = cache_dir() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.lowered.json"
    if not file.exists():
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(asdict(lower(make(), pass_configs))))
        written.replace(file)
    fields = json.loads(file.read_text())
    return Lowered(fields["source"], fields["tensors"], [Kernel(**kernel) for kernel in fields["kernels"]])


def _kernel(attrs: Any, source: str) -> Kernel:
    import tvm

    name = str(attrs["global_symbol"])
    head = re.search(rf"void __launch_bounds__\([^)]*\) {name}\(([^)]*)\) {{", source)
    assert head, f"no definition of {name} in the generated source"
    parameters = [p.replace("__restrict__", "").rsplit(maxsplit=1) for p in head[1].split(",")]
    extents = {str(axis): extent for axis, extent in attrs["thread_extent"].items()}
    numbers = [extents.get(axis, 1) for axis in AXES]
    return Kernel(
        name=name,
        parameters=[(ctype.strip(), parameter) for ctype, parameter in parameters],
        extents=[n if isinstance(n, int) else tvm.ir.save_json(n) for n in numbers],
        cluster=[int(n) for n in attrs["cluster_dims"]] if "cluster_dims" in attrs else [1, 1, 1],
        dynamic_shared=int(attrs["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in attrs else 0,
        cooperative="use_cooperative_groups" in attrs,
    )


def _evaluate(expression: str, sizes: Mapping[str, int]) -> int:
    import tilelang  # noqa: F401 (finds its own tvm)
    import tvm
    from tvm import arith, tirx

    extent = tvm.ir.load_json(expression)
    values: dict[Any, Any] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Var):
            values[node] = tirx.const(sizes[node.name], node.dtype)

    tirx.stmt_functor.post_order_visit(tirx.Evaluate(extent), visit)
    return int(arith.Analyzer().simplify(tirx.stmt_functor.substitute(extent, values)))
