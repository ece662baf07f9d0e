"""The constants of manifold-constrained hyper-connections (mHC), one frozen object for all code paths."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

HC_MULT_RANGE = range(2, 9)
LEAST_SINKHORN_EPS = 1e-15  # a kernel's divisors are no smaller, and fp32 holds the product of two
HIDDEN_MULTIPLE = 64


@dataclass(frozen=True)
class MHCConfig:
    """Shapes and constants of one mHC layer.

    Letters used everywhere: `T` tokens, `H` hidden size, `hc` streams, `M = hc * (hc + 2)` mixing rows
    (`hc` pre, `hc` post, `hc * hc` comb).

    Args:
        hidden_size: `H`, a positive multiple of 64.
        hc_mult: `hc`, 2 to 8.
        sinkhorn_iters: row-and-column normalisations of comb, at least 1.
        rms_eps: added to `mean(flat(r)^2)` in the mixes.
        pre_eps: added to the pre gate (also the head's gate).
        sinkhorn_eps: added in every Sinkhorn step.
        norm_eps: added to `mean(y^2)` in the layer's RMSNorm.
        post_mult: factor of the post gate.

    Raises:
        ValueError: naming the argument, its value and what is accepted.

    Source: DeepSeek-V4's `hc_*` configuration; V4-Flash has H 4096, hc 4, 20 iterations and every eps 1e-6.
    """

    hidden_size: int
    hc_mult: int = 4
    sinkhorn_iters: int = 20
    rms_eps: float = 1e-6
    pre_eps: float = 1e-6
    sinkhorn_eps: float = 1e-6
    norm_eps: float = 1e-6
    post_mult: float = 2.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "hc_mult", "sinkhorn_iters"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an int, got {value!r}")
        if self.hidden_size <= 0 or self.hidden_size % HIDDEN_MULTIPLE:
            raise ValueError(f"hidden_size must be a positive multiple of {HIDDEN_MULTIPLE}, got {self.hidden_size}")
        if self.hc_mult not in HC_MULT_RANGE:
            raise ValueError(f"hc_mult must be {HC_MULT_RANGE[0]} to {HC_MULT_RANGE[-1]}, got {self.hc_mult}")
        if self.sinkhorn_iters < 1:
            raise ValueError(f"sinkhorn_iters must be at least 1, got {self.sinkhorn_iters}")
        for name in ("rms_eps", "pre_eps", "sinkhorn_eps", "norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {value}")
        if self.sinkhorn_eps < LEAST_SINKHORN_EPS:
            raise ValueError(f"sinkhorn_eps must be at least {LEAST_SINKHORN_EPS}, got {self.sinkhorn_eps}")
        if not (math.isfinite(self.post_mult) and self.post_mult > 0):
            raise ValueError(f"post_mult must be finite and > 0, got {self.post_mult}")

        # kernels are looked up by config on every call: hash the fields once
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @functools.cached_property
    def shared(self) -> MHCConfig:
        """The same object for all equal configs: a look-up then compares no fields, which takes Python."""
        return _SHARED.setdefault(self, self)

    @property
    def mix_rows(self) -> int:
        """`M = hc * (hc + 2)`."""
        return self.hc_mult * (self.hc_mult + 2)

    @classmethod
    def v4_flash(cls) -> MHCConfig:
        """DeepSeek-V4-Flash: H 4096, hc 4."""
        return cls(hidden_size=4096)

    @classmethod
    def v4_pro(cls) -> MHCConfig:
        """DeepSeek-V4-Pro: H 7168, hc 4."""
        return cls(hidden_size=7168)

    @classmethod
    def v41_flash(cls) -> MHCConfig:
        """DeepSeek-V4.1-Flash: H 5120, hc 4 (its pre is delayed: see `reference.pre_delayed`)."""
        return cls(hidden_size=5120)

    @classmethod
    def mini(cls) -> MHCConfig:
        """The model trained in this repository: H 256, hc 4."""
        return cls(hidden_size=256)

    def constants(self) -> list[float]:
        """Every field but `hidden_size`, flat: how a config crosses the torch dispatcher."""
        return [
            self.hc_mult,
            self.sinkhorn_iters,
            self.rms_eps,
            self.pre_eps,
            self.sinkhorn_eps,
            self.norm_eps,
            self.post_mult,
        ]

    @classmethod
    def from_constants(cls, hidden_size: int, constants: Sequence[float]) -> MHCConfig:
        """The inverse of `constants`."""
        hc_mult, iters, *rest = constants
        return cls(hidden_size, int(hc_mult), int(iters), *rest)


_SHARED: dict[MHCConfig, MHCConfig] = {}
