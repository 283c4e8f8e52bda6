"""Hooks of mkdocs, and of griffe, which reads the docstrings: pages that are outside of docs/, their links, the API
pages, examples, equations and plots.

The same Markdown is read in the repository and on the site. On the site, README.md is the first page, and files of
`PAGES` are pages. Other files that a page links to are copied to files/, and a link to a folder becomes its text.
"""

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

from griffe import Extension
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url
from plotly.offline import get_plotlyjs

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file without its folder
import plots

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "linear_ce/MATH.md": "math.md",
    "benchmarks/how-to-measure.md": "how-to-measure.md",
    "benchmarks/experiments.md": "experiments.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PACKAGES = {
    "core_triton": (
        "hosts.megatron.output_processor",
        "hosts.torchtitan.LinearCrossEntropyLoss",
        "hosts.transformers.patch",
        "hosts.transformers.unpatch",
        "hosts.trl.patch",
        "hosts.trl.unpatch",
        "hosts.verl.patch",
        "hosts.verl.unpatch",
        "parallel.VocabParallel",
    ),
    "jax_pallas": (
        "hosts.heads.head_arguments",
        "hosts.heads.head_cross_entropy",
        "hosts.levanter.register",
        "hosts.levanter.unregister",
        "hosts.maxtext.patch",
        "hosts.maxtext.unpatch",
        "hosts.tunix.loss_fn",
        "hosts.tunix.patch",
        "hosts.tunix.unpatch",
    ),
}  # and what is public in submodules
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
LINK_TO_FOLDER = re.compile(r"\[([^\]]+)\]\(([^)#\s][^)\s]*)\)")
COMMANDS = {"\\_": "_", "\\arg": "arg", "\\lfloor": "&#x230A;", "\\rfloor": "&#x230B;"}
PLOT = re.compile(r"<!-- plot: (\w+) -->")
CELL = re.compile(r"<td.*?</td>")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
# Several arguments with one description, such as "    a, b: text", with its further lines.
ARGUMENTS = re.compile(r"^    (\w+(?:, \w+)+)(: .*\n?(?: {8}.*\n?)*)", re.MULTILINE)
# ".. math::" and an equation, on the same line or in further lines.
MATH = re.compile(r"^( *)\.\. math::(.*(?:\n\1 {4}.*)*)", re.MULTILINE)
EQUATION = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages outside of docs/, what pages link to, and the API pages."""
    sources = dict(PAGES)
    for path in sorted(Path(config.docs_dir).glob("*.md")):
        sources[path.relative_to(ROOT).as_posix()] = path.name
    for source, page in sources.items():
        if source in PAGES:
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
        for link, _ in LINK.findall((ROOT / source).read_text()):
            target = _target(source, link)
            path = ROOT / target
            if path.is_file() and path.suffix != ".md" and not target.startswith("docs/"):
                place = f"files/{target}"
                if files.get_file_from_path(place) is None:
                    files.append(File.generated(config, place, abs_src_path=str(path)))
    for package in PACKAGES:
        files.append(File.generated(config, f"api/{package}.md", content=api_page(package)))
    files.append(File.generated(config, "plotly.min.js", content=get_plotlyjs()))
    return files


def indented(markdown: str) -> str:
    """Returns the text of a page whose lists are indented by four spaces, as Python-Markdown needs, in place of two."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("```") else re.sub(r"^ +", lambda spaces: 2 * spaces[0], part, flags=re.MULTILINE)
        for part in parts
    )


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Indents lists, and rewrites the links of a page, which are those of its source in the repository."""
    uri = page.file.src_uri
    if uri.startswith("api/"):
        return markdown
    source = next((name for name, place in PAGES.items() if place == uri), f"docs/{uri}")

    def without_folders(match: re.Match[str]) -> str:
        text, link = match.groups()
        return text if (ROOT / _target(source, link)).is_dir() else match.group()

    def placed(match: re.Match[str]) -> str:
        target, anchor = _target(source, match[1]), match[2] or ""
        place = PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}")
        return place + anchor

    return LINK.sub(placed, LINK_TO_FOLDER.sub(without_folders, indented(markdown)))


def in_cell(cell: re.Match[str]) -> str:
    """Returns a cell of a table without line breaks in dates, and between numbers and what belongs to them."""
    text = re.sub(r"(?<=\d) / (?=[\d-])", "&nbsp;/&nbsp;", cell[0])
    text = re.sub(r"(?<=\d) x (?=\d)", "&nbsp;x&nbsp;", text)
    text = re.sub(r"(?<=\d) (?=(?:ms|MiB|GiB|x)\b)", "&nbsp;", text)
    text = re.sub(r"(?<=ms), (?=\d)", ",&nbsp;", text)
    return DATE.sub(lambda date: f'<span class="date">{date[0]}</span>', text)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Renders equations as MathML, which browsers show without scripts, and plots. In tables, keeps dates, two numbers
    with a slash between them, and a number with its unit on one line."""

    def rendered(match: re.Match[str]) -> str:
        latex = match[2].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").strip()
        latex = latex.replace("\\tag{", "\\qquad\\tag{")  # numbers of equations follow them
        try:
            mathml = convert(latex[2:-2], display="block" if match[1] == "div" else "inline")
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: not rendered: {latex}: {error!r}") from error

        # Browsers ignore this attribute, and the converter keeps some commands.
        mathml = mathml.replace('<mi mathvariant="double-struck">R</mi>', "<mi>&#x211D;</mi>")
        for command, shown in COMMANDS.items():
            mathml = mathml.replace(command, shown)
        if "\\" in mathml:
            raise PluginError(f"{page.file.src_uri}: not rendered: {latex}: {mathml}")
        return mathml

    html = EQUATION.sub(rendered, html)
    html = CELL.sub(in_cell, html)
    first = PLOT.search(html)
    if first is None:
        return html
    script = f'<script src="{get_relative_url("plotly.min.js", page.url)}"></script>'
    return PLOT.sub(
        lambda match: f'<div class="plot">{plots.html(match[1])}</div>',
        html[: first.start()] + script + html[first.start() :],
    )


def separate_arguments(match: re.Match[str]) -> str:
    """Returns arguments that have one description with this description for each."""
    description = match[2].rstrip("\n")
    end = match[2][len(description) :]
    return "\n".join(f"    {name}{description}" for name in match[1].split(", ")) + end


class Docstrings(Extension):
    """Changes docstrings to what griffe and Markdown read: the section "Examples" is shown as code, equations are
    between dollars, and an argument that is not described together with others has its type and its default."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
            text = MATH.sub(lambda match: f"{match[1]}$${' '.join(match[2].split())}$$", text)
            obj.docstring.value = ARGUMENTS.sub(separate_arguments, text)


def api_page(package: str) -> str:
    """Returns a page with everything that a package exports, and then what is public in its submodules."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names = sorted(names, key=lambda name: (name[0].isupper(), name))
    parts = [f"::: {package}.{name}" for name in names]
    for name in PACKAGES[package]:  # several submodules have a function of the same name
        parts.append(f"::: {package}.{name}\n    options:\n      toc_label: {name.removeprefix('hosts.')}")
    return "\n\n".join([f"# {package}", ast.get_docstring(tree) or "", *parts])


def _target(source: str, link: str) -> str:
    """Returns the path from the root of what a link in a file means."""
    return os.path.normpath(os.path.join(os.path.dirname(source), link.partition("#")[0]))
