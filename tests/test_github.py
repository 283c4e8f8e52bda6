"""The files that GitHub reads, as far as they repeat what other files say."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> list[dict[str, object]]:
    """Returns the steps of all jobs of a workflow."""
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


def test_workflows_run_targets_of_the_makefile() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    run = "\n".join(str(step.get("run", "")) for workflow in WORKFLOWS for step in steps(workflow))
    named = {name for name in re.findall(r"make (\S+)", run) if not name.startswith("$")}
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    named |= set(tests["jobs"]["weekly"]["strategy"]["matrix"]["target"])
    assert {"lint", "test", "docs", "test-slow"} <= named <= set(phony.group(1).split())


def test_ci_and_the_workflow_run_the_same_checks() -> None:
    ci = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["quick"]["steps"] if "run" in step] == ci


def test_the_citation_has_the_version_and_the_license_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"].split(":")[0], citation["version"]) == (project["name"], project["version"])
    assert citation["license"] == project["license"]
