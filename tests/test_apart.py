"""Tests with the mark `apart` run in other processes, and have the outcomes that they have there."""

import re
import subprocess
import sys

from programs import HERE


def test_tests_that_run_apart_have_their_outcomes() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(HERE / "apart_examples.py")]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert "1 failed, 3 passed, 1 skipped, 1 error" in done.stdout, done.stdout + done.stderr
    assert "as it should" in done.stdout
    assert re.search(r"SKIPPED .*one GPU", done.stdout)
    assert "a fixture that raises" in done.stdout
