"""Every kernel on a real GPU: the checks of the emulator, and what only a GPU has (graphs, 64-bit offsets)."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from ops_tools import every_kernel_call, table_of

import mhc
from mhc import cuda, export, launch
from mhc.config import MHCConfig

from .builds import Variant, variants
from .cancelling import CANCELLED, assert_layer_input_within_bound, cancelling
from .table import OPS, Op, Problem, assert_close_to_fp64, bits, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU of compute capability 9.0 or newer"),
    pytest.mark.timeout(1800),  # the first test's time includes `compiled_ahead`
]
TOKENS = (0, 1, 2, 63, 64, 65, 130, 255, 256, 4096)
SAME_ROW_TOKENS = (1, 20, 40, 65, 130, 256, 600)
OTHER_TOKENS = (63, 65, 130, 300)  # at other H and hc
HIDDEN_OF_OTHER_HC = 320
NORMED = [op for op in OPS if not op.name.endswith("unnormed")]
OF_STREAMS = [op for op in NORMED if not op.name.startswith("gather")]  # a gather's rows are the table's


def launched(item: pytest.Item) -> list[Variant]:
    """The kernels of a test of an op, by its parameters; other tests launch some of the same."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "op" not in params:
        return []
    if not {"hidden", "hc"} & set(params):
        return variants(params["op"], MHCConfig(4096), (*TOKENS, *SAME_ROW_TOKENS))
    config = MHCConfig(params.get("hidden", HIDDEN_OF_OTHER_HC), params.get("hc", 4))
    return variants(params["op"], config, OTHER_TOKENS)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the tests about to run launch, compiled on all cores before the first."""
    own = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    kernels = list(dict.fromkeys(kernel for item in own for kernel in launched(item)))
    with export.compiled_ahead(kernels, launch.target(0)["arch"], os.cpu_count() or 1):
        yield


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """Outputs begin as NaN, so that an element no kernel writes is seen: torch's public allocation does that."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    prepared = functools.cache(cuda.prepared.__wrapped__)  # what is kept has its allocation
    with mock.patch.multiple(cuda, _empty_strided_cuda=None, prepared=prepared):
        assert cuda.allocator(0)(*cuda.spec(torch.float32, 1)).isnan()
        yield
    torch.use_deterministic_algorithms(False)


poisoned = pytest.mark.usefixtures("poisoned_outputs")


def on_gpu(p: Problem) -> Problem:
    """The problem on the GPU, in its own dtypes."""
    moved = {name: value.cuda() for name, value in vars(p).items() if isinstance(value, torch.Tensor)}
    return Problem(p.config, **moved)


@poisoned
@pytest.mark.parametrize("op", OPS, ids=str)
def test_against_fp64_at_h_4096(op: Op) -> None:
    p = on_gpu(problem(MHCConfig(4096), TOKENS[-1]))
    for tokens in TOKENS:
        rows = p.rows(tokens)
        assert_close_to_fp64(op, rows, op.call(rows))


@poisoned
@pytest.mark.parametrize("hidden", [64, 2880, 5120, 7168])
@pytest.mark.parametrize("op", NORMED, ids=str)
def test_against_fp64_at_other_h(op: Op, hidden: int) -> None:
    p = on_gpu(problem(MHCConfig(hidden), OTHER_TOKENS[-1]))
    for tokens in OTHER_TOKENS:
        rows = p.rows(tokens)
        assert_close_to_fp64(op, rows, op.call(rows))


@poisoned
@pytest.mark.parametrize("hc", [2, 3, 8])
@pytest.mark.parametrize("op", NORMED, ids=str)
def test_against_fp64_at_other_hc(op: Op, hc: int) -> None:
    p = on_gpu(problem(MHCConfig(HIDDEN_OF_OTHER_HC, hc), OTHER_TOKENS[-1]))
    for tokens in OTHER_TOKENS:
        rows = p.rows(tokens)
        assert_close_to_fp64(op, rows, op.call(rows))


@poisoned
@pytest.mark.parametrize("op", NORMED, ids=str)
def test_a_row_is_bitwise_the_same_at_every_t(op: Op) -> None:
    *fewer, most = SAME_ROW_TOKENS
    p = on_gpu(problem(MHCConfig(4096), most))
    largest = op.call(p)
    for tokens in fewer:
        for again in range(2):
            for a, b in zip(op.call(p.rows(tokens)), largest, strict=True):
                assert torch.equal(bits(a), bits(b[:tokens])), (tokens, again)


@poisoned
@pytest.mark.parametrize("op", OF_STREAMS, ids=str)
def test_a_nan_stays_in_its_row(op: Op) -> None:
    clean = on_gpu(problem(MHCConfig(4096), 65))
    dirty = clean.with_nan(9)
    others = torch.arange(65, device="cuda") != 9
    for a, b in zip(op.call(clean), op.call(dirty), strict=True):
        assert torch.equal(bits(a[others]), bits(b[others]))
        assert b[9].isnan().all()


@poisoned
@pytest.mark.parametrize("op", CANCELLED, ids=str)
def test_streams_that_cancel(op: Op) -> None:
    p = on_gpu(cancelling(MHCConfig(4096)))
    assert_layer_input_within_bound(op, p, "inner_products", op.call(p))


def test_rows_past_the_32nd_bit() -> None:
    """131,073 tokens of 4 x 4096 are 2^31 elements and more."""
    p = on_gpu(problem(MHCConfig(4096), 8))
    weights = (p.fn_broadcast, p.scale, p.base, p.norm_weight, p.config)
    x = torch.zeros(131_073, 4096, dtype=torch.bfloat16, device="cuda")
    x[-8:] = p.x
    small, large = mhc.pre_broadcast(p.x, *weights), mhc.pre_broadcast(x, *weights)
    for a, b in zip(small, large, strict=True):
        assert torch.equal(bits(a), bits(b[-8:]))
    output = torch.zeros_like(x)
    output[-8:] = p.output
    args = (p.fn, p.scale, p.base, p.norm_weight, p.config)
    small = mhc.post_pre(p.output, small.residual, small.post, small.comb, *args)
    large = mhc.post_pre(output, large.residual, large.post, large.comb, *args)
    for a, b in zip(small, large, strict=True):
        assert torch.equal(bits(a), bits(b[-8:]))


def test_a_captured_graph_sees_a_refresh_and_other_shapes_leave_it_alone() -> None:
    p = on_gpu(problem(MHCConfig(4096), 300))
    fn = p.fn.clone()
    weight = mhc.BroadcastWeight(fn, 4)
    static_x = p.x[:7].clone()

    def run(x: torch.Tensor) -> mhc.PreOutput:
        return mhc.pre_broadcast(x, weight.tensor, p.scale, p.base, p.norm_weight, p.config)

    run(static_x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static_x)
    for tokens in (1, 64, 300):
        run(p.x[:tokens])
    fn.mul_(1.5)
    address = weight.tensor.data_ptr()
    weight.refresh()
    assert weight.tensor.data_ptr() == address
    static_x.copy_(p.x[100:107])
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(out, run(p.x[100:107]), strict=True):
        assert torch.equal(bits(a), bits(b))


def test_after_warmup_no_number_of_tokens_compiles_a_kernel() -> None:
    config, most_tokens = MHCConfig(4096), 8192
    mhc.warmup(config, most_tokens, jobs=os.cpu_count() or 1)
    most = on_gpu(problem(config, most_tokens))
    fn_broadcast, table = most.fn_broadcast, table_of(most)
    ready = launch.kernel.cache_info().misses
    with mock.patch.object(launch, "compiled", side_effect=AssertionError("compiled after warm-up")):
        for tokens in range(1, most_tokens + 1):
            rows = {name: getattr(most, name)[:tokens] for name in most.PER_TOKEN}
            every_kernel_call(dataclasses.replace(most, **rows), fn_broadcast, table)
    torch.cuda.synchronize()
    assert launch.kernel.cache_info().misses == ready


def test_the_table_marks_ids_that_are_no_rows() -> None:
    p = on_gpu(problem(MHCConfig(4096), 300))
    table = mhc.TokenTable.build(p.x, p.fn_broadcast, p.scale, p.base, p.config)
    ids = torch.tensor([3, -1, 299, 300], device="cuda")
    out = mhc.pre_from_table(ids, p.x, table, p.norm_weight, p.config)
    assert out.layer_input.isnan().all(1).tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="2 outside, from -1 to 300"):
        mhc.pre_from_table(ids, p.x, table, p.norm_weight, p.config, check_ids=True)


def test_refused_arguments_are_explained() -> None:
    p = on_gpu(problem(MHCConfig(4096), 3))
    weights = (p.fn_broadcast, p.scale, p.base, p.norm_weight, p.config)
    with pytest.raises(ValueError, match="x must be bfloat16"):
        mhc.pre_broadcast(p.x.float(), *weights)
    with pytest.raises(ValueError, match="fn_broadcast must be on cuda"):
        mhc.pre_broadcast(p.x, p.fn_broadcast.cpu(), *weights[1:])
    with pytest.raises(ValueError, match="x must be contiguous"):
        mhc.pre_broadcast(p.x.repeat(1, 2)[:, ::2], *weights)
