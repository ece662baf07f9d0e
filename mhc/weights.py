"""Weights derived from the checkpoint: the folded projection, kept fresh in place.

`fn_broadcast` is not a checkpoint parameter: it is made after loading, made again *into the same storage* after every
refit (captured CUDA graphs hold its address), never saved, and never silently stale.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold(fn: Tensor, hc_mult: int) -> Tensor:
    """Fold a projection over the streams: `fn_b = fn.view(M, hc, H).sum(1)`, as if summed exactly and rounded once.

    Args:
        fn: [M, hc * H] fp32 (any rows: the head's [hc, hc * H] folds too).
        hc_mult: `hc`.

    Returns:
        [M, H] fp32 on `fn`'s device: the fp32 value nearest to the exact sum, also when the streams cancel, and
        independent of their order. Columns with an infinity or a NaN become NaN.

    Raises:
        ValueError: `fn` is not a 2-D fp32 tensor whose width divides by `hc_mult`.

    Source: notebook 01, claim 1. The summation is error-free distillation (Knuth's two-sum, swept as often as there
    are terms), then rounding to odd so that rounding twice equals rounding once (Boldo and Melquiond, 2008).
    """
    _check_foldable(fn, hc_mult)
    terms = list(fn.detach().to(torch.float64).unflatten(1, (hc_mult, -1)).unbind(1))
    for _ in range(hc_mult):
        for j in range(1, hc_mult):
            terms[j], terms[j - 1] = _two_sum(terms[j - 1], terms[j])
    total = terms[-1]
    if hc_mult > 1:
        # what fp64 could not hold decides the way only when the kept bits end on an even one
        rest = torch.stack(terms[:-1]).sum(0)
        odd = total.view(torch.int64).bitwise_and(1).bool()
        beside = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), rest))
        total = torch.where((rest == 0) | odd, total, beside)
    return total.to(torch.float32)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and its exact error: a + b = s + e."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def state_of(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to or moved: its version counter and the address of its values.

    Costs no device time, and misses writes through `.data`. Inference tensors have no version counter.
    """
    return (-1 if tensor.is_inference() else tensor._version), tensor.data_ptr()


def _check_foldable(fn: Tensor, hc_mult: int) -> None:
    if hc_mult < 1 or fn.dim() != 2 or fn.dtype != torch.float32 or fn.shape[1] % hc_mult:
        raise ValueError(
            f"fn must be float32 [rows, hc_mult * H] with hc_mult={hc_mult}, got {fn.dtype} {list(fn.shape)}"
        )


class BroadcastWeight:
    """`fold(fn)` with a lifecycle: made once, refreshed in place, able to say that it is stale.

    A plain object, neither Parameter nor buffer: assigned to a module it stays out of every `state_dict`.
    The tensor lives on `fn`'s device. `module.to(device)` replaces `fn.data`; the next `refresh()` then allocates a
    tensor on the new device (a new address, the one case in which it changes); every other refresh writes in place.

    What is watched is the tensor object `fn`. Loaders that bind a new parameter (`load_state_dict(assign=True)`,
    `to_empty` from meta) leave the old one behind: hand the new one to `refresh(fn)`.

    Args:
        fn: [M, hc * H] fp32, the projection to fold; the object keeps a reference, not a copy.
        hc_mult: `hc`.

    Raises:
        ValueError: as `fold`.
    """

    def __init__(self, fn: Tensor, hc_mult: int) -> None:
        _check_foldable(fn, hc_mult)
        self.fn = fn
        self.hc_mult = hc_mult
        self._tensor: Tensor | None = None
        self._seen: tuple[int, int] | None = None
        if fn.device.type != "meta":  # a meta model has no values yet: the loader refreshes
            self.refresh()

    @property
    def tensor(self) -> Tensor:
        """[M, H] fp32.

        Raises:
            RuntimeError: the weight was never made (the model was built on meta and `refresh()` was not called).
        """
        if self._tensor is None:
            raise RuntimeError("fn_broadcast was never made: call refresh() after loading the weights")
        return self._tensor

    def refresh(self, fn: Tensor | None = None) -> Tensor:
        """Fold again, into the same storage; returns the tensor.

        Args:
            fn: a replacement for the watched projection, for loaders that re-bind parameters instead of copying.

        Raises:
            RuntimeError: `fn` is still on the meta device.
            ValueError: as `fold`, or the replacement has another shape.
        """
        fn = self.fn if fn is None else fn
        _check_foldable(fn, self.hc_mult)
        if fn.shape != self.fn.shape:
            raise ValueError(f"fn must be {list(self.fn.shape)} as before, got {list(fn.shape)}")
        if fn.device.type == "meta":
            raise RuntimeError("fn is on the meta device: load the weights before refresh()")
        self.fn = fn
        # a tensor born in inference mode could not be refreshed outside of it
        with torch.inference_mode(False):
            folded = fold(fn, self.hc_mult)
            if self._tensor is None or self._tensor.device != folded.device:
                self._tensor = folded
            else:
                self._tensor.copy_(folded)
        self._seen = state_of(self.fn)
        return self._tensor

    def is_stale(self, content: bool = False) -> bool:
        """Whether `fn` changed since the last refresh.

        Args:
            content: False looks at the version counter and the storage's address, which costs no device time but
                misses writes through `.data`; True folds again and compares the values.
        """
        if self._tensor is None or self._seen != state_of(self.fn):
            return True
        return content and not torch.allclose(fold(self.fn, self.hc_mult), self._tensor, rtol=0, atol=0, equal_nan=True)

    def verify(self) -> None:
        """Compare by content.

        Raises:
            RuntimeError: the folded weight does not match `fn`, with the largest difference.
        """
        tensor, folded = self.tensor, fold(self.fn, self.hc_mult)
        tensor = tensor.to(folded.device)
        if not torch.allclose(folded, tensor, rtol=0, atol=0, equal_nan=True):
            worst = (folded - tensor).abs().max().item()
            raise RuntimeError(f"fn_broadcast is stale: it differs from fold(fn) by up to {worst:.3e}; call refresh()")
