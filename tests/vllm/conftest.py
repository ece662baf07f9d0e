"""Contract tests against the sources of real vLLM releases; one counted reason when they cannot be had."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_models
import vllm_wheels
from vllm_models import Ops, fill, vllm_config
from vllm_stubs import release as stubbed

import mhc.vllm_plugin as plugin
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


@pytest.fixture
def vllm(release: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The release's modules; `load()` registers the plugin, imports its draft and builds one."""
    version, model = release
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("MHC_DISABLE", "MHC_FIRST_PRE", "MHC_POST_PRE"):
        monkeypatch.delenv(name, raising=False)
    ops = Ops()
    with stubbed(vllm_wheels.package(version), vllm_models.real_modules(model)):
        name = installed.draft_module(model)
        real_patch = plugin._patch

        seen: list[ModuleType] = []

        def prepare(module: ModuleType) -> None:
            vllm_models.prepare(module, ops)
            seen.append(module)

        def prepared(module: ModuleType, *choices: str) -> None:
            prepare(module)
            real_patch(module, *choices)

        monkeypatch.setattr(plugin, "_patch", prepared)

        def load(**environment: str) -> Any:
            for variable, value in environment.items():
                monkeypatch.setenv(variable, value)
            plugin.register()
            module = importlib.import_module(name)
            if module not in seen:
                prepare(module)
            made = module.DSparkDeepseekV4ForCausalLM(vllm_config=vllm_config(), prefix="")
            fill(made, 1)
            return made

        yield SimpleNamespace(load=load, ops=ops, version=version, name=name, delayed=model == "deepseek_v41")
