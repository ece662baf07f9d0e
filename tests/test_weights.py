"""The folded weight: exact to one rounding, kept fresh in place, never silently stale."""

from __future__ import annotations

import copy
from fractions import Fraction
from math import fsum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mhc import BroadcastWeight, fold, reference

H, HC = 8, 4


def nearest_fp32(terms: list[float]) -> float:
    """The fp32 value nearest to the exact sum, ties to even: by rational arithmetic, no floating-point sum."""
    exact = sum(map(Fraction, terms))
    guess = np.float32(float(exact))
    around = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return float(min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.int32)) & 1)))


def weight(seed: int = 0, rows: int = 24) -> Tensor:
    return torch.randn(rows, HC * H, generator=torch.Generator().manual_seed(seed))


# ---- fold ----

# 2^120 leaves room for eight terms; subnormals and zeros are in
fp32 = st.floats(min_value=-(2.0**120), max_value=2.0**120, width=32)


@settings(max_examples=300, deadline=None)
@given(st.lists(fp32, min_size=1, max_size=4), st.lists(fp32, max_size=2), st.randoms(use_true_random=False))
def test_fold_is_the_exact_sum_rounded_once(kept: list[float], cancelled: list[float], random: object) -> None:
    terms = kept + cancelled + [-value for value in cancelled]
    random.shuffle(terms)  # type: ignore[attr-defined]
    folded = fold(torch.tensor([terms], dtype=torch.float32), len(terms))
    assert folded.item() == nearest_fp32(terms)


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ([1e8, 1e-8, -1e8], "fp64 loses the small term while the large ones are there"),
        ([1.0, 2.0**-24, 2.0**-90], "just above a tie of fp32: rounding twice would go to even"),
        ([1.0, 2.0**-24, -(2.0**-90)], "just below it"),
        ([1.0, 2.0**-24], "the tie itself goes to even"),
        ([2.0**-149, -(2.0**-149), 2.0**-149], "subnormals"),
    ],
)
def test_fold_where_a_plain_sum_fails(terms: list[float], why: str) -> None:
    terms = [float(np.float32(t)) for t in terms]
    assert fold(torch.tensor([terms], dtype=torch.float32), len(terms)).item() == nearest_fp32(terms), why


def test_fold_of_a_real_size_under_cancellation() -> None:
    generator = torch.Generator().manual_seed(3)
    fn = torch.randn(24, HC, 4096, generator=generator)
    fn[:, 3] = -fn[:, :3].sum(1) + 1e-7 * torch.randn(24, 4096, generator=generator)
    folded = fold(fn.flatten(1), HC)
    # fsum is exact, and these sums have few bits: its one rounding to fp64 does not meet an fp32 tie
    exact = np.array([[fsum(column) for column in row] for row in fn.transpose(1, 2).tolist()])
    assert (folded.numpy() == exact.astype(np.float32)).all()
    assert folded.abs().max() < 1e-5 * fn.abs().max()
    assert not torch.equal(folded, reference.fold(fn.flatten(1), HC)), "the case does not cancel hard enough"


def test_fold_is_independent_of_the_streams_order() -> None:
    fn = weight()
    shuffled = fn.view(24, HC, H)[:, torch.tensor([2, 0, 3, 1])].reshape(24, -1)
    assert torch.equal(fold(fn, HC), fold(shuffled, HC))


def test_fold_takes_a_slice_and_leaves_it_alone() -> None:
    wide = weight().repeat(1, 2)
    part = wide[:, : HC * H]
    before = wide.clone()
    assert torch.equal(fold(part, HC), fold(part.contiguous(), HC))
    assert torch.equal(wide, before)


def test_fold_of_non_finite_weights_is_not_finite() -> None:
    fn = weight()
    fn[3, 5], fn[4, 6] = torch.inf, torch.nan
    folded = fold(fn, HC)
    assert folded[3, 5].isnan()
    assert folded[4, 6].isnan()
    assert folded.isfinite().sum() == folded.numel() - 2


@pytest.mark.parametrize(
    ("fn", "hc_mult"),
    [(torch.zeros(24, 30), 4), (torch.zeros(24, 32).double(), 4), (torch.zeros(32), 4), (torch.zeros(24, 32), 0)],
)
def test_fold_refuses(fn: Tensor, hc_mult: int) -> None:
    with pytest.raises(ValueError, match=rf"fn must be float32 .*hc_mult={hc_mult}, got"):
        fold(fn, hc_mult)
    with pytest.raises(ValueError, match="fn must be float32"):
        BroadcastWeight(fn, hc_mult)


# ---- lifecycle ----


def test_made_at_once_and_refreshed_in_place() -> None:
    fn = weight()
    broadcast = BroadcastWeight(fn, HC)
    assert torch.equal(broadcast.tensor, fold(fn, HC))
    address = broadcast.tensor.data_ptr()
    fn.copy_(weight(1))
    assert broadcast.refresh() is broadcast.tensor
    assert broadcast.tensor.data_ptr() == address
    assert torch.equal(broadcast.tensor, fold(weight(1), HC))


@pytest.mark.parametrize(
    "write",
    [lambda fn: fn.add_(1), lambda fn: fn.detach().mul_(2), lambda fn: fn[0].zero_(), lambda fn: fn.copy_(weight(1))],
    ids=["add_", "detached", "row", "copy_"],
)
def test_a_write_is_seen_by_the_version_counter(write: object) -> None:
    fn = nn.Parameter(weight())
    broadcast = BroadcastWeight(fn, HC)
    assert not broadcast.is_stale()
    with torch.no_grad():
        write(fn)  # type: ignore[operator]
    assert broadcast.is_stale()
    broadcast.refresh()
    assert not broadcast.is_stale(content=True)


def test_an_optimizer_step_is_seen() -> None:
    fn = nn.Parameter(weight())
    broadcast = BroadcastWeight(fn, HC)
    optimizer = torch.optim.AdamW([fn], lr=0.1)
    fn.square().sum().backward()
    optimizer.step()
    assert broadcast.is_stale()


def test_a_write_through_data_is_seen_by_content() -> None:
    fn = nn.Parameter(weight())
    broadcast = BroadcastWeight(fn, HC)
    fn.data[2, 3] += 1
    assert not broadcast.is_stale(), "if torch counts such writes now, say so in is_stale"
    assert broadcast.is_stale(content=True)
    with pytest.raises(RuntimeError, match=r"stale: it differs from fold\(fn\) by up to 1\.000e\+00; call refresh"):
        broadcast.verify()
    broadcast.refresh()
    broadcast.verify()
    assert not broadcast.is_stale(content=True)


def test_data_bound_to_another_storage_is_seen_by_the_address() -> None:
    fn = nn.Parameter(weight())
    broadcast = BroadcastWeight(fn, HC)
    fn.data = weight(1)
    assert broadcast.is_stale()


def test_equal_not_a_numbers_are_not_stale() -> None:
    fn = weight()
    fn[0, 0] = torch.nan
    broadcast = BroadcastWeight(fn, HC)
    assert not broadcast.is_stale(content=True)
    broadcast.verify()


class Layer(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.empty(24, HC * H, device=device))
        self.broadcast = BroadcastWeight(self.fn, HC)


def test_never_in_a_state_dict_nor_among_the_parameters() -> None:
    layer = Layer()
    assert set(layer.state_dict()) == {"fn"}
    assert [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())] == ["fn"]


def test_loading_in_place_is_seen() -> None:
    layer = Layer()
    address = layer.broadcast.tensor.data_ptr()
    layer.load_state_dict({"fn": weight()})
    assert layer.broadcast.is_stale()
    layer.broadcast.refresh()
    assert layer.broadcast.tensor.data_ptr() == address
    layer.broadcast.verify()


def test_meta_is_loud_until_loaded() -> None:
    layer = Layer("meta")
    with pytest.raises(RuntimeError, match=r"never made: call refresh\(\)"):
        layer.broadcast.tensor  # noqa: B018
    with pytest.raises(RuntimeError, match="never made"):
        layer.broadcast.verify()
    with pytest.raises(RuntimeError, match="meta device"):
        layer.broadcast.refresh()
    assert layer.broadcast.is_stale()
    assert layer.broadcast.is_stale(content=True)
    # both ways off the meta device bind a new parameter, which refresh is told
    layer.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="meta device"):
        layer.broadcast.refresh()
    layer.load_state_dict({"fn": weight()}, assign=True)
    layer.broadcast.refresh(layer.fn)
    assert torch.equal(layer.broadcast.tensor, fold(weight(), HC))
    assert not layer.broadcast.is_stale(content=True)


def test_a_rebound_parameter_is_handed_over_in_place() -> None:
    layer = Layer()
    address = layer.broadcast.tensor.data_ptr()
    layer.load_state_dict({"fn": weight(5)}, assign=True)
    layer.broadcast.refresh(layer.fn)
    assert layer.broadcast.tensor.data_ptr() == address
    assert layer.broadcast.fn is layer.fn
    layer.broadcast.verify()


def test_to_a_dtype_that_cannot_be_folded_is_refused() -> None:
    layer = Layer()
    layer.to(torch.bfloat16)
    assert layer.broadcast.is_stale()
    with pytest.raises(ValueError, match="fn must be float32"):
        layer.broadcast.refresh()


@pytest.mark.parametrize("rows", [1, 23])
def test_a_replacement_of_another_shape_is_refused(rows: int) -> None:
    broadcast = BroadcastWeight(weight(), HC)
    before = broadcast.tensor.clone()
    with pytest.raises(ValueError, match=rf"fn must be \[24, 32\] as before, got \[{rows}, 32\]"):
        broadcast.refresh(weight(rows=rows))
    assert torch.equal(broadcast.tensor, before)
    assert broadcast.fn.shape[0] == 24


def test_made_in_inference_mode_refreshed_outside_and_back() -> None:
    with torch.inference_mode():
        fn = weight()
        broadcast = BroadcastWeight(fn, HC)
        fn.add_(1)  # inference tensors have no version counter
        assert broadcast.is_stale(content=True)
    broadcast.refresh()
    assert not broadcast.is_stale(content=True)
    with torch.inference_mode():
        broadcast.refresh()
    assert not broadcast.tensor.requires_grad


def test_a_deep_copy_watches_its_own_parameter() -> None:
    layer = Layer()
    layer.load_state_dict({"fn": weight()})
    layer.broadcast.refresh()
    twin = copy.deepcopy(layer)
    assert twin.broadcast.fn is twin.fn
    assert twin.broadcast.tensor.data_ptr() != layer.broadcast.tensor.data_ptr()
    assert not layer.broadcast.is_stale()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: moving between devices and captured graphs not run")
def test_moved_to_the_gpu_and_refreshed_under_a_captured_graph() -> None:
    layer = Layer()
    layer.load_state_dict({"fn": weight()})
    layer.broadcast.refresh()
    layer.to("cuda")
    assert layer.broadcast.is_stale()
    layer.broadcast.refresh()
    assert layer.broadcast.tensor.is_cuda
    assert torch.equal(layer.broadcast.tensor.cpu(), fold(weight(), HC))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = layer.broadcast.tensor * 2
    layer.load_state_dict({"fn": weight(1)})
    layer.broadcast.refresh()
    graph.replay()
    assert torch.equal(doubled.cpu(), 2 * fold(weight(1), HC))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: a captured refresh not run")
def test_the_refresh_itself_can_be_captured() -> None:
    fn = weight().cuda()
    broadcast = BroadcastWeight(fn, HC)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        broadcast.refresh()
    fn.copy_(weight(1))
    graph.replay()
    assert torch.equal(broadcast.tensor.cpu(), fold(weight(1), HC))
