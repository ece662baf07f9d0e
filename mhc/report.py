"""Execute the notebooks at full size and render one self-contained build/report.html.

Every cell runs, also after an error; the exit status is 1 when a cell failed or a claim does not hold.
Notebooks state what they found with `claim` and name the record they replay with `recorded`; both end up in the
report's head.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbformat import NotebookNode

CLAIM_MIME = "application/x-mhc-claim+json"
RECORD_MIME = "application/x-mhc-record+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


def claim(*, claim: str, value: str | float, source: str, holds: bool) -> None:
    """State one finding: shown where the cell stands and in the report's table of claims.

    Call it last in a cell, after the figure that shows the finding.

    Args:
        claim: one sentence, Markdown with `$TeX$`.
        value: the number behind it with its unit, Markdown; a bare float is shown to three digits.
        source: where the number comes from: "this run, CPU", "exact arithmetic", a record's name.
        holds: whether the number bears the claim out; computed, never written down.

    Raises:
        AssertionError: it does not hold. Raised after the display, so that the notebook and the report both fail.
        ValueError: an empty text, or `holds` is not a bool (an unfinished comparison of tensors, say).
    """
    from IPython.display import display

    shown = f"{value:.3g}" if isinstance(value, float) else str(value)
    for name, text in (("claim", claim), ("value", shown), ("source", source)):
        if not text.strip():
            raise ValueError(f"{name} must be a text, got {text!r}")
    if type(holds).__name__ not in ("bool", "bool_"):  # numpy's bool is one too
        raise ValueError(f"holds must be a bool, got {type(holds).__name__} {holds!r}")
    verdict = "holds" if holds else "DOES NOT HOLD"
    content = {"claim": claim, "value": shown, "source": source, "holds": bool(holds)}
    display(
        {
            CLAIM_MIME: content,
            "text/markdown": f"**Claim {verdict}.** {claim} **{shown}** ({source})",
            "text/plain": f"claim {verdict}: {claim} {shown} ({source})",
        },
        raw=True,
    )
    if not holds:
        raise AssertionError(f"claim does not hold: {claim} {shown}")


def recorded(path: str | Path) -> dict[str, Any]:
    """Read the run line of a record, display where and when it was recorded, and return it.

    Args:
        path: a JSONL record whose first line is `{"record": "run", ...}`.

    Raises:
        ValueError: the first line is no run line.
        OSError: the file cannot be read.
    """
    from IPython.display import display

    from mhc.bench.records import caption

    path = Path(path)
    with path.open() as file:
        run = json.loads(file.readline() or "null")
    if not isinstance(run, dict) or run.get("record") != "run":
        raise ValueError(f"path must name a record whose first line is a run, got {path}")
    text = caption(run)
    display(
        {RECORD_MIME: {"file": path.name} | run, "text/markdown": f"*{text} ({path.name})*", "text/plain": text},
        raw=True,
    )
    return run


@dataclass
class Notebook:
    """An executed notebook: its cells with outputs, what failed, and how long it took."""

    name: str
    node: NotebookNode
    time_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def displayed(self, mime: str) -> list[dict[str, Any]]:
        """Every output of one mimetype, in order."""
        outputs = [output for cell in self.node.cells for output in cell.get("outputs", [])]
        return [output["data"][mime] for output in outputs if mime in output.get("data", {})]


def execute(
    path: Path, *, small: bool = False, first_cell: str = "", stop_on_error: bool = False, timeout_s: int = 1800
) -> Notebook:
    """Run a notebook in its own folder, with a line of progress a cell.

    Args:
        path: the .ipynb; it is read, never written.
        small: apply each cell's `nbmake.mock`, as `make test` does.
        first_cell: code to run before the notebook's own cells.
        stop_on_error: False runs the cells after a failed one, too.
        timeout_s: limit for one cell; the notebook stops there.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    node = nbformat.read(path, as_version=4)
    if first_cell:
        node.cells.insert(0, nbformat.v4.new_code_cell(first_cell))
    if small:
        for cell in node.cells:
            mocks = cell.metadata.get("nbmake", {}).get("mock", {})
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in mocks.items())
    notebook = Notebook(path.stem, node)
    started = time.perf_counter()
    progress = _Progress(node)
    client = NotebookClient(
        node,
        timeout=timeout_s,
        kernel_name="python3",
        allow_errors=not stop_on_error,
        coalesce_streams=True,
        extra_arguments=["--log-level=40"],  # ipykernel 7 warns of loopback TCP in every kernel
        resources={"metadata": {"path": str(path.resolve().parent)}},
        on_cell_execute=progress.start,
        on_cell_executed=progress.done,
    )
    try:
        client.execute()
    except CellExecutionError:
        pass  # stop_on_error; the cell's output tells below
    except (CellTimeoutError, DeadKernelError) as error:
        text = str(error).strip().splitlines()[0]
        print(f" {text}")
        notebook.failures.append(f"{path.stem}: {text}; the cells after it did not run")
    notebook.time_s = time.perf_counter() - started
    for index, cell in enumerate(node.cells):
        if "raises-exception" in cell.metadata.get("tags", []):  # shown on purpose
            continue
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                text = f"{output.ename}: {output.evalue}".splitlines()[0]
                notebook.failures.append(f"{path.stem}, cell {index} ({progress.titles[index]}): {text}")
    return notebook


class _Progress:
    """One line a cell: where it is while it runs, then what it took."""

    def __init__(self, node: NotebookNode) -> None:
        self.titles, title = [], "start"
        for cell in node.cells:
            if cell.cell_type == "markdown" and (heading := re.search(r"^#+ +(.+)", cell.source, re.M)):
                title = heading[1].strip()
            self.titles.append(title)
        self.count = len(node.cells)
        self.clock = 0.0

    def start(self, cell: NotebookNode, cell_index: int) -> None:
        self.clock = time.perf_counter()
        print(f"  {cell_index + 1:3}/{self.count}  {self.titles[cell_index][:72]:72}", end="", flush=True)

    def done(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        failed = "" if execute_reply["content"]["status"] == "ok" else "  FAILED"
        print(f" {time.perf_counter() - self.clock:7.1f} s{failed}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m mhc report`."""
    parser.add_argument("notebooks", nargs="*", type=Path, help="the .ipynb files (default: notebooks/*.ipynb)")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder to write into (default: build)")
    parser.add_argument("--small", action="store_true", help="the sizes of `make test`: a quick look, not the report")
    parser.add_argument("--timeout-s", type=int, default=1800, help="limit for one cell in seconds (default: 1800)")


def run(args: argparse.Namespace) -> int:
    """Execute, render, and say what failed; 1 if anything did."""
    paths = args.notebooks or sorted(Path("notebooks").glob("*.ipynb"))
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        print(f"mhc report: no notebook {', '.join(missing) or 'in ./notebooks'}: run it at the project's root")
        return 2
    try:
        import nbformat

        from mhc.provenance import provenance
        from mhc.report_html import render
    except ModuleNotFoundError as error:
        print(f"mhc report: {error.name} is not installed: pip install 'mhc[report]', or make report")
        return 2

    args.out.mkdir(parents=True, exist_ok=True)
    page = args.out / "report.html"
    page.unlink(missing_ok=True)  # a run that fails leaves no older page behind
    notebooks = []
    for path in paths:
        print(f"{path}", flush=True)
        notebooks.append(execute(path, small=args.small, timeout_s=args.timeout_s))
        nbformat.write(notebooks[-1].node, args.out / path.name)
    try:
        html = render(notebooks, small=args.small)
    except ValueError as error:  # bad TeX, or an output that would load something
        print(f"mhc report: {error}", file=sys.stderr)
        return 1
    page.write_text(html, encoding="utf-8")

    claims = [item for notebook in notebooks for item in notebook.displayed(CLAIM_MIME)]
    failures = [failure for notebook in notebooks for failure in notebook.failures]
    holding = sum(item["holds"] for item in claims)
    print(f"{page}: {len(html) / 1024:.0f} KiB, {holding} of {len(claims)} claims hold, {len(failures)} cells failed")
    for failure in failures:
        print(f"  {failure}", file=sys.stderr)
    for record in provenance([item for notebook in notebooks for item in notebook.displayed(RECORD_MIME)])["records"]:
        if record["kernels"] != "as recorded":
            print(f"  {record['file']} is no record of today's kernels: {record['kernels']}", file=sys.stderr)
    return 1 if failures or holding < len(claims) else 0
