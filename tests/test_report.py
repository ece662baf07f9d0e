"""`mhc.report`: what a reviewer opens is one offline page whose maths is rendered and whose verdicts are true."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from notebook_tools import code, markdown, notebook, write

from mhc.__main__ import COMMANDS, main
from mhc.report import CLAIM_MIME, RECORD_MIME, WIDGET_MIME, Notebook, claim, execute, recorded
from mhc.report_html import render

FIRST = notebook(
    markdown("# Folding $W$\n\nSee [the change](https://example.org/pull/1) and `$HOME`."),
    code("N = 1000", nbmake={"mock": {"N": 3}}),
    markdown(
        "## Claim 1: the fold\n\n$$x W_b^\\top = \\mathrm{flat}(r)\\,W^\\top \\tag{1}$$\n\n"
        "\\begin{align} a &= \\sqrt{\\frac{1}{H}\\sum_h x_h^2} \\\\ b &= \\mathbb{E}[\\|x\\|_2] \\end{align}"
    ),
    code("import matplotlib.pyplot as plt\nfrom mhc import plots\nplots.style()\nplt.plot(range(N))\nplt.show()"),
    code("import pandas as pd\npd.DataFrame({'T': [1], 'time_us': [1.5]})"),
    code("from mhc import report\nreport.claim(claim='$a_b$ is N', value=f'{N}', source='this run', holds=N > 0)"),
    code("'a slider'", tags=["interactive"]),
)
SECOND = notebook(
    markdown("# Second notebook\n\n## Its section"),
    code("from mhc import report\nreport.claim(claim='two is one', value=0.5, source='this run', holds=2 == 1)"),
    code("print('ran on')"),
)
# what may not be left once code is taken out: a TeX command or a maths dollar
RAW_TEX = re.compile(r"\\[a-zA-Z]+|\$[^$\s][^$<]*\$")


def text_of(page: str) -> str:
    return re.sub(r"<(pre|code|style)\b.*?</\1>", "", page, flags=re.S)


def rendered(*cells: object) -> str:
    return render([Notebook("01_made", notebook(*cells))])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, str]:
    """Both notebooks through the command line, kernels and all: exit status, folder, page."""
    folder = tmp_path_factory.mktemp("report")
    paths = [str(write(folder, "01_first", FIRST)), str(write(folder, "02_second", SECOND))]
    status = main(["report", *paths, "--out", str(folder / "build"), "--small"])
    return status, folder, (folder / "build" / "report.html").read_text(encoding="utf-8")


def test_page_is_one_offline_file(built):
    _, folder, page = built
    assert [path.name for path in (folder / "build").iterdir() if path.suffix != ".ipynb"] == ["report.html"]
    assert not re.search(r"<script|<link|<iframe|@import|\b(src|href)=[\"']?(https?:)?//", page, re.I)
    assert "url(data:font/woff2;base64," in page
    assert 'src="data:image/png;base64,' in page
    assert "example.org/pull/1" in page  # a link is spelled out


def test_every_formula_is_mathml(built):
    page = built[2]
    assert not RAW_TEX.search(text_of(page)), RAW_TEX.search(text_of(page))
    assert page.count('<math display="block"') == 2
    assert "<msqrt>" in page
    assert "<code>$HOME</code>" in page


def test_contents_lists_every_notebook(built):
    contents = re.search(r"<nav>(.*?)</nav>", built[2], re.S)[1]
    assert re.findall(r'class="h1" href="#([^"]+)"', contents) == ["top", "01_first-1", "02_second-1"]
    assert "Its section" in contents
    for anchor in re.findall(r'href="#([^"]+)"', built[2]):
        assert f'id="{anchor}"' in built[2]


def test_false_claim_fails_the_report_and_the_rest_still_runs(built):
    status, _, page = built
    assert status == 1
    assert "1 of 2 claims hold; 1 failed cells" in page
    assert "ran on" in page
    table = re.search(r'<table class="claims">(.*?)</table>', page, re.S)[1]
    assert re.findall(r">(holds|fails)</a>", table) == ["holds", "fails"]
    assert "<math>" in table  # maths in the table, too


def test_small_sizes_are_applied_and_said(built):
    page = built[2]
    assert "run at the small sizes" in page
    assert "<p>3</p>" in page  # the claim's value is N


def test_sliders_are_left_out_and_code_is_folded(built):
    page = built[2]
    assert "a slider" not in page
    assert "<details open" not in page
    assert page.count("<details>") == 6


def test_sources_are_not_touched(built):
    folder = built[1]
    assert not json.loads((folder / "01_first.ipynb").read_text())["cells"][3]["outputs"]
    assert json.loads((folder / "build" / "01_first.ipynb").read_text())["cells"][3]["outputs"]


def test_provenance_is_in_the_head(built):
    head = re.search(r"<header.*?</header>", built[2], re.S)[0]
    for text in ("commit", "built", version("torch"), "tilelang", "CPU", "GPU", "01_first"):
        assert text in head


def test_good_claims_exit_zero(tmp_path):
    path = write(tmp_path, "01_good", notebook(markdown("# Good"), code("assert True")))
    assert main(["report", str(path), "--out", str(tmp_path / "build")]) == 0


def test_bad_tex_fails_the_command_without_a_page(tmp_path, capsys):
    path = write(tmp_path, "01_bad", notebook(markdown(r"# Bad $\frac{1}$")))
    assert main(["report", str(path), "--out", str(tmp_path / "build")]) == 1
    assert "not valid TeX" in capsys.readouterr().err
    assert not (tmp_path / "build" / "report.html").exists()


def test_dead_kernel_and_time_limit_are_failures_not_crashes(tmp_path, capsys):
    node = notebook(markdown("# Slow"), code("import time\ntime.sleep(60)"), code("1"))
    executed = execute(write(tmp_path, "01_slow", node), timeout_s=2)
    assert "did not run" in executed.failures[0]
    assert "2/3" in capsys.readouterr().out


@pytest.mark.parametrize("tex", [r"$\frac{1}$", r"$$\nosuchcommand x$$", r"$\begin{aligned} a & b \end{align}$"])
def test_bad_tex_is_an_error_naming_the_formula(tex):
    with pytest.raises(ValueError, match=r"01_made: the formula .* is not valid TeX"):
        rendered(markdown(f"# Title\n\n{tex}"))


@pytest.mark.parametrize("tex", [r"\begin{align} a & b \end{aligned}", r"an open $\frac{1}{2}", r"$$ x"])
def test_tex_that_no_formula_took_is_an_error(tex):
    with pytest.raises(ValueError, match="01_made: TeX outside of any formula"):
        rendered(markdown(f"# Title\n\n{tex}"))


@pytest.mark.parametrize(
    "html",
    [
        "<script>1</script>",
        '<img src="https://example.org/a.png">',
        "<img src=//example.org/a.png>",
        '<link rel="stylesheet" href="a.css">',
        "<style>@import 'a.css'</style>",
        "<p style='background: url(a.png)'>",
    ],
)
def test_output_that_would_load_something_is_an_error(html):
    with pytest.raises(ValueError, match="must load nothing"):
        rendered(code("show()", [{"text/html": html}]))


def test_outputs_without_a_static_form_are_dropped():
    page = rendered(code("bar()", [{WIDGET_MIME: {}, "text/plain": "0%| stale bar"}]))
    assert "stale bar" not in page


def test_records_are_listed_once_with_the_state_of_the_kernels():
    run = {"file": "a.jsonl", "gpu": "NVIDIA H200", "started": "2026-01-01", "git": "0" * 40, "dirty": True}
    cells = [code("recorded()", [{RECORD_MIME: run, "text/markdown": "*recorded*"}]) for _ in range(2)]
    table = re.search(r'<table class="records">(.*?)</table>', rendered(*cells), re.S)[1]
    assert table.count("a.jsonl") == 1
    assert "NVIDIA H200" in table
    assert "with changes" in table
    assert "unknown commit" in table


def test_recorded_returns_the_run_line(tmp_path):
    run = {"record": "run", "gpu": "G", "host_cpu": "C", "started": "2026-01-01T00", "git": "abcdef012", "dirty": False}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(run) + "\n")
    assert recorded(path)["gpu"] == "G"
    path.write_text('{"record": "point"}\n')
    with pytest.raises(ValueError, match="first line is a run"):
        recorded(path)


def test_claim_shows_and_then_raises(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    claim(claim="a", value=1 / 3, source="here", holds=np.bool_(True))
    with pytest.raises(AssertionError, match="does not hold: b 2"):
        claim(claim="b", value="2", source="here", holds=False)
    assert [data[CLAIM_MIME]["holds"] for data in shown] == [True, False]
    assert shown[0][CLAIM_MIME]["value"] == "0.333"


@pytest.mark.parametrize(
    ("change", "named"),
    [({"holds": torch.tensor(True)}, "holds"), ({"holds": 1}, "holds"), ({"source": " "}, "source")],
)
def test_claim_refuses(change, named):
    with pytest.raises(ValueError, match=named):
        claim(**{"claim": "a", "value": "1", "source": "here", "holds": True} | change)


def test_command_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.ipynb")]) == 2
    assert main(["no-such-command"]) == 2
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    assert f"python -m mhc {name}" in capsys.readouterr().out
