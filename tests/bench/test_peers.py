"""vLLM without its compiled ops, on a machine where importing anything of it imports them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mhc
from mhc.bench import executor

FILES = {
    "__init__.py": "import vllm.platform",
    "platform.py": "import vllm._C_stable_libtorch",
    "utils/deep_gemm.py": "is_deep_gemm_supported = lambda: False",
    "model_executor/kernels/mhc/tilelang.py": "",
    "model_executor/kernels/mhc/tilelang_kernels.py": "",
}
STUB = "vllm._C_stable_libtorch"


@pytest.fixture
def site(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def answer(site):
    """Why vLLM is absent in a process that sees `site`, and what stands in for its ops there."""
    script = """
import sys
from mhc.bench import peers
try:
    peers.vllm()
except peers.Absent as absent:
    print(absent, getattr(sys.modules[peers.VLLM_OPS], "__file__", None), sep="|")
"""
    path = os.pathsep.join([str(site), str(Path(mhc.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().split("|")


def test_absent_ops_are_stubbed_before_vllm_is_imported(site):
    reason, file = answer(site)
    assert "DeepGEMM does not load" in reason  # the last thing that is looked at
    assert file == "None"


def test_ops_that_are_there_are_used(site):
    ops = site / "vllm" / "_C_stable_libtorch.py"
    ops.touch()
    assert answer(site)[1] == str(ops)


@pytest.mark.parametrize("there", [True, False])
def test_a_record_says_what_was_a_stub(site, there):
    if there:
        (site / "vllm" / "_C_stable_libtorch.py").touch()
    remote = executor.Remote(seed=0, vocab=16, site=[str(site)])
    try:
        assert (STUB in remote.versions()) is not there
    finally:
        remote.close()
