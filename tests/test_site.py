"""The documentation site, as far as it can be checked without building it: `make docs` does that."""

import ast
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def constant(name: str, file: Path = ROOT / "docs" / "hooks.py") -> Any:
    """Returns a constant of docs/hooks.py, or of a file, whose imports are not installed with the tests."""
    tree = ast.parse(file.read_text())
    [value] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return ast.literal_eval(value.args[0] if isinstance(value, ast.Call) else value)  # the pattern of re.compile


def test_every_page_is_in_the_navigation_once() -> None:
    nav = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    added = constant("PAGES")
    assert all((ROOT / source).is_file() for source in added)
    expected = {path.name for path in (ROOT / "docs").glob("*.md")} | set(added.values())
    expected |= {f"api/{package}.md" for package in constant("PACKAGES")}
    assert sorted(nav) == sorted(expected)


def test_every_public_name_of_an_adapter_is_on_the_api_page() -> None:
    for package, listed in constant("PACKAGES").items():
        public = []
        for path in sorted((ROOT / package / "hosts").glob("*.py")):
            if path.stem in ("__init__", "deferred", "interface", "trl_losses"):  # parts of adapters
                continue
            names = constant("__all__", path)
            assert names == sorted(names), path
            public += [f"hosts.{path.stem}.{name}" for name in names]
        assert public == [name for name in listed if name.startswith("hosts.")]


def test_links_within_a_page_stay_links() -> None:
    """The site shows links to folders of the repository as text."""
    links = re.compile(constant("LINK_TO_FOLDER"))
    assert links.search("[results](../benchmarks/results/h200)")
    assert not links.search("[below](#several-devices)")


def test_powers_in_docstrings_of_the_site_are_code() -> None:
    """Otherwise two stars make the text up to the next two stars bold."""
    for package, listed in constant("PACKAGES").items():
        names = {"linear_ce", "module", "token_losses", *(name.rpartition(".")[0].replace(".", "/") for name in listed)}
        for path in filter(Path.is_file, (ROOT / package / f"{name}.py" for name in names)):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = re.sub(r"^ *>>> .*$|`[^`]*`", "", ast.get_docstring(node) or "", flags=re.MULTILINE)
                    assert not re.search(r"\w\*\*[-\w]", text), f"{path}: {text}"


def test_arguments_with_one_description_have_it_each() -> None:
    arguments = re.compile(constant("ARGUMENTS"), re.MULTILINE)
    text = "Args:\n    x: one.\n    a, b: both,\n        of them.\n    c: last."
    assert [match.groups() for match in arguments.finditer(text)] == [("a, b", ": both,\n        of them.\n")]
    assert [match.groups() for match in arguments.finditer("    a, b: the end.")] == [("a, b", ": the end.")]


def test_equations_of_docstrings_are_found() -> None:
    equation = re.compile(constant("MATH"), re.MULTILINE)
    for text in ("    .. math:: a\n        b\n\n    c", "    .. math::\n        a\n        b\n\n    c"):
        assert [match[2].split() for match in equation.finditer(text)] == [["a", "b"]]
