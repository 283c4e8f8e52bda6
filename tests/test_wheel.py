"""Tests the wheel: what it contains, and that each package can be imported where only its requirements are."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = ("core_triton", "jax_pallas", "flax_models", "linear_ce")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the packages, because a build writes files beside its sources."""
    place = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, place / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (place / "source" / "parity").mkdir()  # a folder that the wheel must not contain
    (place / "source" / "parity" / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "source" / name)
    build = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(place)!r}))"
    made = subprocess.run(
        [sys.executable, "-c", build], cwd=place / "source", capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return place / made.stdout.splitlines()[-1]


def test_the_wheel_holds_four_packages_and_all_their_files(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert names == expected


# What each package imports, the extra that it is installed with, and modules that must not be there.
IMPORTED = {
    "linear_ce": ("linear_ce.spec, linear_ce.reference, linear_ce.chunking", None, ("torch", "triton", "jax", "flax")),
    "core_triton": ("core_triton", "torch", ("jax", "flax")),
    "jax_pallas": ("jax_pallas", "jax", ("torch", "triton", "flax")),
    "flax_models": ("flax_models.train.main, flax_models.generate, flax_models.export", "flax", ("torch", "triton")),
}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the wheel, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(wheel)]
    made = subprocess.run(pip, cwd=target, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return target


def requirements(project: metadata.Distribution, extra: str | None) -> dict[str, metadata.Distribution]:
    """Returns the installed distributions that a distribution needs with an extra, directly or indirectly."""
    found: dict[str, metadata.Distribution] = {}
    seen, waiting = set(), [(project, extra)]
    while waiting:
        distribution, wanted = waiting.pop()
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": wanted or ""}):
                continue
            itself = requirement.name == project.name
            needed = project if itself else metadata.distribution(requirement.name)
            for option in (None, *sorted(requirement.extras)):
                if (requirement.name, option) not in seen:
                    seen.add((requirement.name, option))
                    waiting.append((needed, option))
            if not itself:
                found[requirement.name] = needed
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_an_installed_package_is_imported_where_only_its_requirements_are(
    installed: Path, package: str, tmp_path: Path
) -> None:
    modules, extra, absent = IMPORTED[package]
    (project,) = metadata.distributions(path=[str(installed)])
    for needed in requirements(project, extra).values():
        for name in {file.parts[0] for file in needed.files or () if file.parts[0] != ".."}:
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(Path(str(needed.locate_file(name))))
    program = f"""
import importlib.util, json, sys
sys.path += {[str(installed), str(tmp_path)]!r}
assert not any(map(importlib.util.find_spec, {absent!r}))
import {modules}
print(json.dumps(sys.modules[{package!r}].__file__))
"""
    isolated = [sys.executable, "-I", "-S", "-c", program]  # without site-packages, the folder and PYTHONPATH
    ran = subprocess.run(isolated, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert Path(json.loads(ran.stdout)).is_relative_to(installed)


@pytest.mark.parametrize(
    ("package", "framework"), [("core_triton", "torch"), ("jax_pallas", "jax"), ("flax_models", "flax")]
)
def test_a_missing_framework_is_one_line_that_names_the_extra(package: str, framework: str) -> None:
    program = (
        f"import sys; sys.path = [{str(ROOT)!r}, *(p for p in sys.path if 'site-packages' not in p)]; import {package}"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    assert ran.stderr.splitlines()[-1].startswith(f"ImportError: {package} needs ")
    assert f'pip install "linear-ce[{framework}]"' in ran.stderr


@pytest.mark.parametrize("command", ["train", "generate", "export"])
def test_a_command_without_its_libraries_is_one_line_that_names_the_extra(command: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-S", "-m", f"flax_models.{command}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: flax_models needs jax, flax, ")
    assert ran.stderr.endswith(': pip install "linear-ce[flax]"\n')
    assert ran.stderr.count("\n") == 1


IMPORT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    raise ImportError  # as an extension module of NumPy does
"""


@pytest.mark.parametrize("command", ["train", "generate", "export"])
def test_ctrl_c_during_the_imports_of_a_command_prints_nothing(command: str, tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text(IMPORT)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start pytest with SIGINT ignored
    try:
        ran = subprocess.run(
            [sys.executable, "-m", f"flax_models.{command}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_the_imports_of_a_command_leave_the_handler_of_ctrl_c(handler: Any) -> None:
    from flax_models.command_line import silent_interrupts

    before = signal.signal(signal.SIGINT, handler)
    try:
        with silent_interrupts():
            assert (signal.getsignal(signal.SIGINT) is handler) == (handler is signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_contract_names_the_packages_that_have_the_loss() -> None:
    with pytest.raises(ImportError, match=r"from core_triton import linear_cross_entropy.*from jax_pallas import"):
        from linear_ce import linear_cross_entropy  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
