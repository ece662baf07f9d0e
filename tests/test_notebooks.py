"""Hygiene of `notebooks/*.ipynb`: output-free, reviewable, closed by checks. `pytest --nbmake notebooks` runs them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from notebook_tools import code, markdown, notebook

from mhc.report import Notebook
from mhc.report_html import render

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
FIRST_CELL = ("question", "answer", "run time", "needs a gpu")


def faults(text: str) -> list[str]:
    """What is wrong with a notebook's JSON, one line a fault."""
    node = nbformat.reads(text, as_version=4)
    raw, found = json.loads(text), []
    if raw["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("kernelspec.name must be python3")
    if "widgets" in raw["metadata"]:
        found.append("stored widget state")
    code_cells = [cell for cell in node.cells if cell.cell_type == "code"]
    if any(cell.outputs or cell.execution_count is not None for cell in code_cells):
        found.append("stored outputs or execution counts: jupyter nbconvert --clear-output --inplace notebooks/*.ipynb")
    if len({cell["id"] for cell in node.cells}) != len(node.cells):
        found.append("cell ids repeat")
    first = node.cells[0].source.lower() if node.cells else ""
    found += [f"the first cell does not say {word!r}" for word in FIRST_CELL if word not in first]
    if not node.cells or node.cells[0].cell_type != "markdown" or not first.startswith("# "):
        found.append("the first cell must be Markdown that begins with the title")
    if not code_cells or node.cells[-1] is not code_cells[-1] or not has_assert(code_cells[-1].source):
        found.append("the last cell must be the checks: code with an assert")
    # interact and nbclient now and then wait for each other: a slider runs in JupyterLab, its static twin here
    tags = [set(cell.metadata.get("tags", [])) for cell in code_cells]
    if any("interactive" in cell and "skip-execution" not in cell for cell in tags):
        found.append("an interactive cell must also be tagged skip-execution")
    mocked = {name for cell in code_cells for name in cell.metadata.get("nbmake", {}).get("mock", {})}
    source = "\n".join(cell.source for cell in code_cells)
    found += [f"nbmake.mock sets {name}, which no cell defines" for name in mocked if f"{name} = " not in source]
    return found


def has_assert(source: str) -> bool:
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse("\n".join(lines))))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_hygiene(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_formula_converts(path):
    render([Notebook(path.stem, nbformat.read(path, as_version=4))])  # raises on TeX that does not parse


def test_notebooks_are_found_and_numbered():
    assert NOTEBOOKS
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) for path in NOTEBOOKS)
    assert len({path.stem[:2] for path in NOTEBOOKS}) == len(NOTEBOOKS)


def good() -> nbformat.NotebookNode:
    head = markdown("# T\n\n**Question:** a\n**Answer:** b\n**Run time:** 1 s\n**Needs a GPU:** no")
    return notebook(head, code("N = 3", nbmake={"mock": {"N": 1}}), code("%matplotlib inline\nassert N"))


def test_a_good_notebook_has_no_faults():
    assert faults(nbformat.writes(good())) == []


@pytest.mark.parametrize(
    ("break_it", "fault"),
    [
        (lambda nb: nb.metadata.kernelspec.update(name="mhc"), "kernelspec"),
        (lambda nb: nb.metadata.update(widgets={}), "widget state"),
        (lambda nb: nb.cells[1].update(outputs=[nbformat.v4.new_output("stream", text="1")]), "outputs"),
        (lambda nb: nb.cells[1].update(execution_count=1), "execution counts"),
        (lambda nb: nb.cells[0].update(source="# T\n\nquestion answer run time"), "needs a gpu"),
        (lambda nb: nb.cells.append(markdown("end")), "checks"),
        (lambda nb: nb.cells[-1].update(source="# assert nothing"), "checks"),
        (lambda nb: nb.cells[1].metadata.update(tags=["interactive"]), "skip-execution"),
        (lambda nb: nb.cells[1].metadata.update(nbmake={"mock": {"M": 1}}), "nbmake.mock sets M"),
    ],
)
def test_each_fault_is_found(break_it, fault):
    node = good()
    break_it(node)
    assert fault in " ".join(faults(nbformat.writes(node)))
