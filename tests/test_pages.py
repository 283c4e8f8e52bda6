"""Tests the README and docs: length, links, runnable code, and private words that no reader could look up."""

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_host_stand_ins
import trl_stand_ins
from jax_host_stand_ins import jax_hosts
from page_code import programs_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [*sorted((ROOT / "benchmarks").glob("*.md")), ROOT / "linear_ce" / "MATH.md"]
STAND_INS = {  # for hosts that are not installed
    "hosts.md": (trl_stand_ins.trl_and_verl, torch_host_stand_ins.torch_hosts),
    "hosts_jax.md": (jax_hosts,),
}
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
    # In lower case, because a search that ignores case takes three times as long.
    patterns = {re.compile(rf"\b(?:{word.lower()})\b"): name for word, name in words.items()}
    found = []
    for path in files:
        text = path.read_text(encoding="utf-8").lower()
        for pattern, name in patterns.items():
            for match in pattern.finditer(text):
                number = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{number}: write {name} for {match[0]!r}")
    return found


def test_no_page_or_source_has_a_private_word() -> None:
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    sources += [ROOT / "Makefile", ROOT / "pyproject.toml"]
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


@pytest.mark.parametrize("path", PAGES[:-1], ids=lambda path: path.name)
def test_lines_have_at_most_120_characters(path: Path) -> None:
    """But for tables, code, and the formulas of MATH.md, the last of PAGES."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "    "))] == []


@pytest.mark.parametrize("path", PAGES[:-1], ids=lambda path: path.name)
def test_powers_are_code(path: Path) -> None:
    """Two of them in a paragraph would make what is between them bold."""
    text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r".*\d\*\*-?\d.*", text) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_blank_line_ends_a_further_paragraph_of_a_list(path: Path) -> None:
    """Python-Markdown would show the items after it as text."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\n\n +[^\s|-].*(?:\n +[^\s-].*)*\n- .*", text) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_blocks_of_code_name_their_language(path: Path) -> None:
    """Then they are highlighted. Blocks that are only indented have no language."""
    text = path.read_text(encoding="utf-8")
    fences = re.findall(r"^ *```(.*)$", text, re.MULTILINE)
    assert all(fences[::2]), "a fence without a language"
    assert not any(fences[1::2])
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"(?<=\n\n) {4}(?! *(?:[-*]|\d+\.) ).*", text)


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
    with ExitStack() as stack:
        for hosts in STAND_INS.get(path.name, ()):
            stack.enter_context(hosts())
        run(path)


def test_pytorch_programs_of_the_objectives_run() -> None:
    """JAX's take longer: test_sequence_losses.py runs some of them."""
    run(ROOT / "docs" / "objectives.md", "core_triton")


def run(path: Path, package: str = "") -> None:
    for code in programs_of(path):
        if package not in code:
            continue
        small = code.replace("32000", "320").replace("256", "32").replace("8, 128", "2, 16")  # smaller sizes save time
        exec(compile(small, str(path), "exec"), {})


def test_pages_say_to_pass_the_softcap_and_the_scale_of_a_models_logits() -> None:
    """A call without them gives another loss and no error, so only the text can warn."""
    readme, options = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/options.md"))
    assert re.search(
        r"Pass the softcap and the scale .*`softcap=30\.0`\s+\(`final_logit_softcapping`\)", readme, re.DOTALL
    )
    assert "`logit_scale=1 / logits_scaling`" in readme
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)=.*?` \|", options, re.MULTILINE))
    assert rows == {"final_logit_softcapping": "softcap", "logits_scaling": "logit_scale", "logit_scale": "logit_scale"}
    for package in ("core_triton", "jax_pallas"):
        function = importlib.import_module(package).linear_cross_entropy
        assert set(rows.values()) <= set(inspect.signature(function).parameters)


def test_calls_in_place_of_other_losses_have_their_value() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8").split("## In place of another loss")[1]
    calls = dict(re.findall(r"^\| `(.*?)`.*? \| `(linear_cross_entropy\(.*?\))`", text, re.MULTILINE))
    arrays = [torch.randn(*shape) for shape in ((2, 5, 8), (30, 8), (30,))]
    names: dict[str, Any] = {**dict(zip("xwb", arrays, strict=True)), "y": torch.randint(30, (2, 5))}
    names |= {
        "F": torch.nn.functional,
        "linear_cross_entropy": importlib.import_module("core_triton").linear_cross_entropy,
    }
    found = 0
    for theirs, ours in calls.items():
        if theirs.startswith("F.") and hasattr(torch.nn.functional, theirs[2:].split("(")[0]):
            torch.testing.assert_close(eval(ours, names), eval(theirs, names))
            found += 1
    assert found
    names |= {name: value.numpy() for name, value in names.items() if isinstance(value, torch.Tensor)}
    names["linear_cross_entropy"] = importlib.import_module("jax_pallas").linear_cross_entropy
    names |= {"optax": importlib.import_module("optax"), "kernel": names["w"].T}
    both = [(theirs, ours) for theirs, ours in calls.items() if theirs.startswith("optax.")]
    assert len(both) == 2
    for theirs, ours in both:
        assert float(eval(ours, names)) == pytest.approx(float(eval(theirs, names)), rel=1e-5)


def test_options_lists_every_argument_of_the_losses() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\| (.*) \|$", text, re.MULTILINE))
    elsewhere = {"token_loss", "per_token", "stats"}  # in the table of functions
    packages = {"PyTorch": importlib.import_module("core_triton"), "JAX": importlib.import_module("jax_pallas")}
    names = {"linear_cross_entropy", "linear_log_probs", "linear_token_loss", "linear_token_loss_with_stats"}
    taken = {
        framework: {name for one in names for name in inspect.signature(getattr(package, one)).parameters}
        for framework, package in packages.items()
    }
    assert set.union(*taken.values()) - elsewhere <= set(rows)
    for framework, other in (("PyTorch", "JAX"), ("JAX", "PyTorch")):
        only = {name for name, row in rows.items() if row.startswith(f"{framework} only")}
        assert only == taken[framework] - taken[other]


def test_pages_examples_and_flax_models_import_the_losses_from_the_package() -> None:
    options = " ".join((ROOT / "docs" / "options.md").read_text(encoding="utf-8").split())
    assert "Use `import core_triton` or `import jax_pallas`. Their submodules are not public," in options
    users = [path for package in ("examples", "flax_models") for path in sorted((ROOT / package).rglob("*.py"))]
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *users]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:from|import) (?:core_triton|jax_pallas)\.(?!hosts\b)", text), path.name
        for package, names in re.findall(r"^from (core_triton|jax_pallas) import (.+)$", text, re.MULTILINE):
            public = importlib.import_module(package).__all__
            assert {name.strip() for name in names.split(",")} <= set(public), path.name
