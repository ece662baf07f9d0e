"""Executed notebooks to one HTML page: no script, nothing loaded, maths as MathML with its own font.

TeX is converted while rendering (`math-core`): a formula that does not parse fails the report instead of showing raw.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from fontTools import subset
from markupsafe import Markup
from math_core import LatexError, LatexToMathML
from nbconvert.filters import ansi2html
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from mhc.provenance import provenance
from mhc.report import CLAIM_MIME, RECORD_MIME, WIDGET_MIME, Notebook

# what the subset holds beyond the characters of the page's own formulas: radicals, accents and fences grow from these
STRETCHY = "√′″‴¯~^()[]{}|‖⟨⟩∑∏∫−ℎ" + "".join(map(chr, range(0x20, 0x7F)))
LOADED = re.compile(
    r"<script|<link|<iframe|\b(?:src|href)\s*=\s*[\"']?(?:https?:)?//|@import|url\(\s*[\"']?(?!data:)", re.I
)

# what unbalanced dollars or environments leave behind
RAW_TEX = re.compile(r"\\[A-Za-z]{2,}|\$\$")
CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.S)


def render(notebooks: Sequence[Notebook], *, small: bool = False) -> str:
    """The page, as text.

    Raises:
        ValueError: a formula is not valid TeX (the message names it), or an output would load something.
    """
    articles, contents, claims, records = [], [], [], []
    for notebook in notebooks:
        body = _Body(notebook)
        cells = [body.cell(cell) for cell in notebook.node.cells]
        articles.append({"cells": [cell for cell in cells if cell], "name": notebook.name, "time_s": notebook.time_s})
        contents.append({"name": notebook.name, "headings": body.renderer.headings})
        claims += body.claims
        records += [record | {"notebook": notebook.name} for record in notebook.displayed(RECORD_MIME)]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mhc"), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
        articles=articles,
        contents=contents,
        claims=claims,
        failures=[failure for notebook in notebooks for failure in notebook.failures],
        provenance=provenance(records),
        small=small,
        style=Markup(_style()),
    )
    page = page.replace("/* maths font */", _math_font(page))
    if found := LOADED.search(CODE.sub("", page)):
        raise ValueError(f"the report must load nothing, found {found.string[max(0, found.start() - 80) :][:200]!r}")
    return page


class _Markdown(IPythonRenderer):
    """Markdown to HTML, with MathML, one id a heading, and links spelled out (the page loads nothing)."""

    def __init__(self, prefix: str, attachments: dict[str, Any] | None = None, folder: str = "") -> None:
        super().__init__(escape=False, embed_images=True, attachments=attachments or {}, path=folder)
        self.prefix = prefix
        self.headings: list[dict[str, Any]] = []
        self.to_mathml = LatexToMathML(fancy_error=False, id_prefix=f"{prefix}-")

    def _math(self, tex: str, display: bool) -> str:
        try:
            # global state: equations are numbered through the notebook
            return self.to_mathml.convert_with_global_state(tex, displaystyle=display)
        except LatexError as error:
            raise ValueError(f"{self.prefix}: the formula {tex.strip()!r} is not valid TeX: {error}") from None

    def inline_math(self, body: str) -> str:
        return self._math(body, display=False)

    def block_math(self, body: str) -> str:
        # math-core numbers equations only inside an environment
        return self._math(rf"\begin{{equation}}{body}\end{{equation}}" if r"\tag" in body else body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return self._math(rf"\begin{{{name}}}{body}\end{{{name}}}", display=True)

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        anchor = f"{self.prefix}-{len(self.headings) + 1}"
        self.headings.append({"level": level, "anchor": anchor, "text": Markup(text)})
        return f'<h{level} id="{anchor}">{text}</h{level}>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if url.startswith("#"):
            return f'<a href="{html.escape(url)}">{text}</a>'
        bare = html.escape(re.sub(r"^https?://", "", url))
        return bare if re.sub(r"^https?://", "", text) == bare else f'{text} <span class="url">({bare})</span>'


class _Body:
    """The cells of one notebook, as HTML."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.renderer = _Markdown(notebook.name)
        self.claims: list[dict[str, Any]] = []

    def markdown(self, text: str) -> Markup:
        rendered = MarkdownWithMath(renderer=self.renderer).render(text)
        if raw := RAW_TEX.search(CODE.sub("", rendered)):
            raise ValueError(f"{self.notebook.name}: TeX outside of any formula, {raw[0]!r} in {text.strip()[:200]!r}")
        return Markup(rendered)

    def cell(self, cell: NotebookNode) -> dict[str, Any] | None:
        if cell.cell_type == "markdown":
            self.renderer.attachments = cell.get("attachments", {})
            return {"type": "markdown", "html": self.markdown(cell.source)}
        tags = cell.metadata.get("tags", [])
        # a slider is dead on paper: its static twin stands in the cell beside it
        if cell.cell_type != "code" or "interactive" in tags or not cell.source.strip():
            return None
        code = highlight(cell.source, get_lexer_by_name("ipython3"), HtmlFormatter(cssclass="highlight"))
        outputs = [shown for output in cell.outputs if (shown := self.output(output))]
        lines = cell.source.count("\n") + 1
        return {"type": "code", "html": Markup(code), "lines": lines, "outputs": outputs, "open": "show-code" in tags}

    def output(self, output: NotebookNode) -> Markup | None:
        if output.output_type == "stream":
            text = output.text.strip("\n")
            return Markup(f'<pre class="{output.name}">{ansi2html(text)}</pre>') if text.strip() else None
        if output.output_type == "error":
            return Markup(f'<pre class="error">{ansi2html(chr(10).join(output.traceback))}</pre>')
        data = output.data
        if CLAIM_MIME in data:
            return self.claim(data[CLAIM_MIME])
        if WIDGET_MIME in data:  # progress bars; a static page cannot show them
            return None
        if "image/svg+xml" in data:
            return Markup(f"<figure>{data['image/svg+xml']}</figure>")
        for mime in ("image/png", "image/jpeg"):
            if mime in data:
                return self.image(mime, data[mime], output.get("metadata", {}).get(mime, {}))
        if "text/html" in data:
            return Markup(f'<div class="table">{data["text/html"]}</div>')
        if "text/markdown" in data:
            return self.markdown(data["text/markdown"])
        if "text/latex" in data:  # sympy's
            return self.markdown(data["text/latex"])
        return Markup(f"<pre>{html.escape(data.get('text/plain', ''))}</pre>")

    def image(self, mime: str, content: str, size: dict[str, Any]) -> Markup:
        width = f' width="{size["width"]}"' if "width" in size else ""
        headings = self.renderer.headings
        alt = html.escape(re.sub(r"<[^>]*>", "", headings[-1]["text"] if headings else self.notebook.name))
        source = f"data:{mime};base64,{content.replace(chr(10), '')}"
        return Markup(f'<figure><img src="{source}"{width} alt="figure: {alt}"></figure>')

    def claim(self, claim: dict[str, Any]) -> Markup:
        anchor = f"{self.notebook.name}-claim-{len(self.claims) + 1}"
        text, value = self.markdown(claim["claim"]), self.markdown(claim["value"])
        where = self.renderer.headings[-1] if self.renderer.headings else {"text": self.notebook.name}
        self.claims.append(claim | {"anchor": anchor, "text": text, "shown": value, "where": where["text"]})
        verdict = "holds" if claim["holds"] else "fails"
        source = html.escape(claim["source"])
        return Markup(
            f'<div class="claim {verdict}" id="{anchor}"><b>{verdict}</b>{text}'
            f'<div class="value">{value}</div><span class="muted">{source}</span></div>'
        )


def _style() -> str:
    css = (Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}\n{css}"


def _math_font(page: str) -> str:
    """STIX Two Math (SIL Open Font License 1.1), cut down to the characters of the page's formulas."""
    spec = importlib.util.find_spec("ziamath")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("ziamath carries the maths font", name="ziamath")
    formulas = "".join(re.findall(r"<math.*?</math>", page, re.S))
    options = subset.Options(flavor="woff2", layout_features=["*"])
    font = subset.load_font(Path(spec.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf", options)
    # italic letters are spelled as plain <mi> letters: the browser picks the mathematical alphabet
    letters = "".join(map(chr, range(0x1D434, 0x1D468))) + "".join(map(chr, range(0x1D6E2, 0x1D71C)))
    cut = subset.Subsetter(options)
    cut.populate(text=STRETCHY + letters + html.unescape(re.sub(r"<[^>]*>", "", formulas)))
    cut.subset(font)
    buffer = io.BytesIO()
    subset.save_font(font, buffer, options)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"@font-face {{ font-family: report-maths; src: url(data:font/woff2;base64,{data}); }}"
