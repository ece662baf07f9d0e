"""Small notebooks made in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output


def notebook(*cells: NotebookNode) -> NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=list(cells), metadata={"kernelspec": kernel})


def markdown(text: str) -> NotebookNode:
    return new_markdown_cell(text)


def code(source: str, outputs: list[dict[str, Any]] | None = None, **metadata: Any) -> NotebookNode:
    """A code cell; `outputs` are display data, mimetype to content."""
    shown = [new_output("display_data", data=data) for data in outputs or []]
    return new_code_cell(source, metadata=metadata, outputs=shown)


def write(folder: Path, name: str, node: NotebookNode) -> Path:
    path = folder / f"{name}.ipynb"
    nbformat.write(node, path)
    return path
