"""Kernels exported to a folder: named by what they depend on, loaded without TileLang, compiled where they miss."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mhc import MHCConfig, export, launch
from mhc.__main__ import main

TARGET = {"kind": "cuda", "arch": "sm_90a"}
POST = ("post", 64, 4, True)  # the kernel that compiles fastest
LOAD = """
import sys, torch
from mhc import launch
launch.target = lambda device: {"kind": "cuda", "arch": "sm_90a"}
launch.compiled = None  # whoever compiles fails
run = launch.kernel(0, "post", 64, 4, True)
assert "tilelang" not in sys.modules
o, x, post, out = (torch.zeros(3, *n, dtype=torch.bfloat16) for n in ((64,), (64,), (4,), (4, 64)))
for arguments in ((o,), (o.float(), x, post.float(), out), (o, x, post.float(), out)):
    try:
        run(*arguments)
    except RuntimeError as error:
        print(error)
"""


@pytest.fixture
def asked() -> Iterator[list[Any]]:
    """What `launch.kernel` compiled, on a machine that says it has a GPU; nothing is really compiled."""
    compiled: list[Any] = []

    def note(target: dict[str, str], *kernel: Any) -> tuple[Any, str]:
        compiled.append((target, *kernel))
        jit = mock.Mock()
        jit.adapter = SimpleNamespace(get_exportable_executable=lambda: {"entry": "compiled"})
        jit.export_library = lambda file: Path(file).write_text("library")
        return jit, "entry"

    launch.kernel.cache_clear()
    with (
        mock.patch.object(launch, "compiled", note),
        mock.patch.object(launch, "target", return_value=TARGET),
        mock.patch.object(export, "open_library", lambda path: f"from {path.name}"),
    ):
        yield compiled
    launch.kernel.cache_clear()


def test_an_exported_kernel_loads_without_tilelang_and_refuses_bad_arguments(tmp_path: Path) -> None:
    file = export.export(tmp_path, "sm_90a", *POST)
    assert list(tmp_path.iterdir()) == [file]
    environment = os.environ | {export.FOLDER: str(tmp_path), "PYTHONPATH": str(Path(export.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    few, dtype, device = done.stdout.splitlines()
    assert "num_args should be 4" in few
    assert "device_type mismatch, expected cuda" in device
    assert "mismatch" in dtype


def test_kernels_compiled_in_other_processes_are_found_for_a_while() -> None:
    kernels = [POST, ("post", 64, 3, True)]
    with export.compiled_ahead(kernels, "sm_90a", 2):
        assert all(export.load(TARGET, *kernel) for kernel in kernels)
        with export.compiled_ahead(kernels, "sm_90a", 2):  # which finds them there and starts no process
            assert [len(list(folder.iterdir())) for folder in export._folders] == [2, 0]
    assert export.load(TARGET, *POST) is None
    assert not export._folders
    with (
        pytest.raises(RuntimeError, match="1 of 1 processes that compile kernels failed"),
        export.compiled_ahead([("no such kernel",)], "sm_90a", 2),
    ):
        pass


def test_a_kernel_out_of_tilelangs_cache_is_exported_too(tmp_path: Path) -> None:
    cached = tmp_path / "kernel_lib.so"
    cached.write_text("library")
    jit = mock.Mock()
    jit.adapter = SimpleNamespace(libpath=str(cached))
    with mock.patch.object(launch, "compiled", return_value=(jit, "entry")):
        assert export.export(tmp_path, "sm_90a", *POST).read_text() == "library"
    jit.export_library.assert_not_called()


def test_a_kernel_in_the_folder_is_not_compiled(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export.export(tmp_path, "sm_90a", *POST)
    assert asked == [(TARGET, *POST)]
    monkeypatch.setenv(export.FOLDER, str(tmp_path))
    assert launch.kernel(0, *POST) == f"from {file.name}"
    assert len(asked) == 1
    assert launch.kernel(0, "post", 128, 4, True) == "compiled"  # another size is not there
    assert asked[1:] == [(TARGET, "post", 128, 4, True)]


def test_without_a_folder_kernels_are_compiled(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(export.FOLDER, raising=False)
    assert launch.kernel(0, *POST) == "compiled"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(export.FOLDER, str(tmp_path / "lost"))
    with pytest.raises(FileNotFoundError, match=r"MHC_KERNELS must name a folder .*lost: run `python -m mhc export"):
        launch.kernel(0, *POST)


def test_a_name_tells_all_apart_that_differ() -> None:
    small, eps = MHCConfig(64), MHCConfig(64, norm_eps=1e-5)
    names = [
        export.stem("sm_90a", "gather", small, True, False),
        export.stem("sm_100a", "gather", small, True, False),
        export.stem("sm_90a", "gather", eps, True, False),
        export.stem("sm_90a", "gather", small, False, False),
        export.stem("sm_90a", "finish", small, True, False),
    ]
    for where, what, value in (
        (importlib.metadata, "version", "9.9"),
        (export, "_sources", "edited"),
        (export.platform, "machine", "aarch64"),
    ):
        with mock.patch.object(where, what, lambda *_, value=value: value):
            names.append(export.stem("sm_90a", "gather", small, True, False))
    assert len(set(names)) == len(names)
    assert names[0] == export.stem("sm_90a", "gather", MHCConfig(64), True, False)


def test_the_command_exports_what_warmup_would_compile_and_keeps_what_is_there(
    tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export-kernels", str(tmp_path), "--hidden", "64", "--max-tokens", "20"]
    assert main(command) == 0
    expected = launch.reachable(MHCConfig(64), 20)
    assert asked == [(TARGET, *kernel) for kernel in expected]
    assert len(list(tmp_path.iterdir())) == len(expected)
    assert f"{len(expected)} kernels" in capsys.readouterr().out
    assert main(command) == 0
    assert len(asked) == len(expected)


@pytest.mark.parametrize("wrong", [["--hidden", "65"], ["--max-tokens", "0"], ["--jobs", "0"]])
def test_the_command_refuses_in_one_sentence(
    tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export-kernels", str(tmp_path), *wrong]) == 1
    error = capsys.readouterr().err
    assert wrong[1] in error
    assert error.startswith("mhc export-kernels: ")
    assert not list(tmp_path.iterdir())
