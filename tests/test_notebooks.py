"""Runs the code of the notebooks in examples/, which is plain Python, without Jupyter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))


def code_cells(name: str) -> list[dict[str, Any]]:
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code_cells(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str) -> None:
    code = "\n\n".join("".join(cell["source"]) for cell in code_cells(name))
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "MPLBACKEND": "agg"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "tokens" in ran.stdout
    assert "implementation: " in ran.stdout  # the plan that the last cell prints
