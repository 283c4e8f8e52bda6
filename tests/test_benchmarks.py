"""Tests what the benchmark reports, on a CPU. Nothing here depends on speed."""

import json
from collections.abc import Iterable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import data, linear_ce, results, tables
from benchmarks.methods import ERRORS, GRADIENT_BOUND, ROW_ERRORS, Method, check_errors, row_figures
from benchmarks.shapes import MODES, PLAN, SHAPES, plan
from benchmarks.timing import MAX_PAIRS, MIN_PAIRS, Pairs, Sensor, pair_count
from parity.report import to_json
from parity.tolerances import FACTOR, GRADIENT_FLOOR, row_errors

KEYS = {
    *("shape", "n", "d", "v", "dtype", "targets", "mode", "method", "ms", "ms_p20", "ms_p80", "floor_ms", "ratio"),
    *("peak_bytes", "workspace_bytes", "kind", *ERRORS, *ROW_ERRORS, "commit", "date"),
}


def run(framework: str, folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Runs the command on the smoke shape. Returns its exit status and the rows of its file."""
    file = folder / f"{framework}.json"
    common = ["--framework", framework, "--device", "cpu", "--shapes", "smoke", "--seconds", "0", "--pairs", "2"]
    status = linear_ce.main([*common, "--json", str(file), *arguments])
    return status, json.loads(file.read_text())["rows"]


@pytest.mark.parametrize(
    ("framework", "modes", "others"),
    [
        pytest.param("torch", MODES, ["eager", "eager-float32-logits"], id="torch"),
        pytest.param("jax", MODES, ["checkpointed-scan"], id="jax"),
        pytest.param("torch", ["lean", "eval", "frozen-weight"], ["eager"], id="torch, three modes"),
    ],
)
def test_every_mode_runs_end_to_end(
    framework: str, modes: Iterable[str], others: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(framework, tmp_path, "--modes", *modes, "--methods", "floor", "chunked", *others)
    assert status == 0
    for row in rows:
        assert row.keys() >= KEYS
        assert row["status"] == "ok", row["note"]
        assert row["ms"] > 0
        assert row["joules"] is None
        assert row["joules_note"] == "no GPU is measured"
        mode = MODES[row["mode"]]
        if row["kind"] == "floor":
            assert row["err_loss"] is None
            continue
        assert row["repeats"]
        assert row["err_loss"] < 2e-3
        for name, needed in (("err_d_input", mode.d_input), ("err_d_weight", mode.d_weight)):
            assert (row[name] is not None) == needed
            figures = [row[key] for key in ROW_ERRORS if key.startswith(name)]
            assert len(figures) == 2
            assert all((figure is not None) == needed for figure in figures)
            assert not needed or 5e-4 < row[name] < 5e-3  # only bfloat16 rounding
    measured = {(row["mode"], row["method"]) for row in rows}
    assert {mode for mode, _ in measured} == {*modes}
    assert ("lean", "chunked") in measured
    assert ("lean", others[0]) not in measured  # it has no budget
    assert "times say nothing" in capsys.readouterr().out


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_random_targets_and_float32(framework: str, tmp_path: Path) -> None:
    status, rows = run(
        framework, tmp_path, "--targets", "random", "--dtype", "float32", "--methods", "chunked", "floor"
    )
    chunked = next(row for row in rows if row["method"] == "chunked")
    assert status == 0
    assert chunked["err_d_weight"] < 1e-5
    assert chunked["mean_loss"] == pytest.approx(data.expected_loss(0, 64, 1000), abs=0.5)


@pytest.mark.parametrize(
    ("framework", "exact", "rounded"),
    # On a CPU, XLA keeps float32 logits where "bf16-logits" rounds them.
    [("torch", "eager-float32-logits", ["eager"]), ("jax", "float32-logits-rounded-gradient", [])],
)
def test_sharp_logits_show_what_rounded_logits_cost(
    framework: str, exact: str, rounded: list[str], tmp_path: Path
) -> None:
    kinds, methods = list(data.DEVIATIONS), ("chunked", exact, *rounded)
    status, rows = run(framework, tmp_path, "--targets", *kinds, "--methods", *methods)
    assert status == 0
    of = {(row["targets"], row["method"]): row for row in rows}
    assert set(of) == set(product(kinds, methods))
    for targets, key in product(kinds, ROW_ERRORS):
        least = of[targets, exact][key]
        assert of[targets, "chunked"][key] <= FACTOR * least + GRADIENT_FLOOR["bfloat16"]
        if key.startswith("err_d_weight"):
            assert all(of[targets, method][key] > 2 * least for method in rounded)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_row_errors_equal_those_of_parity(framework: str) -> None:
    import jax.numpy as jnp
    import torch

    from benchmarks import jax_bench, torch_bench

    rng = np.random.default_rng(0)
    want = rng.standard_normal((50, 8)).astype(np.float32) * np.exp(rng.standard_normal((50, 1))).astype(np.float32)
    want[7] = 0
    got = want + 1e-2 * rng.standard_normal(want.shape).astype(np.float32)
    if framework == "torch":
        errors = torch_bench._row_errors(torch.tensor(got), torch.tensor(want))
    else:
        of_rows, norms = map(np.asarray, jax_bench._row_errors(jnp.array(got), jnp.array(want)))
        errors = of_rows[norms > 0]
    found = row_figures("d_weight", errors)
    assert tuple(found) == ("err_d_weight_class_median", "err_d_weight_class_p95")
    assert tuple(found.values()) == pytest.approx(tuple(row_errors(got, want)), rel=1e-5)
    assert row_figures("d_input", errors[:0]) == {"err_d_input_row_median": 0, "err_d_input_row_p95": 0}


def test_what_cannot_run_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import torch_methods

    def crashes(mode: Any) -> Any:
        raise MemoryError("no room for the logits")

    def is_wrong(mode: Any) -> Any:
        loss = torch_methods.METHODS["eager"].build(mode)
        return lambda x, w, y: 1.5 * loss(x, w, y)

    methods = [
        torch_methods.METHODS["F.linear_cross_entropy"],
        Method("absent", "peer", lambda mode: import_absent()),
        Method("crashes", "peer", crashes),
        Method("is-wrong", "peer", is_wrong),
        Method("eager", "peer", torch_methods.METHODS["eager"].build),
    ]
    monkeypatch.setattr(torch_methods, "METHODS", {method.name: method for method in methods})
    status, rows = run("torch", tmp_path)
    of = {row["method"]: row for row in rows}
    assert status == 0  # only other libraries failed
    assert (of["absent"]["status"], of["absent"]["ms"]) == ("skipped", None)
    assert "no_such_module" in of["absent"]["note"]
    assert of["crashes"]["note"] == "MemoryError: no room for the logits"
    assert of["is-wrong"]["status"] == "failed"
    assert of["is-wrong"]["err_loss"] == pytest.approx(0.5, rel=0.01)
    assert of["is-wrong"]["ms"] is None
    assert of["eager"]["status"] == "ok"
    printed = capsys.readouterr().out
    assert "no room for the logits" in printed
    assert "not timed: err_loss is 0.5, above the sanity bound" in printed

    monkeypatch.setattr(torch_methods, "METHODS", {"ours": Method("ours", "ours", crashes)})
    assert run("torch", tmp_path)[0] == 1


def import_absent() -> Any:
    from benchmarks.methods import load

    return load("no_such_module")


def test_plan_measures_what_matters_first_and_only_named_rows_on_request() -> None:
    first = [(shape.name, mode.name, targets) for shape, mode, targets in plan()]
    assert first == list(PLAN)
    assert first[0] == ("llama3-8b", "train", "peaked")
    assert {("llama3-8b", "lean", "peaked"), ("seed", "roomy", "peaked"), ("qwen2.5-0.5b", "eval", "peaked")} <= set(
        first
    )
    asked = [(shape.name, mode.name) for shape, mode, _ in plan(["gemma2-2b", "seed"], ["eval", "train"])]
    assert asked == [("gemma2-2b", "train"), ("seed", "train"), ("gemma2-2b", "eval"), ("seed", "eval")]
    with pytest.raises(ValueError, match=r"modes must be among train, .* got fast"):
        plan(modes=["fast"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "tiny"], "--shapes must be among .* got tiny"),
        (["--methods", "magic"], "--methods must be among floor, .* got magic"),
    ],
)
def test_unknown_names_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        linear_ce.main(["--framework", "torch", "--device", "cpu", *arguments])


def test_leans_give_a_trained_models_loss() -> None:
    for name in ("llama3-8b", "qwen2.5-0.5b", "gemma2-2b"):
        shape = SHAPES[name]
        top = data.lean_max(shape.d, shape.v, "peaked")
        assert data.expected_loss(top, shape.d, shape.v) == pytest.approx(5, abs=1e-6)
        assert data.expected_loss(0, shape.d, shape.v) == pytest.approx(np.log(shape.v) + 0.5, abs=1e-3)
        data.check_loss(5.1, 1024, shape.d, shape.v, "peaked")
        with pytest.raises(ValueError, match=r"peaked.*got 12\.10"):
            data.check_loss(12.1, 1024, shape.d, shape.v, "peaked")
    assert data.lean_max(64, 1000, "random") == 0
    rng = np.random.default_rng(0)
    for targets, deviation in data.DEVIATIONS.items():
        assert data.lean_max(64, 1000, targets) == 0
        lse = np.log(np.exp(deviation * rng.standard_normal((2000, 1000))).sum(1))
        assert data.expected_loss(0, 64, 1000, targets) == pytest.approx(lse.mean(), abs=0.3)
        with pytest.raises(ValueError, match=targets):
            data.check_loss(lse.mean() + 2, 1024, 64, 1000, targets)
    cdf = data.zipf_cdf(1000)
    assert cdf[-1] == pytest.approx(1)
    assert np.diff(cdf, prepend=0).argmax() == 0


def test_errors_past_the_bound_and_nan_are_wrong() -> None:
    sane = {"err_loss": 1e-6, "err_d_input": 3e-3, "err_d_weight": None}
    assert check_errors(sane, "bfloat16") is None
    assert "err_d_input is 0.003" in str(check_errors(sane, "float32"))
    assert "err_loss is nan" in str(check_errors({**sane, "err_loss": float("nan")}, "bfloat16"))
    assert set(GRADIENT_BOUND) == set(linear_ce.DTYPES)


def test_ratios_are_of_adjacent_calls() -> None:
    # The clock rate halves halfway through. The ratio of medians would be wrong, but the median of ratios is right.
    figures = Pairs([10, 10, 20, 20, 20], [11, 11, 22, 22, 22], [(1500.0, 600.0), (1400.0, 650.0)]).figures()
    assert figures["ratio"] == figures["ratio_p20"] == pytest.approx(1.1)
    assert (figures["ms"], figures["floor_ms"], figures["sm_mhz"], figures["power_w"]) == (22, 20, 1450, 625)
    assert pair_count(0, 1) == MIN_PAIRS
    assert pair_count(3, 0.1) == 30
    assert pair_count(0, 1, min_pairs=2) == 2
    assert pair_count(100, 0) == MAX_PAIRS
    assert Sensor(gpu=False).read() == []


def test_result_files_merge_only_what_belongs_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "torch.json"
    row = {"shape": "seed", "dtype": "bfloat16", "targets": "peaked", "mode": "train", "method": "a", "status": "ok"}

    def add(commit: str, *rows: dict[str, Any], versions: str = "2.11") -> list[dict[str, Any]]:
        file = results.ResultFile(path, "H200", {"torch": versions}, commit)
        for new in rows:
            file.add(new)
        return json.loads(path.read_text())["rows"]

    add("one", {**row, "ms": 1.0}, {**row, "method": "b", "ms": float("nan")})
    rows = add("two", {**row, "ms": 2.0})
    assert [(r["method"], r["ms"], r["commit"]) for r in rows] == [("b", None, "one"), ("a", 2.0, "two")]
    assert add("three", {**row, "status": "skipped", "ms": None}) == rows  # a skip does not replace a time
    assert add("four", {**row, "status": "failed", "ms": None})[-1]["status"] == "failed"
    assert json.loads(path.read_text()).keys() == {"device", "versions", "commit", "date", "rows"}
    lines = [line.strip().rstrip(",") for line in path.read_text().splitlines()]
    assert [json.loads(line) for line in lines if "method" in line] == json.loads(path.read_text())["rows"]
    assert len(add("five", row, versions="2.12")) == 1
    assert "2 rows are left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"must name a file of A100, got .*torch\.json of H200"):
        results.ResultFile(path, "A100", {"torch": "2.12"}, "six")
    file = results.ResultFile(path, "H200", {"jax": "0.11"}, "seven")  # of the other framework
    file.add({**row, "framework": "jax", "method": "mosaic"})
    content = json.loads(path.read_text())
    assert (content["versions"], len(content["rows"])) == ({"torch": "2.12", "jax": "0.11"}, 2)


def test_rows_of_row_counts_and_of_other_floors_replace_no_other_rows(tmp_path: Path) -> None:
    usual = {"shape": "seed", "dtype": "bfloat16", "targets": "peaked", "mode": "train", "method": "a", "status": "ok"}
    kinds = [{}, {"chunk_rows": 512}, {"chunk_rows": 1024}, {"floor": "cuBLAS, sm_80"}]
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for ms in (1, 2):
        for path in paths:
            file = results.ResultFile(path, "H200", {}, "c0ffee")
            for kind in kinds:
                file.add({**usual, **kind, "code_hash": "same", "ms": ms})
    assert all(file.holds({**usual, **kind, "code_hash": "same"}) for kind in kinds)
    assert not file.holds({**usual, "chunk_rows": 256, "code_hash": "same"})
    merged = results.merge(tmp_path / "merged.json", paths)
    for rows in (*(json.loads(path.read_text())["rows"] for path in paths), merged):
        assert [(row.get("chunk_rows"), row.get("floor"), row["ms"]) for row in rows] == [
            (None, None, 2),
            (512, None, 2),
            (1024, None, 2),
            (None, "cuBLAS, sm_80", 2),
        ]


@pytest.mark.parametrize("path", sorted(results.RECORDED.glob("*.json")), ids=lambda path: path.name)
def test_recorded_results_have_a_line_for_each_row(path: Path) -> None:
    text = path.read_text()
    assert text == to_json(json.loads(text))


def test_tables_name_packages_and_show_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {
        "shape": "seed",
        "n": 1,
        "d": 2,
        "v": 3,
        "dtype": "bfloat16",
        "targets": "peaked",
        "mode": "train",
        "ms": 2.5,
    }
    rows = [{**old, "method": name, "status": "ok"} for name in ("triton", "mosaic", "pallas_triton", "eager")]
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"device": "H200", "versions": {"torch": "1"}, "rows": rows}))
    tables.main(["--json", str(path)])
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert table[0] == ["| method", "ms |"]
    assert [line[0] for line in table[1:]] == ["| core_triton", "| jax_pallas", "| jax_pallas (Triton)", "| eager"]
    rows[0] |= {"targets": "sharp8", **dict.fromkeys(ROW_ERRORS, 2e-3)}
    path.write_text(json.dumps({"device": "H200", "versions": {"torch": "1"}, "rows": rows}))
    tables.main(["--json", str(path)])
    printed = capsys.readouterr().out
    assert "seed: N 1, D 2, V 3, bfloat16, sharp8 targets, train" in printed
    assert "per-class error of d_weight, 95th percentile" in printed
    assert printed.count("2.0e-03") == 4


@pytest.fixture
def plot() -> Any:
    """The module, which imports matplotlib. Each worker collects this file, and one runs it."""
    return import_module("benchmarks.plot")


def test_plots_show_the_recorded_rows(plot: Any, tmp_path: Path) -> None:
    for framework, names in (("torch", ("triton", "eager")), ("jax", ("mosaic", "float32-logits"))):
        rows = [
            {
                "shape": shape.name,
                "n": shape.n,
                "d": shape.d,
                "v": shape.v,
                "mode": "train",
                "method": method,
                "dtype": "bfloat16",
                "targets": "peaked",
                "kind": kind,
                "ms": ratio * shape.n,
                "ratio": ratio,
                "peak_bytes": None if kind == "floor" else ratio * 1e9,
                "date": "2026-11-24T01:39:30+00:00",
            }
            for shape in (SHAPES["llama3-8b"], SHAPES["seed"], SHAPES["v32000"])
            for method, kind, ratio in (("floor", "floor", 1.0), (names[0], "ours", 1.0), (names[1], "peer", 1.4))
        ]
        content = {"device": "NVIDIA H200", "versions": {framework: "1"}, "rows": rows}
        (tmp_path / f"{framework}.json").write_text(json.dumps(content))
    plot.main(["--json", *(str(path) for path in tmp_path.glob("*.json")), "--out", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        *("time-memory-llama3-8b", "time-memory-seed"),
        *("torch-against-n", "torch-against-v", "jax-against-n", "jax-against-v"),
    }
    (tmp_path / "torch.json").write_text(json.dumps({"device": "x", "versions": {"torch": "1"}, "rows": []}))
    with pytest.raises(ValueError, match="no timed train row"):
        plot.load([tmp_path / "torch.json"])


def test_plots_show_the_newest_row_of_our_methods(plot: Any, tmp_path: Path) -> None:
    first = {"shape": "seed", "mode": "train", "method": "triton", "dtype": "bfloat16", "targets": "peaked"}
    first |= {"kind": "ours", "ms": 4.0, "date": "2026-11-24T01:39:30+00:00"}
    newer = {"ms": 3.0, "date": "2026-11-27T02:40:10+00:00"}
    newest = {"ms": 2.0, "date": "2026-11-29T02:40:10+00:00"}
    peer = {"method": "eager", "kind": "peer"}
    by_name = {
        "torch": [first, first | peer, first | {"shape": "long", "date": "2026-11-28T02:40:10+00:00"}],
        "torch-grid": [
            first | newer,
            first | newest | {"mode": "tight"},
            first | newest | {"shape": "gpt2"},
            first | newer | peer,
            first | newer | {"shape": "long"},
        ],
    }
    for name, rows in by_name.items():
        content = {"device": "NVIDIA H200", "versions": {"torch": "1"}, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    rows, _ = plot.load([tmp_path / "torch.json"])
    assert [(row["shape"], row["method"], row["ms"]) for row in rows] == [
        ("seed", "triton", 3.0),  # of the grid
        ("seed", "eager", 4.0),
        ("long", "triton", 4.0),  # the grid's is older
    ]
    (tmp_path / "torch-grid.json").write_text(json.dumps({"device": "x", "versions": {"torch": "1"}, "rows": []}))
    with pytest.raises(ValueError, match="results must be of one device, got NVIDIA H200, x"):
        plot.load([tmp_path / "torch.json"])


def test_the_plot_of_the_readme_shows_the_rows_of_its_table(plot: Any) -> None:
    methods = {
        "PyTorch, eager": "eager",
        "PyTorch, torch.compile": "torch.compile",
        "Liger 0.8.5, chunk_mem_const=8": "liger-8",
        "quack 0.6.5, chunks of 2,048 rows": "quack-2048",
        "cut-cross-entropy 25.1.1": "cut-cross-entropy",
        "**core_triton**": "triton",
        "JAX, bfloat16 logits": "bf16-logits",
        "JAX, gradients in a scan over rows": "gradient-scan",
        "**jax_pallas**": "mosaic",
    }
    text = (results.ROOT / "README.md").read_text(encoding="utf-8")
    assert "](benchmarks/results/h200/time-memory-llama3-8b.png)" in text
    table = text.split("| | time | ratio | workspace |")[1].split("\n\n")[0].splitlines()[2:]
    rows, _ = plot.load([results.RECORDED / "torch.json", results.RECORDED / "jax.json"])
    of_shape = {row["method"]: row for row in rows if row["shape"] == "llama3-8b"}
    commits = text.split("Commits: ")[1].split("\n\n")[0]
    for line in table:
        name, *figures = line.strip("| ").split(" | ")
        row = of_shape[methods.pop(name)]
        errors = [row["err_d_input"], row["err_d_weight"]]
        shown = [f"{row['ms']:.2f} ms", f"{row['ratio']:.2f}", f"{row['workspace_bytes'] / results.MIB:,.0f} MiB"]
        assert figures == [*shown, *(f"{error:.1e}".replace("e-0", "e-") for error in errors)], name
        assert row["commit"][:7] in commits, name
    assert not methods
