"""Offline sets: what is kept, what is left out, and that the cut parts unpack to the same tree."""

import subprocess
import zipfile

import pytest

from mhc.bench import peers, wheels


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_parts_unpack_to_the_slim_tree(tmp_path, monkeypatch):
    random = bytes(i * i % 251 for i in range(3000))
    files = {
        "tilelang/__init__.py": "x = 1",
        "tilelang/3rdparty/composable_kernel/a.hpp": "amd",
        "tilelang/3rdparty/cutlass/include/b.hpp": random,
        "z3/lib/libz3.so": "copy",
        "z3/lib/libz3.so.4.15": "z3",
        "z3-4.data/data/bin/z3": "tool",
        "tilelang/stubs.pyi": "",
    }
    site, out = tmp_path / "site", tmp_path / "out"
    wheels.unpack(wheel(tmp_path / "a.whl", files), site)
    for folder in ("tilelang", "z3"):
        assert (site / folder).exists()
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)  # the fake libraries cannot be stripped
    wheels.slim(site)
    parts = wheels.pack(site, out, part_mib=1)
    target = tmp_path / "host"
    subprocess.run(wheels.install_line(parts, str(target)), shell=True, check=True)
    found = {str(p.relative_to(target)) for p in target.rglob("*") if not p.is_dir()}
    assert found == {
        "tilelang/__init__.py",
        "tilelang/3rdparty/cutlass/include/b.hpp",
        "z3/lib/libz3.so",
        "z3/lib/libz3.so.4.15",
    }
    assert (target / "z3/lib/libz3.so").read_text() == "z3"


def test_a_set_larger_than_a_part_is_cut(tmp_path):
    out, whole = tmp_path / "out", tmp_path / "site.txz"
    out.mkdir()
    whole.write_bytes(bytes(i * 7919 // 8 % 256 for i in range(500)))
    parts = list(wheels._cut(whole, out, 200))
    assert [p.relative_to(out).as_posix() for p in parts] == [
        "a/site.txz.00",
        "b/site.txz.01",
        "c/site.txz.02",
    ]
    assert b"".join(p.read_bytes() for p in parts) == whole.read_bytes()


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("vllm/model_executor/kernels/mhc/tilelang.py", True),
        ("vllm/third_party/deep_gemm/include/cute/config.hpp", True),
        ("vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so", True),
        ("vllm/third_party/deep_gemm/_C.cpython-311-x86_64-linux-gnu.so", False),
        ("vllm/_C_stable_libtorch.abi3.so", False),
        ("vllm/models/deepseek_v4/nvidia/dspark.py", False),
        ("vllm-0.26.0.dist-info/METADATA", True),
    ],
)
def test_what_is_taken_of_vllm(name, kept):
    assert wheels.keep_vllm(name, "3.12") is kept


def test_bad_requests(tmp_path):
    with pytest.raises(ValueError, match="which must be one of ours, peers"):
        wheels.build("theirs", tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        wheels.build("ours", tmp_path / "full")


def test_an_absent_peer_says_what_is_missing():
    if peers.importlib.util.find_spec("vllm"):
        pytest.skip("vllm is installed")
    with pytest.raises(peers.Absent, match="bench wheels peers"):
        peers.vllm()
