"""--resume: which rows are measured again."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import linear_ce, results, sweep, torch_methods
from benchmarks.methods import Method
from linear_ce.cost_coefficients import COEFFICIENTS


def run(file: Path, *arguments: str) -> dict[str, str]:
    """Runs the command on the smoke shape with --resume; returns what was measured, and the hash of all rows."""
    common = ["--framework", "torch", "--device", "cpu", "--shapes", "smoke", "--seconds", "0", "--pairs", "2"]
    assert linear_ce.main([*common, "--resume", "--json", str(file), *arguments]) == 0
    return {row["method"]: row["code_hash"] for row in json.loads(file.read_text())["rows"]}


def test_resuming_measures_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def noting(name: str, fails: bool = False) -> Any:
        def build(mode: Any) -> Any:
            built.append(name)
            if fails:
                raise MemoryError("out of memory")
            return torch_methods.METHODS["eager"].build(mode)

        return build

    methods = [
        Method("mine", "ours", noting("mine"), takes_budget=True),
        Method("theirs", "peer", noting("theirs")),
        Method("fails", "peer", noting("fails", fails=True)),
    ]
    eager = torch_methods.METHODS["eager"]
    monkeypatch.setattr(torch_methods, "METHODS", {"eager": eager, **{method.name: method for method in methods}})
    file = tmp_path / "torch.json"
    names = ["--methods", *(method.name for method in methods)]
    first = run(file, *names)
    assert built == ["mine", "theirs", "fails"]
    assert first["mine"] == results.source_hash("torch") != first["theirs"]
    assert run(file, *names) == first
    assert built[3:] == ["fails"]
    monkeypatch.setattr(results, "source_hash", lambda framework: "other code")
    assert run(file, *names) == {**first, "mine": "other code"}
    assert built[4:] == ["mine", "fails"]
    monkeypatch.setattr(Method, "version", lambda self: "2.0")
    run(file, *names)
    assert built[6:] == ["theirs", "fails"]
    with pytest.raises(SystemExit):
        linear_ce.parse(["--framework", "torch", "--resume"])


def test_the_hash_covers_kernels_and_the_choice_of_chunks(tmp_path: Path) -> None:
    code = 'def f() -> int:\n    """Returns 1."""\n    return 1\n'
    of_contract = [f"linear_ce/{name}" for name in (*results.CHOICES, "spec.py")]
    imports = "from core_triton import kernels\nfrom core_triton.token_hook import f\n"
    paths = {f"core_triton/{name}.py": f"{imports}\n{code}" for name in results.PATHS}
    others = [f"core_triton/{name}.py" for name in ("kernels", "plan", "ops", "token_hook")]
    plain = dict.fromkeys((*others, *of_contract), code)
    files = paths | plain
    files["core_triton/kernels.py"] = f"{code}\n\ndef g() -> None:\n    from core_triton.plan import f  # noqa: F401\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before, of_sweep = results.source_hash("torch", tmp_path), results.source_hash("torch", tmp_path, sweep.CHOICES)
    for name, old, new, matters in (
        ("core_triton/scaled_exp.py", "return 1", "return 2", True),
        ("core_triton/plan.py", "return 1", "return 2", True),
        ("core_triton/ops.py", "return 1", "return 2", False),  # no path with kernels imports it
        ("core_triton/token_hook.py", "return 1", "return 2", False),
        ("core_triton/kernels.py", "return 1", "return 2", True),
        ("core_triton/kernels.py", "Returns 1", "Returns one", False),
        ("core_triton/kernels.py", "return 1", "return 1  # why", False),
        *((name, "return 1", "return 2", True) for name in of_contract[:-1]),  # the last one is spec.py
        ("linear_ce/spec.py", "return 1", "return 2", False),
    ):
        (tmp_path / name).write_text(files[name].replace(old, new))
        assert (results.source_hash("torch", tmp_path) != before) == matters
        # Coefficients that are fitted to a sweep leave its rows valid: each has a given number of rows.
        matters &= name != "linear_ce/chunk_cost.py"
        assert (results.source_hash("torch", tmp_path, sweep.CHOICES) != of_sweep) == matters
        (tmp_path / name).write_text(files[name])
    for gpu, framework in (("h200", "torch"), ("h200", "jax")):
        changed = COEFFICIENTS[gpu, framework]._replace(call=1.0)
        with mock.patch.dict(COEFFICIENTS, {(gpu, framework): changed}):
            assert (results.source_hash("torch", tmp_path) != before) == (framework == "torch")
            assert results.source_hash("torch", tmp_path, sweep.CHOICES) == of_sweep
    with_token_loss = results.token_loss_hash("torch", before, tmp_path)
    (tmp_path / "core_triton/token_hook.py").write_text(code.replace("return 1", "return 2"))
    assert with_token_loss != results.token_loss_hash("torch", before, tmp_path) != before
    (tmp_path / "core_triton/kernels.py").rename(tmp_path / "core_triton/other.py")
    assert results.source_hash("torch", tmp_path) != before


def test_no_row_starts_after_until(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--framework", "torch", "--device", "cpu", "--shapes", "smoke", "--methods", "eager", "chunked"]
    assert linear_ce.main([*options, "--until", "-1"]) == 0
    printed = capsys.readouterr().out
    assert "2 rows were not started before --until -1 seconds" in printed
    assert "err_loss" not in printed
