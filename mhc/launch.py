"""From an op to a running kernel: which kernel and variant, compiled once, called without Python in between.

A kernel is named by a string and its factory's arguments; `Variant` picks tile and cluster count by T, out of a small
fixed set, so that `warmup` compiles everything a config can reach. A kernel is always called through its compiled host
stub, which checks dtypes, shapes, strides and devices itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mhc.config import MHCConfig


class Variant(NamedTuple):
    """Up to `most` tokens: `tile` tokens a cluster, at most `clusters` clusters.

    An H100 or H200 holds 15 clusters of 8 blocks at one block a multiprocessor: one more would run after the others and
    double the time. Of 16 blocks, 7.
    """

    most: float
    tile: int
    clusters: int


# a larger tile is more code, which costs a single token time; one of 32 gained nothing at any T but 256. Fewer clusters
# that ask for the same weights at the same time are served sooner.
ONE_STREAM = (Variant(64, 8, 8), Variant(120, 8, 15), Variant(float("inf"), 16, 15))
MANY_STREAMS = (
    Variant(15, 1, 15),
    Variant(30, 2, 15),
    Variant(60, 4, 15),
    Variant(120, 8, 15),
    Variant(float("inf"), 16, 15),
)
# of 16 blocks; other tiles `quad` has not
FOUR_STREAMS = (Variant(1, 8, 1), Variant(32, 8, 4), Variant(float("inf"), 8, 7))
PROJECT_TILE = 4


def one_stream(config: MHCConfig, tokens: int) -> Variant:
    """The variant of a kernel on embeddings; shared memory holds fewer tokens of wide rows or many streams."""
    hc, rows, cols = config.hc_mult, config.mix_rows, config.hidden_size // 8
    warps = 16 if rows <= 24 else 8  # `Slices.warps` of `kernels.split`, without an import of TileLang

    def shared_bytes(tile: int) -> int:
        # 3 tiles of x, the warps' sums; 4 slots of what 8 blocks send, for all and for owners; comb's logits
        per_token = 6 * (cols + 16) + 4 * warps * (rows + 1) + 128 * (2 * hc + 1) + 64 * -(-(hc**2) // 4)
        return tile * per_token + 512 * (2 * hc + 1) + 128 * (hc**2 + 4)

    most = next((tile for tile in (16, 8, 4, 2, 1) if shared_bytes(max(tile, 8)) <= 231_000), 0)
    if not most:
        raise ValueError(f"hidden_size must leave room for a tile in shared memory, got {config.hidden_size}")
    return _pick(ONE_STREAM, tokens, most)


def many_streams(config: MHCConfig, tokens: int) -> Variant:
    """The variant of `streams`; shared memory holds fewer tokens of wide streams."""
    hc, rows, cols = config.hc_mult, config.mix_rows, config.hidden_size // 8
    width = -(-(rows + 1) // 4) * 4
    token_bytes = 2 * (hc * cols + 16) + 2 * (1 + hc) * cols + 4 * (8 * rows + 2 * 9 * (width + 4) + 3 * width)
    most = 224_000 // token_bytes
    if not most:
        raise ValueError(
            f"hidden_size must leave room for a token in shared memory, got {config.hidden_size} with hc_mult {hc}"
        )
    if config.hidden_size > 4096:
        most = min(most, 10)  # an 11th token would spill
    return _pick(MANY_STREAMS, tokens, most)


def fits_quad(hidden: int, hc: int) -> bool:
    """Whether `quad` takes these sizes: whole warps take a block's slice, that of `fn` stays in the registers."""
    return hc == 4 and hidden <= 4096 and hidden % 256 == 0


def of_streams(config: MHCConfig, tokens: int, has_norm: bool, source: str) -> tuple[Any, ...]:
    """The kernel on materialised streams, its name and its factory's arguments.

    Args:
        config: shapes and constants.
        tokens: T. A row is bitwise the same at every T, so it is never T that decides between the two kernels.
        has_norm, source: see `mhc.kernels.streams`.
    """
    if fits_quad(config.hidden_size, config.hc_mult) and source != "head":
        return "quad", config, _pick(FOUR_STREAMS, tokens, 8).clusters, has_norm, source
    variant = many_streams(config, tokens)
    return "streams", config, variant.tile, variant.clusters, has_norm, source


def _pick(variants: tuple[Variant, ...], tokens: int, most_tile: int) -> Variant:
    variant = next(v for v in variants if tokens <= v.most)
    return variant._replace(tile=min(variant.tile, most_tile))


def factory(name: str) -> Callable[..., Any]:
    """The TileLang factory of a kernel."""
    from mhc.kernels.fused import fused
    from mhc.kernels.gather import gather
    from mhc.kernels.post import post_map
    from mhc.kernels.quad import quad
    from mhc.kernels.streams import streams
    from mhc.kernels.two_launch import finish, project_slices

    factories: dict[str, Callable[..., Any]] = {
        "finish": finish,
        "fused": fused,
        "gather": gather,
        "post": post_map,
        "project": project_slices,
        "quad": quad,
        "streams": streams,
    }
    return factories[name]


def prim_func(name: str, *args: Any) -> Any:
    """The TileLang function of a kernel for these factory arguments."""
    return factory(name)(*args)


@functools.cache
def target(device: int) -> dict[str, str]:
    """TileLang's target for CUDA device `device`.

    Raises:
        RuntimeError: the device has no thread block clusters.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(f"the kernels need compute capability 9.0 (Hopper) or newer, {name} has {major}.{minor}")
    return {"kind": "cuda", "arch": f"sm_{major}{minor}a"}


@functools.cache
def kernel(device: int, name: str, *args: Any) -> Callable[..., None]:
    """The entry point of a kernel on a device, exported (`mhc.export`) or compiled, at most once a process.

    It makes that device the current one and leaves it so: see `with_current`.
    """
    from mhc import export

    entry = export.load(target(device), name, *args)
    if not entry:
        jit, symbol = compiled(target(device), name, *args)
        # the host stub itself: JITKernel.__call__ would add 10 us of Python a call
        entry = jit.adapter.get_exportable_executable()[symbol]
    return entry


def with_current(device: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with CUDA device `device` the current one, and the caller's again after it."""
    if torch.cuda.device_count() < 2:
        return call

    def run(*args: Any) -> Any:
        if torch.cuda.current_device() == device:
            return call(*args)
        with torch.cuda.device(device):
            return call(*args)

    return run


def compiled(target: dict[str, str], name: str, *args: Any) -> tuple[Any, str]:
    """TileLang's kernel object, compiled for `target`, and the name of its entry point."""
    import tilelang

    from mhc.kernels.parts import PASS_CONFIGS

    function = prim_func(name, *args)
    return tilelang.compile(function, target=target, pass_configs=PASS_CONFIGS), function.attrs["global_symbol"]


def reachable(config: MHCConfig, max_tokens: int) -> list[tuple[Any, ...]]:
    """(name, factory arguments) of every kernel that the ops can launch for `config` and 1 to `max_tokens` tokens."""
    # a pick changes only where a variant ends; the rows of a table are a vocabulary, not tokens
    starts = {1, *(int(v.most) + 1 for v in (*ONE_STREAM, *MANY_STREAMS, *FOUR_STREAMS) if v.most != float("inf"))}
    kernels: dict[tuple[Any, ...], None] = {}
    for t in sorted(starts):
        one = one_stream(config, t)
        kernels["fused", config, one.tile, one.clusters, False, "table"] = None
        if t > max_tokens:
            continue
        for norm in (True, False):
            for outputs in ("all", "collapsed"):
                kernels["fused", config, one.tile, one.clusters, norm, outputs] = None
            for source in ("pre", "post_pre", "post_pre_collapsed"):
                kernels[of_streams(config, t, norm, source)] = None
        kernels[of_streams(config, t, False, "head")] = None
    for norm in (True, False):
        kernels["finish", config, norm] = None
        for collapsed in (True, False):
            for id_dtype in ("int64", "int32"):
                kernels["gather", config, norm, collapsed, id_dtype] = None
    for collapsed in (True, False):
        kernels["post", config.hidden_size, config.hc_mult, collapsed] = None
    kernels["project", config, PROJECT_TILE] = None
    return list(kernels)


def warmup(config: MHCConfig, max_tokens: int, device: int | None = None, jobs: int = 1) -> int:
    """Compile every kernel that `config` can reach with up to `max_tokens` tokens: nothing compiles after it.

    Args:
        config: shapes and constants.
        max_tokens: the most tokens of a call, at least 1.
        device: CUDA device index, the current one by default.
        jobs: processes that compile at a time, at least 1; they use no GPU.

    Returns:
        How many kernels are ready.

    Raises:
        ValueError: `max_tokens` or `jobs` is below 1.
        RuntimeError: there is no GPU, it is older than Hopper, or a kernel does not compile.
    """
    from mhc import export

    for name, value in (("max_tokens", max_tokens), ("jobs", jobs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not torch.cuda.is_available():
        raise RuntimeError("warmup compiles for a GPU and none is visible: run it on the GPU host")
    device = torch.cuda.current_device() if device is None else device
    kernels = reachable(config, max_tokens)
    ahead = export.compiled_ahead(kernels, target(device)["arch"], jobs) if jobs > 1 else contextlib.nullcontext()
    with ahead:
        for one in kernels:
            kernel(device, *one)
    return len(kernels)
