"""Contract tests against the sources of real vLLM releases; one counted reason when they cannot be had."""

from __future__ import annotations

import pytest
import torch
import vllm_wheels

from mhc.vllm_plugin import installed

# V4.1 came after 0.26.0
RELEASES = [(v, m) for v in vllm_wheels.VERSIONS for m in installed.MODELS if (v, m) != ("0.26.0", "deepseek_v41")]
OF_RELEASES = {"vllm_version", "release"}


def pytest_runtest_setup(item: pytest.Item) -> None:
    if OF_RELEASES & set(getattr(item, "fixturenames", ())) and (reason := vllm_wheels.missing()):
        pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=vllm_wheels.VERSIONS)
def vllm_version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=RELEASES, ids="-".join)
def release(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Version and model."""
    return request.param


@pytest.fixture
def model(release: tuple[str, str]) -> str:
    return release[1]


@pytest.fixture
def sources(release: tuple[str, str]) -> tuple[str, str]:
    """The draft's module and the decoder layer's."""
    found = installed.read(vllm_wheels.package(release[0]), release[1])
    assert found is not None
    return found
