"""Weights derived from the checkpoint: the folded projection, kept fresh in place.

`fn_broadcast` is not a checkpoint parameter: it is made after loading, made again *into the same storage* after every
refit (captured CUDA graphs hold its address), never saved, and never silently stale.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold(fn: Tensor, hc_mult: int) -> Tensor:
    """Fold a projection over the streams: `fn_b = fn.view(M, hc, H).sum(1)`, summed in fp64 and rounded once.

    Args:
        fn: [M, hc * H] fp32 (any rows: the head's [hc, hc * H] folds too).
        hc_mult: `hc`.

    Returns:
        [M, H] fp32 on `fn`'s device: each value is the fp32 nearest to the exact sum (up to fp64's own rounding).

    Raises:
        ValueError: `fn` is not a 2-D fp32 tensor whose width divides by `hc_mult`.

    Source: notebook 01, claim 1.
    """
    if hc_mult < 1 or fn.dim() != 2 or fn.dtype != torch.float32 or fn.shape[1] % hc_mult:
        raise ValueError(
            f"fn must be float32 [rows, hc_mult * H] with hc_mult={hc_mult}, got {fn.dtype} {list(fn.shape)}"
        )
    rows, width = fn.shape
    return fn.detach().view(rows, hc_mult, width // hc_mult).sum(1, dtype=torch.float64).to(torch.float32)


class BroadcastWeight:
    """`fold(fn)` with a lifecycle: made once, refreshed in place, able to say that it is stale.

    A plain object, neither Parameter nor buffer: assigned to a module it stays out of every `state_dict`.
    The tensor lives on `fn`'s device. `module.to(device)` replaces `fn.data`; the next `refresh()` then allocates a
    tensor on the new device (a new address, the one case in which it changes); every other refresh writes in place.

    Args:
        fn: [M, hc * H] fp32, the projection to fold; the object keeps a reference, not a copy.
        hc_mult: `hc`.

    Raises:
        ValueError: as `fold`.
    """

    def __init__(self, fn: Tensor, hc_mult: int) -> None:
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
        """
        if fn is not None:
            self.fn = fn
        if self.fn.device.type == "meta":
            raise RuntimeError("fn is on the meta device: load the weights before refresh()")
        folded = fold(self.fn, self.hc_mult)
        if self._tensor is None or self._tensor.device != folded.device:
            self._tensor = folded
        else:
            self._tensor.copy_(folded)
        self._seen = self._state()
        return self._tensor

    def is_stale(self, content: bool = False) -> bool:
        """Whether `fn` changed since the last refresh.

        Args:
            content: False looks at the version counter and the storage's address, which costs no device time but
                misses writes through `.data`; True folds again and compares the values.
        """
        if self._tensor is None or self._seen != self._state():
            return True
        return content and not torch.equal(fold(self.fn, self.hc_mult), self._tensor)

    def verify(self) -> None:
        """Compare by content.

        Raises:
            RuntimeError: the folded weight does not match `fn`, with the largest difference.
        """
        worst = (fold(self.fn, self.hc_mult) - self.tensor.to(self.fn.device)).abs().max().item()
        if worst != 0:
            raise RuntimeError(f"fn_broadcast is stale: it differs from fold(fn) by up to {worst:.3e}; call refresh()")

    def _state(self) -> tuple[int, int]:
        # inference tensors have no version counter: their address alone is watched
        return (-1 if self.fn.is_inference() else self.fn._version), self.fn.data_ptr()
