"""`mhc.launch` on the emulator, and kernels built ahead of the tests that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch
from cuda_on_cpu.runner import POISON, Emulated, still_poisoned
from torch import Tensor

from mhc import launch

from .builds import Builds, Variant


class Emulations(Protocol):
    """Where emulated kernels come from."""

    def emulated(self, variant: Variant) -> Emulated:
        """The kernel, built."""


class EmulatedLaunch:
    """Stands in for `mhc.launch.kernel`: every launch runs on the emulator in the order `seed` asks for.

    Outputs are poisoned before a launch and must all be written by it.
    """

    def __init__(self, builds: Emulations) -> None:
        self.builds, self.seed, self.launches = builds, 0, 0

    def kernel(self, device: int, *variant: Any) -> Callable[..., None]:
        """What `mhc.launch.kernel` would return for a CUDA device."""
        emulated = self.builds.emulated(variant)

        def run(*tensors: Tensor) -> None:
            named = dict(zip(emulated.lowered.tensors, tensors, strict=True))
            for name in emulated.written:
                named[name].view(torch.uint8).fill_(POISON)
            emulated(self.seed, concurrent=False, **named)
            for name in emulated.written:
                assert not still_poisoned(named[name]), f"{variant[0]} leaves part of {name} unwritten"
            self.launches += 1

        return run


@pytest.fixture
def on_emulator(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> EmulatedLaunch:
    """`mhc.launch` runs on CPU tensors, through the emulator."""
    emulated = EmulatedLaunch(builds)
    monkeypatch.setattr(launch, "kernel", emulated.kernel)
    return emulated


@pytest.fixture(scope="session")
def builds(request: pytest.FixtureRequest) -> Iterator[Builds]:
    """Builds, in the order of the tests, whatever the tests about to run will ask for."""
    built = Builds()
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if hasattr(case, "variants"):  # other tests have cases too
            for variant in case.variants():
                built.want(variant)
    yield built
    built.close()
