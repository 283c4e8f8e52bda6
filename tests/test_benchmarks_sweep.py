"""Tests the sweep of chunk rows and the fit of the estimate to it, without a GPU: stubs replace times and arrays."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import fit_chunk_cost, linear_ce, sweep
from benchmarks.chunk_rows import Choice, considered
from benchmarks.methods import Method
from benchmarks.shapes import SHAPES
from linear_ce import chunk_cost
from linear_ce.chunk_cost import CostCoefficients

MIB = 2**20
FRAMEWORKS = ("torch", "jax")
# What the stub's GPU takes: other coefficients than those of the estimate.
TRUE = chunk_cost.COEFFICIENTS["h200", "jax"]._replace(multiply=13.0, exposed=0.5, chunk=150.0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_chunked_has_nothing_to_sweep(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--framework", framework, "--device", "cpu", "--shapes", "smoke", "--modes", "train"]
    assert sweep.main([*common, "--seconds", "0", "--pairs", "2"]) == 0
    assert "nothing to sweep: the path chunked of chunked does not choose chunk rows" in capsys.readouterr().out


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_starts_nothing_after_until(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--framework", framework, "--device", "cpu", "--shapes", "smoke", "--until", "-1"]) == 0
    assert "2 shapes and modes were not started" in capsys.readouterr().out


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that computes nothing. Its times are those of `TRUE` for the plan that the packages make at the time."""

    def open_bench(framework: str, device: str) -> Any:
        def problem(shape: Any, dtype: str, targets: str) -> Any:
            x, w = fit_chunk_cost.arrays(framework, shape.n, shape.d, shape.v)
            return SimpleNamespace(input=x, weight=w, shape=shape)

        name = sweep.METHODS[framework]
        method = Method(name, "ours", lambda mode: print, takes_budget=True)
        parts = {"methods": {name: method}, "versions": lambda: {framework: "1"}, "release": lambda: None}
        return SimpleNamespace(framework=framework, device="NVIDIA H200", problem=problem, **parts)

    def measure(bench: Any, problem: Any, method: Method, mode: Any, options: Any) -> dict[str, Any]:
        made = of_h200(bench.framework, problem.input, problem.weight, sweep.budget_of(mode), method.name)
        floor = 3 * 2 * problem.shape.n * problem.shape.d * problem.shape.v / 680e9
        clock = 1 + 0.02 * (made.plan.chunks.rows % 3)  # of floor and method alike
        choices = fit_chunk_cost.choices(
            bench.framework, "h200", *sizes(problem.shape), sweep.budget_of(mode), made.plan.chunks.rows
        )
        ms = next(choice for choice in choices if choice.rows == made.plan.chunks.rows).ms(TRUE)
        figures = {"floor_ms": clock * floor, "ms": clock * ms, "ratio": ms / floor, "status": "ok"}
        return {**figures, "err_d_weight": 1e-3}

    explain = sweep.explain

    def of_h200(framework: str, input: Any, weight: Any, budget: int, method: str) -> Any:
        return explain(framework, input, weight, budget, method, "h200")

    monkeypatch.setattr(linear_ce, "open_bench", open_bench)
    monkeypatch.setattr(linear_ce, "measure_safely", measure)
    monkeypatch.setattr(sweep, "explain", of_h200)


def sizes(shape: Any) -> tuple[int, int, int]:
    return shape.n, shape.d, shape.v


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_are_measured_and_fitted(framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"{framework}.json"
    shapes = ("llama3-8b", "qwen2.5-0.5b", "gemma2-2b", "v32000")
    common = ["--framework", framework, "--json", str(file), "--commit", "c0ffee"]
    assert sweep.main([*common, "--shapes", *shapes, "--most", "6"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("the plan chooses") == 2 * len(shapes)
    rows = json.loads(file.read_text())["rows"]
    for name in shapes:
        for mode in ("train", "tight"):
            of_mode = [row for row in rows if (row["shape"], row["mode"]) == (name, mode)]
            assert 1 < len(of_mode) <= 6
            assert len({row["chunk_rows"] for row in of_mode}) == len(of_mode)
            assert sum(row["chosen"] for row in of_mode) == 1
            for row in of_mode:
                assert row["chunks"] == -(-SHAPES[name].n // row["chunk_rows"])
                assert row["budget"] == {"train": 512 * MIB, "tight": 256 * MIB}[mode]
                assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
                assert (row["commit"], row["method"], row["framework"]) == (
                    "c0ffee",
                    sweep.METHODS[framework],
                    framework,
                )
    gemma = {row["chunk_rows"] for row in rows if (row["shape"], row["mode"]) == ("gemma2-2b", "tight")}
    assert {384, {"torch": 464, "jax": 512}[framework]} <= gemma  # the choice, and the fewest chunks

    assert fit_chunk_cost.main([str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"    ('h200', '{framework}'): CostCoefficients(" in printed
    assert float(printed.split("worst choice: ")[1].split("%", maxsplit=1)[0]) <= 100 * chunk_cost.TIE

    assert sweep.main([*common, "--shapes", "llama3-8b", "--modes", "tight", "--rows", "512", "700"]) == 0
    printed = capsys.readouterr().out
    assert "700 rows: no plan has chunks of so many" in printed
    assert "512 rows x 16" in printed
    assert sweep.main([*common, "--shapes", "llama3-8b", "--modes", "tight", "--rows", "512", "--resume"]) == 0
    assert "512 rows x 16" not in capsys.readouterr().out


def made_up(framework: str, truth: CostCoefficients) -> list[fit_chunk_cost.Sample]:
    """Returns rows of several shapes and budgets whose times are those of `truth`."""
    found = []
    for name, mebibytes in (("llama3-8b", 512), ("llama3-8b", 128), ("qwen2.5-0.5b", 256), ("gemma2-2b", 256)):
        shape = SHAPES[name]
        group = (name, *sizes(shape), mebibytes * MIB)
        choices = considered(lambda group=group: fit_chunk_cost.made_plan(framework, "h200", *group[1:]))
        found += [fit_chunk_cost.Sample(group, choice, choice.ms(truth)) for choice in choices]
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_fit_finds_the_coefficients_that_the_rows_determine(framework: str) -> None:
    start = chunk_cost.COEFFICIENTS["h200", framework]
    truth = start._replace(multiply=14.0, exposed=0.4, chunk=100.0)
    rows = made_up(framework, truth)
    fitted = fit_chunk_cost.fit(rows, start)
    assert np.abs(fit_chunk_cost.residuals(rows, fitted)).max() < 0.02
    assert np.abs(fit_chunk_cost.residuals(rows, start)).max() > 0.05
    assert fitted.multiply == pytest.approx(truth.multiply, rel=0.03)
    assert min(fitted) >= 0
    for group in {row.group for row in rows}:
        of_group = [row for row in rows if row.group == group]
        chosen = fit_chunk_cost.choice_of(of_group, fitted)
        assert chosen.ms <= 1.006 * min(row.ms for row in of_group)


def test_a_shape_whose_matmuls_are_slower_does_not_change_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    """A factor of all rows of a shape, such as a lower clock, counts little."""
    start = chunk_cost.COEFFICIENTS["h200", "jax"]
    rows = [
        row._replace(ms=row.ms * (1.03 if row.group[0] == "qwen2.5-0.5b" else 1.0)) for row in made_up("jax", start)
    ]
    fitted = fit_chunk_cost.fit(rows, start)
    assert fitted.multiply == pytest.approx(start.multiply, rel=0.03)
    assert fit_chunk_cost.report(("h200", "jax"), rows, fitted) < 0.6
    assert "within a shape and budget: 0." in capsys.readouterr().out


def test_rows_of_the_fewest_chunks_and_rows_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = SHAPES["gemma2-2b"]
    row = {**shape.of_row(), "dtype": "bfloat16", "targets": "peaked", "mode": "tight", "method": "mosaic"}
    row |= {"status": "ok", "ratio": 1.1, "floor_ms": 43.0}
    others: list[dict[str, Any]] = [{"chunk_rows": 700}, {"dtype": "float16"}, {"status": "failed"}, {"mode": "eval"}]
    file = tmp_path / "jax.json"
    file.write_text(json.dumps({"device": "NVIDIA H200", "rows": [row, *({**row, **other} for other in others)]}))
    assert fit_chunk_cost.main([str(file)]) == 1
    printed = capsys.readouterr().out
    assert "has no plan with 700 rows any more" in printed
    assert "no rows to fit to" in printed
    assert fit_chunk_cost.main([str(file), "--fewest", "--check"]) == 0
    printed = capsys.readouterr().out
    assert "h200, jax: 1 rows" in printed
    assert "| gemma2-2b | 256 | 1 | 512 | 512 | 0.0% |" in printed


def test_the_estimate_of_a_choice_takes_other_coefficients() -> None:
    choice = made_up("torch", TRUE)[0].choice
    assert isinstance(choice, Choice)
    assert choice.ms() == chunk_cost.call_ms(*choice)
    assert choice.ms(choice.call.coefficients._replace(multiply=30.0)) > 2 * choice.ms()
