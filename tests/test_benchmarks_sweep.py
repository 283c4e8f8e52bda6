"""Tests the sweep of chunk rows and the fit of the estimate to it, without a GPU: stubs replace times and arrays."""

import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fit_chunk_cost, jax_methods, jax_programs, linear_ce, results, sweep
from benchmarks.chunk_rows import Choice, Division, considered
from benchmarks.methods import Method, Program
from benchmarks.shapes import MODES, SHAPES
from benchmarks.timing import Sensor
from linear_ce import chunk_cost
from linear_ce.cost_coefficients import COEFFICIENTS, CostCoefficients

MIB = 2**20
FRAMEWORKS = ("torch", "jax")
# What the stub's GPU takes: other coefficients than those of the estimate.
TRUE = COEFFICIENTS["h200", "jax"]._replace(multiply=13.0, exposed=0.5, chunk=150.0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_chunked_has_nothing_to_sweep(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--framework", framework, "--device", "cpu", "--shapes", "smoke", "--modes", "train"]
    assert sweep.main([*common, "--seconds", "0", "--pairs", "2"]) == 0
    assert "nothing to sweep: the path chunked of chunked does not choose chunk rows" in capsys.readouterr().out


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_starts_nothing_after_until(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--framework", framework, "--device", "cpu", "--shapes", "smoke", "--until", "-1"]
    # The path of `chunked` has no choice of the plan, and nothing to compile for one.
    ahead = ["--compile-jobs", "1", "--floor", "plan"] if framework == "jax" else []
    assert sweep.main([*common, *ahead]) == 0
    assert "2 shapes and modes were not started" in capsys.readouterr().out


def cpu_options(framework: str, *more: str) -> Any:
    common = ["--framework", framework, "--device", "cpu", "--shapes", "smoke", "--seconds", "0", "--pairs", "2"]
    options = sweep.parse([*common, "--warmup", "0", *more])
    options.sensor = Sensor(gpu=False)
    return options


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_sweep_sets_every_option_that_measuring_reads(framework: str) -> None:
    options, bench = cpu_options(framework), linear_ce.open_bench(framework, "cpu")
    problem = bench.problem(SHAPES["smoke"], "bfloat16", "peaked")
    figures = linear_ce.measure(bench, problem, bench.methods["chunked"], MODES["train"], options)
    assert figures["status"] == "ok"
    assert figures["ratio"] > 0
    assert figures.get("forward_ms") is None


@pytest.mark.parametrize("floor", [pytest.param("matmuls", marks=pytest.mark.slow), "plan"])
def test_jax_compiles_a_program_for_each_row_count(floor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunked implementation runs in the place of the kernels, whose plan has the row counts."""
    options, bench = cpu_options("jax", "--rows", "96", "48", "--floor", floor), linear_ce.open_bench("jax", "cpu")
    shape, mode, chunked = SHAPES["smoke"], MODES["train"], bench.methods["chunked"]
    problem: Any = bench.problem(shape, "bfloat16", "peaked")
    explain, built = sweep.explain, []

    def of_h200(framework: str, input: Any, weight: Any, budget: int, method: str) -> Any:
        return explain(framework, input, weight, budget, method, "h200")

    def build(mode: Any) -> Callable[..., Any]:
        plan = of_h200("jax", problem.input, problem.weight, sweep.budget_of(mode), "mosaic").plan
        built.append(plan.chunks.rows)
        return chunked.build(mode)

    monkeypatch.setattr(sweep, "explain", of_h200)
    file = results.ResultFile(None, "H200", {}, "c0ffee")
    method = replace(chunked, name="mosaic", build=build)
    assert sweep.sweep(bench, method, (shape, mode, "peaked"), options, file, problem, math.inf) == (0, 0)
    assert built == [96, 48]  # the plan chooses 96
    found = [(row["method"], row["chunk_rows"], row["status"]) for row in file.rows]
    assert found == [("mosaic", rows, "ok") for rows in built[floor == "plan" :]]
    assert [row["plan"]["chunk_rows"] for row in file.rows if "plan" in row] == built[: floor == "plan"]


def test_a_program_has_the_plan_of_its_rows() -> None:
    """JAX keeps what it traced of the functions in a program, and with it their plan."""
    shape, mode = SHAPES["smoke"], MODES["eval"]

    @jax.jit
    def planned_rows(x: jax.Array, w: jax.Array, y: jax.Array) -> int:
        return sweep.explain("jax", x, w, sweep.budget_of(mode), "mosaic", "h200").plan.chunks.rows

    x, w = (jnp.zeros((rows, shape.d), jnp.bfloat16) for rows in (shape.n, shape.v))
    arguments = x, w, jnp.zeros(shape.n, jnp.int32), None
    for rows, expected in ((None, 96), (48, 48), (None, 96)):
        method = Method("mosaic", "ours", lambda mode: planned_rows, takes_budget=True, rows=rows)
        assert jax_programs.compile_call(method, mode, arguments).program(*arguments) == (expected,)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """A GPU that computes nothing. Its times are those of `TRUE` for the plan that the packages make at the time.

    Returns what is compiled ahead.
    """
    ahead: list[Program] = []

    def open_bench(framework: str, device: str, *, shares_gpu: bool = False) -> Any:
        def problem(shape: Any, dtype: str, targets: str) -> Any:
            x, w = fit_chunk_cost.arrays(framework, shape.n, shape.d, shape.v)

            def prepare(method: Method, mode: Any) -> Any:
                ms = true_ms(framework, shape, mode, plan_of(framework, shape, mode))
                return SimpleNamespace(run=lambda: ms, figures={"err_d_weight": 1e-3})

            return SimpleNamespace(input=x, weight=w, shape=shape, prepare=prepare)

        name = sweep.METHODS[framework]
        method = Method(name, "ours", lambda mode: print, takes_budget=True)
        parts = {"methods": {name: method}, "versions": lambda: {framework: "1"}, "release": lambda: None}
        parts["compile_ahead"] = lambda programs, jobs, beside: ahead.extend(programs)
        parts["stop_compiling"] = lambda: None
        return SimpleNamespace(framework=framework, device="NVIDIA H200", problem=problem, **parts)

    def measure(
        bench: Any, problem: Any, method: Method, mode: Any, options: Any, planned: Callable[[], float] | None
    ) -> dict[str, Any]:
        plan = plan_of(bench.framework, problem.shape, mode)
        floor = 3 * 2 * problem.shape.n * problem.shape.d * problem.shape.v / 680e9 if planned is None else planned()
        clock = 1 + 0.02 * (plan.chunks.rows % 3)  # of floor and method alike
        ms = true_ms(bench.framework, problem.shape, mode, plan)
        figures = {"floor_ms": clock * floor, "ms": clock * ms, "ratio": ms / floor, "status": "ok"}
        return {**figures, "err_d_weight": 1e-3}

    def plan_of(framework: str, shape: Any, mode: Any) -> Any:
        x, w = fit_chunk_cost.arrays(framework, *sizes(shape))
        return of_h200(framework, x, w, sweep.budget_of(mode), sweep.METHODS[framework]).plan

    def true_ms(framework: str, shape: Any, mode: Any, plan: Any) -> float:
        choices = fit_chunk_cost.choices(framework, "h200", *sizes(shape), sweep.budget_of(mode), plan.chunks.rows)
        return next(choice for choice in choices if choice.division == Division.of_plan(plan)).ms(TRUE)

    explain = sweep.explain

    def of_h200(framework: str, input: Any, weight: Any, budget: int, method: str) -> Any:
        return explain(framework, input, weight, budget, method, "h200")

    monkeypatch.setattr(linear_ce, "open_bench", open_bench)
    monkeypatch.setattr(linear_ce, "measure_safely", measure)
    monkeypatch.setattr(sweep, "explain", of_h200)
    return ahead


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
            assert len({Division.of_row(row) for row in of_mode}) == len(of_mode)
            for row in of_mode:
                chunk_rows, first_rows = Division.of_row(row)
                assert row["chunks"] == (first_rows > 0) + -(-(SHAPES[name].n - first_rows) // chunk_rows)
                assert row["budget"] == {"train": 512 * MIB, "tight": 256 * MIB}[mode]
                assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
                assert (row["commit"], row["method"], row["framework"]) == (
                    "c0ffee",
                    sweep.METHODS[framework],
                    framework,
                )
    gemma = {Division.of_row(row) for row in rows if (row["shape"], row["mode"]) == ("gemma2-2b", "tight")}
    fewest = Division({"torch": 464, "jax": 512}[framework])
    assert {Division(384, 2048), fewest} < gemma  # the choice, and the fewest chunks

    assert fit_chunk_cost.main([str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"    ('h200', '{framework}'): CostCoefficients(" in printed
    assert float(printed.split("worst choice: ")[1].split("%", maxsplit=1)[0]) <= 100 * chunk_cost.TIE

    assert sweep.main([*common, "--shapes", "llama3-8b", "--modes", "tight", "--rows", "512", "700"]) == 0
    printed = capsys.readouterr().out
    assert "700 rows: no plan has chunks of so many" in printed
    assert "512 rows x 16" in printed
    again = [*common, "--shapes", "llama3-8b", "--modes", "tight", "--rows", "512", "--resume"]
    assert sweep.main(again) == 0
    printed = capsys.readouterr().out
    assert "512 rows x 16" not in printed
    assert "the plan chooses 1024 rows, " in printed  # by the rows of the file
    # The estimate chose other tiles of d_input for these rows then.
    content = json.loads(file.read_text())
    of_llama = {"shape": "llama3-8b", "mode": "tight", "chunk_rows": 512}
    [row] = [row for row in content["rows"] if of_llama.items() <= row.items()]
    row["d_input"]["tile_rows"] = 64
    file.write_text(json.dumps(content))
    assert sweep.main(again) == 0
    assert "512 rows x 16" in capsys.readouterr().out


def test_the_programs_of_all_rows_are_compiled_ahead(stub: list[Program], tmp_path: Path) -> None:
    file = tmp_path / "jax.json"
    common = ["--framework", "jax", "--shapes", "llama3-8b", "gemma2-2b", "--most", "3", "--json", str(file)]
    assert sweep.main([*common, "--compile-jobs", "2", "--modes", "train"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 6
    assert sorted((program.shape.name, program.mode.name, program.rows) for program in stub) == sorted(
        (row["shape"], row["mode"], row["chunk_rows"]) for row in rows
    )
    assert {program.method for program in stub} == {"mosaic"}
    stub.clear()
    assert sweep.main([*common, "--compile-jobs", "2", "--resume"]) == 0
    assert {program.mode.name for program in stub} == {"tight"}


def test_rows_are_relative_to_the_choice_of_the_plan(
    stub: list[Program], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "jax-sweep.json"
    shapes = ("llama3-8b", "gemma2-2b", "gpt2-n256")
    common = ["--framework", "jax", "--shapes", *shapes, "--json", str(file), "--most", "3", "--floor", "plan"]
    assert sweep.main([*common, "--compile-jobs", "2", "--beside"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("nothing to compare: the plan considers only") == 2  # one chunk has all rows
    rows = json.loads(file.read_text())["rows"]
    for name, mode in product(shapes[:2], ("train", "tight")):
        of_call = [row for row in rows if (row["shape"], row["mode"]) == (name, mode)]
        assert len(of_call) == 2
        [planned] = {Division.of_row(row["plan"]) for row in of_call}
        assert planned not in [Division.of_row(row) for row in of_call]
        plan = fit_chunk_cost.made_plan("jax", "h200", *sizes(SHAPES[name]), of_call[0]["budget"])
        assert planned == Division.of_plan(plan)
        assert {(row["floor"], row["note"]) for row in of_call} == {("plan", sweep.BESIDE)}
        programs = [program.rows for program in stub if (program.shape.name, program.mode.name) == (name, mode)]
        assert programs == [None if planned.first_rows else planned.rows, *(row["chunk_rows"] for row in of_call)]
        best = min(1.0, *(row["ratio"] for row in of_call))
        assert f"the plan chooses {planned}, {100 * (1 / best - 1):.1f}% slower than the best" in printed
    assert len(rows) == 8
    assert len(sweep.with_plans(rows)) == 12
    stub.clear()
    assert sweep.main([*common, "--resume", "--compile-jobs", "2"]) == 0
    assert not stub
    # Another choice of the plan is another floor.
    content = json.loads(file.read_text())
    content["rows"][0]["plan"]["chunk_rows"] += 1
    file.write_text(json.dumps(content))
    assert sweep.main([*common, "--resume", "--compile-jobs", "2"]) == 0
    assert len(stub) == 2
    capsys.readouterr()
    assert fit_chunk_cost.main([str(file), "--check"]) in (0, 1)
    table = capsys.readouterr().out
    assert table.count("| 3 | ") == 4  # the plan's choice and two others of each
    # Rows beside the matmuls are not compared with these.
    usual = ["--framework", "jax", "--shapes", "llama3-8b", "--json", str(file), "--most", "2", "--modes", "train"]
    assert sweep.main(usual) == 0
    capsys.readouterr()
    assert fit_chunk_cost.main([str(file), "--check"]) in (0, 1)
    table = capsys.readouterr().out
    assert (table.count("| llama3-8b | 512 | 2 | "), table.count("| llama3-8b beside ")) == (1, 2)
    assert table.count("| 3 | ") == 4
    with pytest.raises(SystemExit):
        sweep.parse(["--framework", "torch", "--shapes", "smoke", "--floor", "plan"])
    assert "--floor plan is for JAX" in capsys.readouterr().err


@pytest.mark.usefixtures("stub")
def test_a_choice_of_the_plan_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(*_: Any) -> str:
        raise MemoryError("no memory")

    outcomes = [no_memory, lambda *_: "err_loss is 1.0", lambda *_: None, lambda *_: None]
    monkeypatch.setattr(linear_ce, "wrong_errors", lambda *given: outcomes.pop(0)(*given))
    file = tmp_path / "jax-sweep.json"
    common = ["--framework", "jax", "--shapes", "llama3-8b", "gemma2-2b", "--json", str(file), "--most", "2"]
    assert sweep.main([*common, "--floor", "plan"]) == 1
    printed = capsys.readouterr().out
    assert "the choice of the plan: MemoryError: no memory" in printed
    assert "the choice of the plan: err_loss is 1.0" in printed
    assert {row["shape"] for row in json.loads(file.read_text())["rows"]} == {"gemma2-2b"}


def test_a_program_that_is_compiled_ahead_has_the_rows_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked, built = jax_methods.METHODS["chunked"], []
    shape, mode = SHAPES["smoke"], MODES["train"]

    def build(mode: Any) -> Callable[..., Any]:
        x, w = sweep.arrays("jax", *sizes(shape))
        built.append(sweep.explain("jax", x, w, sweep.budget_of(mode), "mosaic", "h200").plan.chunks.rows)
        return chunked.build(mode)

    monkeypatch.setattr(jax_methods, "METHODS", {"mosaic": replace(chunked, build=build)})
    for rows in (96, 48):
        found = jax_programs.compile_ahead(Program(shape, "bfloat16", "mosaic", mode, rows))
        assert found.line.startswith(f"smoke, train, mosaic, {rows} rows: ")
        assert (found.data is not None) or "not kept" in found.line
    assert built == [96, 48]


@pytest.mark.parametrize(
    ("framework", "jobs", "message"),
    [("torch", "2", "--compile-jobs is for JAX"), ("jax", "-1", "--compile-jobs must not be negative, got -1")],
)
def test_wrong_compile_jobs_are_refused(
    framework: str, jobs: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sweep.parse(["--framework", framework, "--shapes", "smoke", "--compile-jobs", jobs])
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("stub")
def test_the_choice_of_the_plan_and_the_fewest_chunks_are_always_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a file that has a row of another command. That row stays. The plan has a first chunk of other rows."""
    file = tmp_path / "torch.json"
    usual = {**SHAPES["gemma2-2b"].of_row(), "dtype": "bfloat16", "targets": "peaked", "mode": "tight"}
    usual |= {"method": "triton", "status": "ok", "ms": 1.0}
    results.ResultFile(file, "NVIDIA H200", {"torch": "1"}, "c0ffee").add(usual)
    common = ["--framework", "torch", "--shapes", "gemma2-2b", "--modes", "tight", "--json", str(file)]
    assert sweep.main([*common, "--most", "2"]) == 0
    assert "the plan chooses 2048 rows, then 384, 0.0% slower than the best" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [(row.get("chunk_rows"), row.get("first_rows")) for row in rows] == [(None, None), (384, 2048), (464, None)]
    results.ResultFile(file, "NVIDIA H200", {"torch": "1"}, "c0ffee").add({**usual, "ms": 2.0})
    assert [row.get("chunk_rows") for row in json.loads(file.read_text())["rows"]] == [384, 464, None]
    with pytest.raises(SystemExit):
        sweep.parse([*common, "--most", "1"])
    assert "--most must be at least 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.parse([*common, "--modes", "half-ignored"])
    file.write_text(file.read_text().replace("NVIDIA H200", "NVIDIA A100"))
    with pytest.raises(SystemExit, match=r"--json must name a file of NVIDIA H200, got .* of NVIDIA A100"):
        sweep.main(common)


@pytest.mark.usefixtures("stub")
def test_only_rows_of_the_newest_code_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "jax-sweep.json"
    common = ["--framework", "jax", "--shapes", "llama3-8b", "gemma2-2b", "--json", str(file)]
    assert sweep.main([*common, "--modes", "tight", "--most", "3"]) == 0
    content = json.loads(file.read_text())
    for row in content["rows"]:
        if row["shape"] == "gemma2-2b":
            row |= {"code_hash": "of older kernels", "date": "2026-01-01T00:00:00+00:00"}
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert fit_chunk_cost.main([str(file), "--check"]) == 0
    printed = capsys.readouterr().out
    assert "h200, jax: 3 rows of older code dropped" in printed
    assert "h200, jax: 3 rows\n" in printed
    assert "gemma2-2b" not in printed
    assert fit_chunk_cost.main([str(file), "--check", "--all-code"]) == 0
    assert "h200, jax: 6 rows\n" in capsys.readouterr().out


@pytest.mark.usefixtures("stub")
def test_a_choice_that_is_too_slow_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "torch-sweep.json"
    common = ["--framework", "torch", "--shapes", "llama3-8b", "--modes", "tight", "--json", str(file)]
    assert sweep.main([*common, "--most", "3"]) == 0
    content = json.loads(file.read_text())
    for row in content["rows"]:
        row["ratio"] *= 1.3 if row["chunk_rows"] == 1024 else 1  # the choice
    file.write_text(json.dumps(content))
    assert fit_chunk_cost.main([str(file), "--check"]) == 1
    assert "a choice is more than 2% slower than the best row measured" in capsys.readouterr().out


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
    start = COEFFICIENTS["h200", framework]
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


def test_only_the_named_coefficients_are_fitted() -> None:
    start = COEFFICIENTS["h200", "torch"]
    fitted = fit_chunk_cost.fit(made_up("torch", start._replace(narrow=40.0, chunk=100.0)), start, ("narrow",))
    assert fitted == start._replace(narrow=fitted.narrow)
    assert fitted.narrow > start.narrow


def test_a_first_chunk_is_chosen_where_it_saves_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ("gemma2-2b", *sizes(SHAPES["gemma2-2b"]), 256 * MIB)
    choices = fit_chunk_cost.choices("torch", "h200", *group[1:], 384)
    rows = [fit_chunk_cost.Sample(group, choice, 1.0) for choice in choices]
    assert str(fit_chunk_cost.choice_of(rows, COEFFICIENTS["h200", "torch"]).choice.division) == "2048 rows, then 384"
    monkeypatch.setattr(chunk_cost, "FIRST_CHUNK_GAIN", 0.5)
    assert not fit_chunk_cost.choice_of(rows, COEFFICIENTS["h200", "torch"]).choice.division.first_rows


def test_a_shape_whose_matmuls_are_slower_does_not_change_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    """A factor of all rows of a shape, such as a lower clock, counts little."""
    start = COEFFICIENTS["h200", "jax"]
    rows = [
        row._replace(ms=row.ms * (1.03 if row.group[0] == "qwen2.5-0.5b" else 1.0)) for row in made_up("jax", start)
    ]
    fitted = fit_chunk_cost.fit(rows, start)
    assert fitted.multiply == pytest.approx(start.multiply, rel=0.03)
    assert fit_chunk_cost.report(("h200", "jax"), rows, fitted) < 0.6
    assert "within a shape and budget: 0." in capsys.readouterr().out


def test_rows_of_the_fewest_chunks_and_rows_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_chunk_cost, "chose_fewest", lambda commit: commit == "old")
    shape = SHAPES["gemma2-2b"]
    row = {**shape.of_row(), "dtype": "bfloat16", "targets": "peaked", "mode": "tight", "method": "mosaic"}
    row |= {"status": "ok", "ratio": 1.1, "floor_ms": 43.0, "commit": "old"}
    others: list[dict[str, Any]] = [{"dtype": "float16"}, {"status": "failed"}, {"mode": "eval"}, {"commit": "new"}]
    others += [{"chunk_rows": 700, "code_hash": "any", "date": "2026"}, {"method": "chunked"}]
    file = tmp_path / "jax.json"
    file.write_text(json.dumps({"device": "NVIDIA H200", "rows": [row, *({**row, **other} for other in others)]}))
    assert fit_chunk_cost.main([str(file)]) == 1
    printed = capsys.readouterr().out
    assert "has no plan with 700 rows any more" in printed
    assert "no rows to fit to" in printed
    assert fit_chunk_cost.main([str(file), "--fewest", "--check"]) == 0
    printed = capsys.readouterr().out
    assert f"{file}: 1 rows are not of a commit known to choose the fewest chunks: left out" in printed
    assert "h200, jax: 1 rows" in printed
    assert "| gemma2-2b | 256 | 1 | 512 rows | 512 rows | 0.0% |" in printed


def test_a_commit_without_an_estimate_chose_the_fewest_chunks(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "linear_ce").mkdir()
    commits = []
    for name in ("chunking.py", "chunk_cost.py"):
        (tmp_path / "linear_ce" / name).touch()
        git("add", "linear_ce")
        git("commit", "--quiet", "--message", name)
        commits.append(results.commit(root=tmp_path))
        assert commits[-1] == git("rev-parse", "HEAD")
    expected = [True, False, False, False]
    names = [*commits, f"{commits[0]}-dirty", "0" * 40]
    assert [fit_chunk_cost.chose_fewest(commit, tmp_path) for commit in names] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; benchmarks.sweep writes it"),
        ('{"rows": []}', "no results of benchmarks.sweep, which have a device and rows"),
        ("{", "not JSON"),
    ],
)
def test_a_file_that_cannot_be_fitted_to_is_named(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "torch-sweep.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        fit_chunk_cost.main([str(file)])
    assert f"{file}: {message}" in capsys.readouterr().err


def test_the_estimate_of_a_choice_takes_other_coefficients() -> None:
    choice = made_up("torch", TRUE)[0].choice
    assert isinstance(choice, Choice)
    assert choice.ms() == chunk_cost.call_ms(*choice)
    assert choice.ms(choice.call.coefficients._replace(multiply=30.0)) > 2 * choice.ms()


# Calls whose choice is more than 2% slower than the best row of the sweep.
SLOWER = {
    ("h200", "torch"): set[tuple[str, str]](),
    ("h100", "torch"): {("falcon-7b", "tight"), ("gemma-2b", "tight"), ("minicpm-2b", "tight")},
    ("h200", "jax"): set[tuple[str, str]](),
}


@pytest.mark.parametrize(
    ("gpu", "framework", "least"), [("h200", "torch", 264), ("h100", "torch", 264), ("h200", "jax", 200)]
)
def test_the_choices_of_the_plan_are_as_fast_as_the_best_rows_of_the_sweep(
    gpu: str, framework: str, least: int
) -> None:
    """The rows of one code that has the choice of the plan count, the newest such. Where the sweep does not have the
    choice, the time of the grid counts."""
    calls: dict[tuple[str, str], list[dict[str, Any]]] = {}
    grid: dict[tuple[str, str], float] = {}
    folder = results.RECORDED.parent / gpu
    for name in ("grid", "sweep"):
        for row in sweep.with_plans(json.loads((folder / f"{framework}-{name}.json").read_text())["rows"]):
            if (row["method"], row["status"]) != (sweep.METHODS[framework], "ok"):
                continue
            call = row["shape"], row["mode"]
            if row.get("chunk_rows") is None:
                grid[call] = min(row["ratio"], grid.get(call, row["ratio"]))
            else:
                calls.setdefault(call, []).append(row)
    slower = set[tuple[str, str]]()
    for call, rows in calls.items():
        n, d, v = (rows[0][name] for name in ("n", "d", "v"))
        plan = fit_chunk_cost.made_plan(framework, gpu, n, d, v, sweep.budget_of(MODES[call[1]]))
        planned = [row for row in rows if sweep.Division.of_row(row) == sweep.Division.of_plan(plan)]
        if framework == "torch":  # in JAX the rows of a chunk decide the tiles
            planned = [row for row in planned if (row["d_input"] or {}).get("tile_rows") == plan.chunks.d_input_rows]
        chosen, others = grid.get(call), rows
        if planned:
            newest = max(planned, key=lambda row: row["date"])
            chosen = newest["ratio"]
            others = [row for row in rows if all(row.get(name) == newest.get(name) for name in ("code_hash", "plan"))]
        elif any(row.get("floor") == sweep.PLAN for row in rows):
            chosen = None  # ratios to another choice are not those of the grid
        assert chosen is not None
        if chosen > 1.02 * min(row["ratio"] for row in others):
            slower.add(call)
    assert len(calls) >= least
    assert slower == SLOWER[gpu, framework]
