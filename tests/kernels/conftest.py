"""`mhc.launch` on the emulator, and kernels built ahead of the tests that need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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


BUILDS = pytest.StashKey[Builds]()
HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder come last: what they need is built while the others run."""
    items.sort(key=lambda item: HERE in item.path.parents)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to build whatever the tests about to run will ask for, in their order, then to run what they check."""
    builds = session.config.stash[BUILDS] = Builds()
    if session.config.option.collectonly:
        return
    params = [param for item in session.items if hasattr(item, "callspec") for param in item.callspec.params.values()]
    for step in ("begin", "begin_check"):  # whatever is built is built before anything runs
        for param in params:
            if hasattr(param, step):
                getattr(param, step)(builds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if BUILDS in session.config.stash:
        session.config.stash[BUILDS].close()


@pytest.fixture(scope="session")
def builds(request: pytest.FixtureRequest) -> Builds:
    """What is built ahead."""
    return request.config.stash[BUILDS]
