"""Which kernel and variant an op asks for, without compiling any: warm-up knows them all, and they fit the machine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.builds import lowered
from kernels.table import OPS, problem
from ops_tools import every_kernel_call, table_of
from torch import Tensor

from mhc import MHCConfig, export, launch, warmup
from mhc.launch import FOUR_STREAMS, MANY_STREAMS, ONE_STREAM

MOST_SHARED_BYTES = 227 * 1024  # of a block, on sm_90
MOST_CLUSTERS = 15  # of 8 blocks, on an H100 or H200
MOST_LARGE_CLUSTERS = 7  # of 16 blocks
VARIANTS = (*ONE_STREAM, *MANY_STREAMS, *FOUR_STREAMS)
LIMITS = sorted({int(v.most) for v in VARIANTS if v.most != float("inf")})
BOUNDARIES = (*sorted({1, *(t + step for t in LIMITS for step in (0, 1))}), 8192)
PICKS = (launch.one_stream, launch.many_streams)
Name = tuple[Any, ...]  # of a kernel: its name and its factory's arguments


@functools.cache
def asked_for(config: MHCConfig) -> dict[int, set[Name]]:
    """The kernels that any op asks for, by number of tokens; meta tensors, so that large H costs nothing."""
    names: set[Name] = set()

    def note(device: int, *name: Any) -> Callable[..., None]:
        names.add(name)
        return lambda *tensors: None

    most, found = problem(config, BOUNDARIES[-1], device="meta"), {}
    with mock.patch.object(launch, "kernel", note):
        for tokens in BOUNDARIES:
            rows = most.rows(tokens)
            for op in OPS:
                op.call(rows)
            found[tokens], names = names, set()
    return found


@functools.cache
def asked_up_to(config: MHCConfig, max_tokens: int) -> set[Name]:
    return set().union(*(names for tokens, names in asked_for(config).items() if tokens <= max_tokens))


def with_norm(names: set[Name]) -> set[Name]:
    """The names, whichever of the two forms each stood for."""
    return {tuple(True if part is False else part for part in name) for name in names}


@pytest.mark.parametrize("hc", range(2, 9))
@pytest.mark.parametrize("hidden", [64, 4096])
def test_warmup_knows_every_kernel_that_an_op_asks_for(hidden: int, hc: int) -> None:
    config = MHCConfig(hidden, hc)
    for max_tokens in BOUNDARIES:
        known = launch.reachable(config, max_tokens)
        assert len(known) == len(set(known))
        assert asked_up_to(config, max_tokens) <= set(known), max_tokens


@pytest.mark.parametrize("hc", [2, 4, 8])
def test_warmup_compiles_nothing_that_is_never_asked_for(hc: int) -> None:
    config = MHCConfig(4096, hc)
    tables = {name for name in launch.reachable(config, 1) if name[-1] == "table"}  # of a vocabulary of any size
    for max_tokens in (1, 16, 8192):
        unused = set(launch.reachable(config, max_tokens)) - tables - asked_up_to(config, max_tokens)
        # not every op is called without a norm here
        assert with_norm(unused) <= with_norm(asked_up_to(config, max_tokens))


@pytest.mark.parametrize("max_tokens", [1, 40, 8192])
def test_a_forgotten_kernel_is_noticed(max_tokens: int) -> None:
    config = MHCConfig.v4_flash()
    asked, known = asked_up_to(config, max_tokens), launch.reachable(config, max_tokens)
    for forgotten in asked:
        assert not asked <= {name for name in known if name != forgotten}


def test_after_warmup_no_number_of_tokens_asks_for_another_kernel() -> None:
    config, most_tokens = MHCConfig.v4_flash(), 8192
    known, asked = set(launch.reachable(config, most_tokens)), dict[Name, int]()

    def note(device: int, *name: Any) -> Callable[..., None]:
        asked.setdefault(name, tokens)
        return lambda *tensors: None

    most = problem(config, most_tokens, device="meta")
    fn_broadcast, table = most.fn_broadcast, table_of(most)
    with mock.patch.object(Tensor, "is_cuda", True), mock.patch.object(launch, "kernel", note):
        for tokens in range(1, most_tokens + 1):
            rows = {name: getattr(most, name)[:tokens] for name in most.PER_TOKEN}
            every_kernel_call(dataclasses.replace(most, **rows), fn_broadcast, table)
    assert {name: at for name, at in asked.items() if name not in known} == {}
    assert known == set(asked)  # nothing is compiled in vain either


def test_a_table_may_have_more_rows_than_a_call_has_tokens() -> None:
    config = MHCConfig.v4_flash()
    tables = {name for names in asked_for(config).values() for name in names if name[-1] == "table"}
    assert len(tables) > 1
    assert tables <= set(launch.reachable(config, 1))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([64, 2880, 4096, 7168]), st.integers(2, 8), st.integers(1, 10_000))
def test_a_pick_changes_at_the_boundaries_alone(hidden: int, hc: int, tokens: int) -> None:
    config = MHCConfig(hidden, hc)
    begins = max(t for t in BOUNDARIES if t <= tokens) if tokens < 8192 else 8192
    for pick, variants_ in zip(PICKS, (ONE_STREAM, MANY_STREAMS), strict=True):
        assert pick(config, tokens) == pick(config, begins)
        picked = pick(config, tokens)
        assert picked in [v._replace(tile=picked.tile) for v in variants_ if v.tile >= picked.tile]


def test_tokens_never_decide_which_kernel_takes_streams() -> None:
    for hidden, hc in itertools.product((64, 4096, 4160, 7168), range(2, 9)):
        quad = hc == 4 and hidden == 4096
        for source in ("pre", "post_pre", "post_pre_collapsed", "head"):
            names = {launch.of_streams(MHCConfig(hidden, hc), tokens, False, source)[0] for tokens in BOUNDARIES}
            assert names == {"quad" if quad and source != "head" else "streams"}


def test_more_tokens_never_take_a_smaller_tile() -> None:
    for (hidden, hc), pick in itertools.product(itertools.product((64, 4096, 7168), range(2, 9)), PICKS):
        tiles = [pick(MHCConfig(hidden, hc), tokens).tile for tokens in BOUNDARIES]
        assert tiles == sorted(tiles)
    assert launch.many_streams(MHCConfig(4096), 1).tile == 1
    # tiles of one stream are not worth a variant below the 8 tokens of a tensor core
    assert launch.one_stream(MHCConfig(4096), 1).tile == 8


def test_no_variant_has_more_clusters_than_run_at_once() -> None:
    assert max(v.clusters for v in (*ONE_STREAM, *MANY_STREAMS)) <= MOST_CLUSTERS
    assert max(v.clusters for v in FOUR_STREAMS) <= MOST_LARGE_CLUSTERS
    # up to a variant's last token every cluster has one tile to do
    for v in VARIANTS:
        assert v.most == float("inf") or v.most <= v.tile * v.clusters


def test_streams_too_wide_for_shared_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_size must leave room .* got 131072 with hc_mult 8"):
        launch.many_streams(MHCConfig(131072, 8), 1)


def test_rows_too_wide_for_shared_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_size must leave room .* got 131072"):
        launch.one_stream(MHCConfig(131072), 1)


@pytest.mark.parametrize(("hidden", "hc"), [(4096, 4), (5120, 4), (7168, 4), (4096, 8)])
def test_the_widest_tile_of_one_stream_fits_into_shared_memory(hidden: int, hc: int) -> None:
    config = MHCConfig(hidden, hc)
    widest = launch.one_stream(config, 8192)
    (kernel,) = lowered(("fused", config, widest.tile, widest.clusters, True, "all")).kernels
    assert kernel.dynamic_shared <= MOST_SHARED_BYTES
    # and 8 tokens more, as many as a tensor core takes, would not have fitted
    assert (
        widest.tile == ONE_STREAM[-1].tile
        or kernel.dynamic_shared / widest.tile * (widest.tile + 8) > 0.95 * MOST_SHARED_BYTES
    )


def test_the_widest_tile_of_four_streams_fits_into_shared_memory() -> None:
    (kernel,) = lowered(launch.of_streams(MHCConfig(4096), 8192, True, "post_pre")).kernels
    assert kernel.dynamic_shared <= MOST_SHARED_BYTES - 1024  # its barriers are beside it


@pytest.mark.parametrize(("hidden", "hc"), [(4096, 4), (5120, 4), (7168, 4), (4096, 8), (5120, 8), (7168, 8)])
def test_the_widest_tile_of_streams_fits_into_shared_memory(hidden: int, hc: int) -> None:
    config = MHCConfig(hidden, hc)
    widest = launch.many_streams(config, 8192)
    (kernel,) = lowered(("streams", config, widest.tile, widest.clusters, True, "post_pre")).kernels
    used = kernel.dynamic_shared
    assert used <= MOST_SHARED_BYTES
    # and the estimate that picks it is not far off, or tiles would be smaller than they could be
    wider = [v for v in MANY_STREAMS if v.tile > widest.tile]
    if wider:
        assert used / widest.tile * wider[0].tile > 0.95 * MOST_SHARED_BYTES


@pytest.fixture
def compiled() -> Iterator[list[Name]]:
    """The kernels that are asked for on a machine that says it has a GPU."""
    asked: list[Name] = []
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=3),
        mock.patch.object(launch, "kernel", lambda *name: asked.append(name)),
    ):
        yield asked


def test_warmup_compiles_what_is_reachable(compiled: list[Name]) -> None:
    config = MHCConfig.mini()
    for device, used in ((None, 3), (1, 1)):
        compiled.clear()
        assert warmup(config, 64, device) == len(compiled)
        assert compiled == [(used, *name) for name in launch.reachable(config, 64)]


def test_warmup_in_several_processes_loads_what_they_compiled(compiled: list[Name]) -> None:
    config, ahead = MHCConfig.mini(), mock.MagicMock()
    # loaded while the folder of compiled kernels exists, no earlier and no later
    ahead.return_value.__enter__.side_effect = lambda: compiled.append(("begin",))
    ahead.return_value.__exit__.side_effect = lambda *error: compiled.append(("end",))
    with (
        mock.patch.object(export, "compiled_ahead", ahead),
        mock.patch.object(launch, "target", return_value={"kind": "cuda", "arch": "sm_90a"}),
    ):
        warmup(config, 64, jobs=5)
    names = launch.reachable(config, 64)
    ahead.assert_called_once_with(names, "sm_90a", 5)
    assert compiled == [("begin",), *((3, *name) for name in names), ("end",)]


@pytest.mark.parametrize("jobs", [0, -1])
def test_warmup_in_no_process_is_refused(jobs: int) -> None:
    with pytest.raises(ValueError, match=f"jobs must be at least 1, got {jobs}"):
        warmup(MHCConfig.mini(), 1, jobs=jobs)


@pytest.mark.parametrize(("devices", "current", "entered"), [(1, 0, []), (2, 1, []), (2, 0, [1])])
def test_a_call_leaves_the_callers_device_current(devices: int, current: int, entered: list[int]) -> None:
    events: list[Any] = []
    device = mock.MagicMock(side_effect=lambda index: events.append(index) or mock.MagicMock())

    def call(*inputs: str) -> int:
        events.append(inputs)
        return 3

    with (
        mock.patch.object(torch.cuda, "device_count", return_value=devices),
        mock.patch.object(torch.cuda, "current_device", return_value=current),
        mock.patch.object(torch.cuda, "device", device),
    ):
        assert launch.with_current(1, call)("a", "b") == 3
    assert events == [*entered, ("a", "b")]


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_warmup_for_no_tokens_is_refused(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens must be at least 1, got {max_tokens}"):
        warmup(MHCConfig.mini(), max_tokens)


def test_warmup_without_a_gpu_says_so() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(RuntimeError, match="none is visible: run it on the GPU host"),
    ):
        warmup(MHCConfig.mini(), 1)


def test_an_older_gpu_is_named() -> None:
    launch.target.cache_clear()
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A100"),
        pytest.raises(RuntimeError, match=r"compute capability 9\.0 .*, NVIDIA A100 has 8\.0"),
    ):
        launch.target(0)


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a")])
def test_the_target_is_the_device_own(capability: tuple[int, int], arch: str) -> None:
    launch.target.cache_clear()
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert launch.target(0) == {"kind": "cuda", "arch": arch}
    launch.target.cache_clear()
