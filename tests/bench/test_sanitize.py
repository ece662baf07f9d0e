"""`bench sanitize` without a GPU: its ops reach every kernel; a stand-in for compute-sanitizer ends in every way."""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import mhc
from mhc import MHCConfig, export, launch
from mhc.__main__ import main
from mhc.bench import sanitize
from mhc.bench.sanitize import OPS, RAN, TOOLS, call, verdict

# what it does depends on the op, and it says what it was given
FAKE = r"""#!/usr/bin/env bash
tool=$2
while [ "$1" != mhc.bench.sanitize ]; do options="$options $1"; shift; done
op=$2
echo "========= COMPUTE-SANITIZER"
[ $op = table_build ] && echo "========= Error: the target was terminated" && exit 255
echo "op $op H $3 T $4 kernels $MHC_KERNELS caching $PYTORCH_NO_CUDA_MEMORY_CACHING options$options"
summary() {
    if [ $tool = memcheck ]; then echo "========= ERROR SUMMARY: $1 error$([ $1 = 1 ] || echo s)"
    else echo "========= RACECHECK SUMMARY: $1 hazards displayed ($1 errors, 0 warnings)"; fi
}
case $op in
    post_pre) summary 22; exit 1 ;;
    post) summary 1; exit 1 ;;
    head) sleep 60 & echo $! > PIDS; wait ;;
    pre) echo "Traceback"; echo "RuntimeError: no such kernel"; summary 0; exit 1 ;;
    pre_from_table) echo "half way"; summary 0 ;;
    *) echo "the op ran"; summary 0 ;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command on a machine that says it has a GPU, with the stand-in on PATH; nothing is compiled."""
    script = tmp_path / "bin" / "compute-sanitizer"
    script.parent.mkdir()
    script.write_text(FAKE.replace("PIDS", str(tmp_path / "pid")))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(export.FOLDER, raising=False)

    def run(*options: str) -> int:
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(launch, "target", return_value={"kind": "cuda", "arch": "sm_90a"}),
            mock.patch.object(export, "export_kernels", return_value=[]) as exported,
        ):
            status = main(["bench", "sanitize", "--out", str(tmp_path / "logs"), *options])
        run.exported = exported.mock_calls  # type: ignore[attr-defined]
        return status

    return run


def rows(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], str]:
    """(op, tool) to verdict, out of the table."""
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["op", "tool", "verdict"]
    return {(op, tool): text for op, tool, text in (line.split(maxsplit=2) for line in lines[1:-1])}


def test_all_clean_exits_zero(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = ("pre_broadcast", "pre_noise_rows")
    assert fake("--ops", ",".join(ops), "--H", "320", "--T", "11") == 0
    counted = {"memcheck": "0 errors", "racecheck": "0 hazards"}
    assert rows(capsys) == {(op, tool): text for op in ops for tool, text in counted.items()}
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(
        f"{op}-{tool}.log" for op in ops for tool in TOOLS
    )
    log = (tmp_path / "logs" / "pre_noise_rows-racecheck.log").read_text()
    assert "op pre_noise_rows H 320 T 11" in log
    assert "--tool racecheck --racecheck-report all --check-exit-code no --print-limit 20 --error-exitcode 1" in log
    assert "caching 1 " in log
    ((_, (folder, *rest), _),) = fake.exported
    assert f"kernels {folder} " in log
    assert rest == [MHCConfig(320), 11, "sm_90a", os.cpu_count()]
    assert not folder.exists()
    monkeypatch.setenv(export.FOLDER, str(tmp_path))
    assert fake("--ops", "pre_broadcast") == 0
    assert fake.exported[0].args[0] == tmp_path  # a folder of exported kernels is used and stays


def test_every_end_is_a_row_and_the_table_goes_on(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ops = ("head", "post_pre", "post", "pre", "table_build", "pre_from_table", "pre_broadcast")
    started = time.perf_counter()
    assert fake("--ops", ",".join(ops), "--tools", "memcheck", "--limit-s", "1") == 1
    assert time.perf_counter() - started < 30
    assert rows(capsys) == {
        ("head", "memcheck"): "did not end in 1 s",
        ("post_pre", "memcheck"): "22 errors",
        ("post", "memcheck"): "1 error",
        ("pre", "memcheck"): "failed: RuntimeError: no such kernel",
        ("table_build", "memcheck"): "failed: ========= Error: the target was terminated",
        ("pre_from_table", "memcheck"): "failed: half way",
        ("pre_broadcast", "memcheck"): "0 errors",
    }
    assert ends(int((tmp_path / "pid").read_text())), "what a process started outlives its time limit"


def ends(pid: int) -> bool:
    """Whether a process is dead within five seconds, waited for by anybody or not."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_an_interrupt_kills_what_runs(tmp_path: Path) -> None:
    command = ["bash", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"]

    def interrupt(*_: Any) -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    wait = sanitize.subprocess.Popen.wait
    with (
        mock.patch.object(sanitize.subprocess.Popen, "wait", lambda self, *limit: interrupt() if limit else wait(self)),
        pytest.raises(KeyboardInterrupt),
    ):
        sanitize.watch(command, os.environ, tmp_path / "log", 60)
    assert ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        (f"{RAN}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, ("0 hazards", True)),
        (
            f"{RAN}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            1,
            (f"failed: {RAN}", False),
        ),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", 1, ("1 hazard", False)),
        ("a\nKilled: too much\n========= RACECHECK SUMMARY: 0 hazards", 1, ("failed: Killed: too much", False)),
        ("the tool said nothing", 0, ("failed: the tool said nothing", False)),
        ("", -9, ("failed: exit status -9", False)),
    ],
)
def test_verdicts(output: str, status: int, expected: tuple[str, bool]) -> None:
    assert verdict(TOOLS["racecheck"], output, status) == expected


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--ops", "pre,prost"], "--ops must be of pre_broadcast, .*, got 'prost'"),
        (["--tools", "initcheck"], "--tools must be of memcheck, racecheck, got 'initcheck'"),
        (["--T", "0"], "--T must be at least 1, got 0"),
        (["--limit-s", "0"], "--limit-s must be above 0, got 0"),
        (["--H", "65"], "hidden_size must be a positive multiple of 64, got 65"),
    ],
)
def test_bad_options_are_one_sentence(wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sanitize", *wrong]) == 1
    assert re.fullmatch(f"mhc bench sanitize: {says}\n", capsys.readouterr().err)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert main(["bench", "sanitize"]) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err


def test_the_sanitizer_is_found_on_path_in_the_toolkit_or_beside_nvcc_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(importlib.metadata, "files", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    with pytest.raises(RuntimeError, match=r"neither on PATH nor beside nvcc: `pip install .* or set CUDA_HOME"):
        sanitize.find_sanitizer()

    def program(*parts: str) -> str:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
        return str(path)

    wheel = SimpleNamespace(name="compute-sanitizer", locate=lambda: program("wheel", "bin", "compute-sanitizer"))
    with mock.patch.object(importlib.metadata, "files", return_value=[wheel]):
        assert sanitize.find_sanitizer() == wheel.locate()
    beside = program("toolkit", "bin", "compute-sanitizer")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "nvcc").symlink_to(program("toolkit", "bin", "nvcc"))
    assert sanitize.find_sanitizer() == beside
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    of_home = program("other", "compute-sanitizer", "compute-sanitizer")
    assert sanitize.find_sanitizer() == of_home
    on_path = program("path", "compute-sanitizer")
    assert sanitize.find_sanitizer() == on_path


@pytest.mark.parametrize("op", OPS)
def test_an_op_can_be_called(op: str) -> None:
    """On the CPU, where an op is the reference; it refuses the same arguments."""
    out = call(op, MHCConfig(64), 9, "cpu")
    tensors = out.tensors if isinstance(out, mhc.TokenTable) else [out] if isinstance(out, torch.Tensor) else out
    tokens = 14 if op == "pre_noise_rows" else 9  # two blocks of 7
    assert all(tensor.shape[0] == tokens and tensor.isfinite().all() for tensor in tensors if tensor is not None)


def kind(name: str, *args: Any) -> tuple[Any, ...]:
    """A kernel without what is no code of its own: sizes, tile, clusters, norm and the dtype of ids."""
    forms = {"fused": args[-1:], "quad": args[-1:], "streams": args[-1:], "gather": args[2:3], "post": args[2:3]}
    return name, *forms.get(name, ())


@pytest.mark.parametrize("hidden", [64, 4096])
def test_the_ops_reach_every_kind_of_kernel_and_all_are_compiled_before(hidden: int) -> None:
    config, launched = MHCConfig(hidden), set()

    def note(device: int, *kernel: Any) -> Callable[..., None]:
        launched.add(kernel)
        return lambda *tensors: None

    direct = mock.Mock(return_value=True)  # as if the CPU tensors were on a GPU
    with (
        mock.patch.object(launch, "kernel", note),
        mock.patch("mhc.ops._direct", direct),
        mock.patch("mhc.table._direct", direct),
    ):
        for op in OPS:
            call(op, config, 9, "cpu")
    ahead = launch.reachable(config, 9)
    assert launched <= set(ahead)
    assert {kind(*kernel) for kernel in launched} == {kind(*kernel) for kernel in ahead}
