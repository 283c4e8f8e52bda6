"""Runs tests and prints a JSON line for each: `python run_tests.py NODE_ID...`. Tests with the mark `apart` run so."""

import json
import os
import sys

import pytest
from programs import APART, HERE


class Printer:
    """Prints the outcome of each test, of its setup if that did not pass."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        print(json.dumps({"name": report.nodeid, "outcome": report.outcome, "text": text}), flush=True)


if __name__ == "__main__":
    os.environ[APART] = "1"
    os.chdir(HERE.parent)  # the names of tests are relative to it
    # The options of pyproject.toml are for pytest's own output, which would be between the lines.
    options = ["-o", "addopts=-p no:anyio -p no:typeguard -p no:terminal", "-p", "no:cacheprovider", "-s"]
    status = pytest.main([*options, *sys.argv[1:]], plugins=[Printer()])
    # Without the interpreter's shutdown, as in run_cases.py.
    sys.stdout.flush()
    os._exit(0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else status)
