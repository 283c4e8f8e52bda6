"""Tests the README and docs: length, links, runnable code, and private words that no reader could look up."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [*sorted((ROOT / "benchmarks").glob("*.md")), ROOT / "linear_ce" / "MATH.md"]
PACKAGES = ("core_triton", "jax_pallas", "linear_ce", "flax_models", "parity", "benchmarks", "examples")
# Private words, as regular expressions, and the field's standard words for them.
REPLACED = {
    r"slabs?": "vocabulary chunk",
    r"graphics cards?|the cards?|cards": "GPU",
    r"unsaid|said plainly": "nothing",
    r"anchored": "scaled exponentials",
    r"library's products?|library products?|matrix products?|bare products?": "matmul",
    r"law of|power law|zipf law": "distribution",
    r"stretch(?:es)? of": "vocabulary chunk",
    r"by itself|of their own": "nothing, or separately",
    r"anew|mend|for people|at hand|said and made": "a plain verb",
    r"held against|passed over": "compared with, skipped",
    r"materialise\w*|optimis\w+|normalis\w+|initialis\w+|tokenis\w+": "the American spelling",
    r"NOTES\.md": "how-to-measure.md or experiments.md",
}
# The same for words that sources may contain.
REPLACED_IN_PAGES = {
    r"laws?": "distribution",
    r"peers": "other libraries",
    r"to the bit": "bit for bit",
    r"goes on|go on": "continues",
    r"nowhere": "never stored",
    r"by themselves": "separately",
    r"(?:process|program|kernel|table|line|file|folder)(?:s|es)? of its own": "a separate ...",
}


def private_words(files: Iterable[Path], words: Mapping[str, str]) -> list[str]:
    """Returns where the files contain one of the words, and what to write instead."""
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for word, name in words.items():
                if match := re.search(rf"\b(?:{word})\b", line, re.IGNORECASE):
                    found.append(f"{path.relative_to(ROOT)}:{number}: write {name} for {match[0]!r}")
    return found


def test_no_page_or_source_has_a_private_word() -> None:
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = private_words([*PAGES, *sources], REPLACED) + private_words(PAGES, REPLACED_IN_PAGES)
    assert not found, "\n".join(found)


def test_the_readme_shows_a_figure_and_how_to_install_on_its_first_screen() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:40])
    assert "![" in first
    assert 'pip install "linear-ce[torch]"' in first


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for link, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        target = path.parent / link if link else path
        assert target.exists(), f"{path.name}: {link}"
        assert not heading or heading in anchors(target), f"{path.name}: {link}#{heading}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_of_the_pages_runs(path: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        small = code.replace("32000", "320").replace("256", "32").replace("8, 128", "2, 16")  # smaller sizes save time
        exec(compile(small, str(path), "exec"), {})
