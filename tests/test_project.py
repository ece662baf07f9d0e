"""The project's own files: documents name what exists, versions live in one place, files stay short."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mhc.bench.records import find
from mhc.plots import streams_svg

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
README = (ROOT / "README.md").read_text()

MAX_LINES = 320
# one machine's folders, and hosts that a user's own package settings must be free to replace
FORBIDDEN = {
    "a folder of one machine": re.compile(r"(?<![\w./$}-])/(?:home|root|Users|work)/"),
    "a package registry's host": re.compile(
        r"\b(?:pypi|npmjs|pythonhosted|crates|deb\.debian|conda\.anaconda)\.(?:org|com|io)\b"
    ),
}
BINARY = {".safetensors", ".png", ".npz", ".woff2"}


@cache
def tracked() -> list[Path]:
    """The files in git, or every file outside of ignored folders where there is no git."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0") if done.returncode == 0 else []
    found = [ROOT / name for name in names if name] or [
        path
        for path in ROOT.rglob("*")
        if not any(part.startswith((".venv", "build", ".git")) for part in path.relative_to(ROOT).parts)
    ]
    return [path for path in found if path.is_file() and path.suffix not in BINARY]


def extra(name: str) -> list[Requirement]:
    """An extra's requirements, with `mhc[other]` followed."""
    found = []
    for requirement in map(Requirement, PYPROJECT["optional-dependencies"][name]):
        if requirement.name == "mhc":
            found += [item for other in sorted(requirement.extras) for item in extra(other)]
        else:
            found.append(requirement)
    return found


def readme_paths(text: str) -> set[str]:
    """What looks like a path: link targets, and code spans with a slash or a known suffix and nothing else in them."""
    links = re.findall(r"\]\(([^)#\s]+)\)|src=\"([^\"]+)\"", text)
    spans = re.findall(r"`([\w.-]+(?:/[\w.*-]*)+|[\w-]+\.(?:py|ipynb|md|yml|toml|txt))`", text)
    found = {target for pair in links for target in pair if target} | set(spans)
    return {path for path in found if not re.match(r"https?:|mailto:|build/|\.venv", path)}


@pytest.mark.parametrize("path", sorted(readme_paths(README)))
def test_readme_names_what_exists(path):
    assert list(ROOT.glob(path.rstrip("/"))), f"README.md names {path}, which does not exist"


def test_readme_paths_are_recognised():
    text = (
        '[a](docs/a.md) `mhc/ops.py` `env.yml` `notebooks/data/*.jsonl` `x / y` `build/report.html` <img src="f/p.svg">'
    )
    assert readme_paths(text) == {"docs/a.md", "mhc/ops.py", "env.yml", "notebooks/data/*.jsonl", "f/p.svg"}


def test_readme_make_targets_and_commands_exist():
    from mhc.__main__ import COMMANDS

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {a or b for a, b in re.findall(r"`make ([a-z-]+)`|^ +make ([a-z-]+)", README, re.M)}
    assert {"report", "test", "lab"} <= named <= targets
    assert set(re.findall(r"python -m mhc ([a-z][a-z0-9-]*)", README)) <= set(COMMANDS)


def test_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in example.splitlines() if line]) <= 10
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["streams"].shape == (7, 4, 4096)


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_no_file_names(kind):
    hits = []
    for path in tracked():
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            hits += [f"{path.relative_to(ROOT)}:{number}: {m[0]}" for m in FORBIDDEN[kind].finditer(line)]
    assert hits == []


def test_files_are_short():
    long = {}
    for path in tracked():
        if path.suffix == ".py":
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_LINES:
                long[str(path.relative_to(ROOT))] = lines
    assert long == {}


def test_env_yml_delegates_to_pyproject():
    env = yaml.safe_load((ROOT / "env.yml").read_text())
    (pip,) = [item["pip"] for item in env["dependencies"] if isinstance(item, dict)]
    plain = [item for item in env["dependencies"] if isinstance(item, str)]
    assert "pip" in plain
    (python,) = [item.split("=")[1] for item in plain if item.startswith("python")]
    assert SpecifierSet(PYPROJECT["requires-python"]).contains(f"{python}.0")
    (line,) = pip
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", line)[1].split(",")
    named = {item.name for name in extras for item in extra(name)} | {
        Requirement(item).name for item in PYPROJECT["dependencies"]
    }
    assert named >= {"torch", "tilelang", "vllm", "jupyterlab", "nbmake", "seaborn"}


def test_constraints_pin_what_the_cpu_setup_asks_for():
    pins = {pin.name.lower().replace("_", "-"): pin.specifier for pin in CONSTRAINTS}
    asked = [*map(Requirement, PYPROJECT["dependencies"]), *extra("test"), *extra("lab")]
    for requirement in asked:
        exact = [spec.version for spec in requirement.specifier if spec.operator == "=="]
        pin = pins.get(requirement.name.lower().replace("_", "-"))
        assert exact or pin, f"{requirement.name} has no pin"
        if pin is not None:
            (spec,) = pin
            assert spec.operator == "=="
            assert requirement.specifier.contains(spec.version), f"{requirement} does not admit {pin}"
    assert (str(pins["torch"]), str(pins["tilelang"])) == ("==2.13.0", "==0.1.12")
    assert "vllm" not in pins


def test_pins_admit_the_oldest_python():
    (oldest,) = [spec.version for spec in SpecifierSet(PYPROJECT["requires-python"]) if spec.operator == ">="]
    asked = {
        dist.metadata["Name"].lower().replace("_", "-"): dist.metadata["Requires-Python"] for dist in distributions()
    }
    pinned = {pin.name.lower().replace("_", "-") for pin in CONSTRAINTS}
    refusing = {n: asked[n] for n in pinned & asked.keys() if asked[n] and not SpecifierSet(asked[n]).contains(oldest)}
    assert refusing == {}
    assert len(pinned & asked.keys()) > 100


def test_readme_picture_is_what_the_code_draws():
    drawn = (ROOT / "notebooks" / "figures" / "streams.svg").read_text(encoding="utf-8")
    assert drawn == streams_svg(), "run python -m mhc.plots"


def test_package_data_is_declared():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mhc"]
    declared = {path for pattern in data for path in (ROOT / "mhc").glob(pattern)}
    assert declared >= {path for path in tracked() if path.is_relative_to(ROOT / "mhc") and path.suffix != ".py"}


def test_readme_says_whether_a_trained_pair_is_recorded():
    recorded = bool(find(ROOT / "notebooks" / "data", "gsm8k"))
    assert ("No trained pair is recorded yet" in README) != recorded
