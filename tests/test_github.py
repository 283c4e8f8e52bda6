"""The files that GitHub and pip read, as far as they repeat what other files say."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

import linear_ce

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> list[dict[str, object]]:
    """Returns the steps of all jobs of a workflow."""
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


def test_workflows_run_targets_of_the_makefile() -> None:
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = "\n".join(str(step.get("run", "")) for workflow in WORKFLOWS for step in steps(workflow))
    named = {name for name in re.findall(r"make (\S+)", run) if not name.startswith("$")}
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    named |= set(tests["jobs"]["weekly"]["strategy"]["matrix"]["target"])
    assert {"lint", "test", "docs", "test-slow"} <= named <= set(phony.split())


def test_ci_and_the_workflow_run_the_same_checks() -> None:
    ci = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["quick"]["steps"] if "run" in step] == ci


def test_core_triton_is_tested_with_every_python_that_it_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = {line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python :: 3." in line}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    [of_weekly] = [step["with"]["python-version"] for step in jobs["weekly"]["steps"] if "python" in str(step)]
    others = jobs["pythons"]["strategy"]["matrix"]["include"]
    assert {*of_weekly.split(), *(entry["python"] for entry in others)} == claimed
    assert all((ROOT / entry["constraints"]).exists() for entry in others)
    [run] = [step["run"] for step in jobs["pythons"]["steps"] if "pytest" in step.get("run", "")]
    wildcard, named = re.findall(r"tests/\S+", run)
    makefile = (ROOT / "Makefile").read_text()
    of_makefile = re.search(r"^OLDEST_TESTS := \$\(wildcard (.*)\) \$\(patsubst .*,(.*)\)$", makefile, re.MULTILINE)
    assert of_makefile is not None
    assert (wildcard, named) == (of_makefile[1], f"tests/test_{{{','.join(of_makefile[2].split())}}}.py")


def test_the_citation_has_the_version_and_the_license_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"].split(":")[0], citation["version"]) == (project["name"], linear_ce.__version__)
    assert citation["license"] == project["license"]


def test_the_oldest_versions_that_are_tested_are_the_oldest_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_jax = [*extras["jax"], *(line for line in extras["flax"] if line != "linear-ce[jax]")]
    for file, requirements in (
        ("constraints-oldest.txt", [*project["dependencies"], *extras["torch"]]),
        ("constraints-oldest-jax.txt", of_jax),
    ):
        lines = (ROOT / file).read_text().lower().splitlines()
        tested = dict(line.split("==") for line in lines if not line.startswith("#"))
        for requirement in map(Requirement, requirements):
            [oldest] = [one.version for one in requirement.specifier if one.operator == ">="]
            assert f"{tested[requirement.name.lower()]}.".startswith(f"{oldest}."), requirement
    makefile = (ROOT / "Makefile").read_text()
    oldest = re.search(r"^OLDEST_PYTHON \?= (\S+)$", makefile, re.MULTILINE)
    assert oldest is not None
    assert project["requires-python"].removeprefix(">=") == oldest[1]
    assert "$(call find_python,$(OLDEST_PYTHON))" in makefile
