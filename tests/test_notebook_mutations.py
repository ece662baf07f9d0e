"""A notebook that passes on a broken package proves nothing: run each with faults put in, demand an assertion error.

The faults are in `notebook_mutations.py`. Notebooks run at the small sizes of `make test`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_mutations import MUTATIONS, WRONG_FOLD
from notebook_tools import code, notebook, write

from mhc.report import Notebook, execute

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def caught(executed: Notebook) -> bool:
    """Whether an assertion failed first: a crash in the mutation itself or in a cell's code proves nothing."""
    errors = [
        (index, output.ename)
        for index, cell in enumerate(executed.node.cells)
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    return bool(errors) and errors[0][0] > 0 and errors[0][1] == "AssertionError"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.notebook}-{mutation.name}")
def test_notebook_catches(mutation):
    (path,) = NOTEBOOKS.glob(f"{mutation.notebook}_*.ipynb")
    executed = execute(path, small=True, first_cell=mutation.source, timeout_s=300, stop_on_error=True)
    assert caught(executed), executed.failures or "it passed"


def test_every_notebook_has_a_mutation():
    assert {path.name[:2] for path in NOTEBOOKS.glob("*.ipynb")} <= {mutation.notebook for mutation in MUTATIONS}


TOY = notebook(
    code("import torch, mhc\nfn = torch.randn(8, 4 * 16)"),
    code("assert torch.allclose(mhc.fold(fn, 4), fn.view(8, 4, 16).sum(1), atol=1e-5)"),
)


def test_the_mechanism_catches_a_wrong_fold(tmp_path):
    path = write(tmp_path, "01_toy", TOY)
    assert execute(path).failures == []
    assert caught(execute(path, first_cell=WRONG_FOLD, stop_on_error=True))


def test_the_mechanism_does_not_take_a_crash_for_a_catch(tmp_path):
    path = write(tmp_path, "01_toy", TOY)
    assert not caught(execute(path, first_cell="import mhc\nmhc.fold = None", stop_on_error=True))
    assert not caught(execute(path, first_cell="assert False", stop_on_error=True))
