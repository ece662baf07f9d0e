"""The config: its presets, its limits, its way through the torch dispatcher."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc import MHCConfig
from mhc.config import LEAST_SINKHORN_EPS

eps = st.floats(0, 1e-2)
configs = st.builds(
    MHCConfig,
    hidden_size=st.integers(1, 200).map(lambda n: 64 * n),
    hc_mult=st.integers(2, 8),
    sinkhorn_iters=st.integers(1, 50),
    rms_eps=eps,
    pre_eps=eps,
    sinkhorn_eps=st.floats(LEAST_SINKHORN_EPS, 1e-2),
    norm_eps=eps,
    post_mult=st.floats(0.1, 10),
)


def test_presets_are_the_published_sizes() -> None:
    presets = (MHCConfig.v4_flash(), MHCConfig.v41_flash(), MHCConfig.v4_pro(), MHCConfig.mini())
    assert [config.hidden_size for config in presets] == [4096, 5120, 7168, 256]
    assert {(config.hc_mult, config.sinkhorn_iters, config.post_mult) for config in presets} == {(4, 20, 2.0)}
    assert all(
        getattr(config, f"{name}_eps") == 1e-6 for config in presets for name in ("rms", "pre", "sinkhorn", "norm")
    )


@pytest.mark.parametrize(("hc", "rows"), [(2, 8), (3, 15), (4, 24), (8, 80)])
def test_mixing_rows_are_pre_post_and_comb(hc: int, rows: int) -> None:
    assert MHCConfig(64, hc).mix_rows == rows == hc + hc + hc * hc


@given(configs)
def test_constants_bring_back_the_config(config: MHCConfig) -> None:
    constants = config.constants()
    assert len(constants) == len(dataclasses.fields(config)) - 1
    # the dispatcher hands every number on as a float
    assert MHCConfig.from_constants(config.hidden_size, [float(value) for value in constants]) == config


def test_frozen_and_hashable() -> None:
    config = MHCConfig.mini()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hc_mult = 2  # type: ignore[misc]
    assert len({config, MHCConfig.mini(), MHCConfig(256, 2)}) == 2  # kernels are cached by it


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 0, "hidden_size must be a positive multiple of 64, got 0"),
        ("hidden_size", -64, "hidden_size must be a positive multiple of 64, got -64"),
        ("hidden_size", 100, "hidden_size must be a positive multiple of 64, got 100"),
        ("hidden_size", 64.0, r"hidden_size must be an int, got 64\.0"),
        ("hc_mult", 1, "hc_mult must be 2 to 8, got 1"),
        ("hc_mult", 9, "hc_mult must be 2 to 8, got 9"),
        ("hc_mult", True, "hc_mult must be an int, got True"),
        ("sinkhorn_iters", 0, "sinkhorn_iters must be at least 1, got 0"),
        ("sinkhorn_iters", "20", "sinkhorn_iters must be an int, got '20'"),
        ("rms_eps", -1e-6, "rms_eps must be finite and >= 0, got -1e-06"),
        ("pre_eps", float("nan"), "pre_eps must be finite and >= 0, got nan"),
        ("sinkhorn_eps", float("inf"), "sinkhorn_eps must be finite and >= 0, got inf"),
        ("sinkhorn_eps", 0.0, r"sinkhorn_eps must be at least 1e-15, got 0\.0"),
        ("norm_eps", -1.0, r"norm_eps must be finite and >= 0, got -1\.0"),
        ("post_mult", 0.0, r"post_mult must be finite and > 0, got 0\.0"),
        ("post_mult", float("nan"), "post_mult must be finite and > 0, got nan"),
    ],
)
def test_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MHCConfig(**({"hidden_size": 64} | {field: value}))
