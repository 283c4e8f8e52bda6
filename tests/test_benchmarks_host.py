"""The modes of host time and of CUDA graphs on a CPU: what they report, not how fast anything is."""

import json
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from torch.nn import functional as F

from benchmarks import host, jax_methods, linear_ce, results, tables, torch_host, torch_methods
from benchmarks.methods import Method
from benchmarks.shapes import CALL_MODES, DEFAULT_SHAPES, OBJECTIVE_MODES, SHAPES, plan
from benchmarks.torch_bench import TorchBench
from benchmarks.torch_host import HostBench, Steps, identity_operator
from benchmarks.trace import Work, by_gap, by_kernel, jax_work, summary, torch_work


def run(framework: str, folder: Path, modes: list[str]) -> list[dict[str, Any]]:
    file = folder / f"{framework}.json"
    common = ["--framework", framework, "--device", "cpu", "--shapes", "smoke", "--seconds", "0", "--pairs", "2"]
    assert linear_ce.main([*common, "--modes", *modes, "--json", str(file)]) == 0
    return json.loads(file.read_text())["rows"]


def torch_loss(mode: Any) -> Any:
    return lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y)


def test_calls_take_turns_for_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    calls: list[str] = []

    def step(name: str, seconds: float) -> None:
        nonlocal now
        calls.append(name)
        now += seconds

    monkeypatch.setattr(host.time, "perf_counter", lambda: now)
    steps = {"a": partial(step, "a", 0.02), "b": partial(step, "b", 0.01)}
    timed = host.time_in_turns(steps, lambda: None, 1.0, with_total={"b"})
    assert [name for name, _ in groupby(calls)] == ["a", "b"] * host.ROUNDS
    for samples in timed["a"].samples:
        assert len(samples) in (10, 11)
        assert samples == pytest.approx([20.0] * len(samples))
    assert timed["a"].totals == []
    assert "total_ms" not in timed["a"].figures()
    assert len(timed["b"].totals) == host.ROUNDS


def test_figures_are_medians_over_rounds() -> None:
    """A fast round has more samples, and must not count more."""
    fast, slow = [0.3] * 90, [0.6] * 45
    loss = host.Timed([fast, fast, slow, slow, slow], [])
    identity = host.Timed([[0.1] * 100, [0.1] * 100, *[[0.2] * 50] * 3], [2.0, 1.0, 3.0])
    assert loss.figures()["host_ms"] == pytest.approx(0.6)
    assert loss.figures()["host_ms_p20"] == pytest.approx(0.3)
    assert identity.figures()["total_ms"] == pytest.approx(2.0)
    assert loss.above(identity) == pytest.approx(0.4)


def test_every_call_mode_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = [
        torch_methods.METHODS["floor"],
        Method("mine", "ours", torch_loss, takes_budget=True, host=True),
        Method("theirs", "peer", torch_loss, host=True),
        Method("slow", "peer", torch_loss),
    ]
    monkeypatch.setattr(torch_methods, "METHODS", {method.name: method for method in methods})
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(TorchBench, "captured", lambda self, run: run)
    budgets = iter([1.0, 2.0, 4.0, 9.0])

    def traced(self: HostBench, step: Any) -> dict[str, Any]:
        return {"main_launches": next(budgets), "kernels": 7.0}

    rows = run("torch", tmp_path, ["host", "host-eval", "host-compile", "graph", "graph-eval"])
    printed = capsys.readouterr().out
    assert "host ms" in printed
    assert "floor ms" in printed
    assert "traced after all times" not in printed
    monkeypatch.setattr(HostBench, "_traced", traced)
    monkeypatch.setattr(HostBench, "_traces", True)
    rows += run("torch", tmp_path, ["host-chunks"])[-1:]
    of = {(row["mode"], row["method"]): row for row in rows}
    names = {mode: {method for other, method in of if other == mode} for mode in CALL_MODES}
    assert names["host"] == names["host-eval"] == {"mine", "theirs"}
    assert names["host-chunks"] == names["host-compile"] == {"mine"}
    assert names["graph"] == names["graph-eval"] == {"floor", "mine", "theirs"}
    for (mode, _), row in of.items():
        assert row["status"] == "ok", row["note"]
        assert row["framework"] == "torch"
        assert row["method"] == "floor" or row["err_loss"] < 2e-3
        if mode.startswith("graph"):
            assert row["ratio"] > 0
        else:
            assert row["host_ms"] > 0
            assert row["total_ms"] > 0
            assert row.keys() >= {*host.MEASURED}
            assert row["graph_ms"] is None
    assert of["host", "mine"]["graph_note"] == "CUDA graphs need a GPU"
    for key in ("grad_total_ms", "one_thread_host_ms", "one_thread_total_ms"):
        assert of["host", "mine"][key] > 0
        assert of["host-eval", "mine"][key] is None
    compiled, chunks = of["host-compile", "mine"], of["host-chunks", "mine"]
    assert [run["chunks"] for run in chunks["chunk_runs"]] == [1, 2, 4, 9]
    for kind in ("", torch_host.ONE_THREAD):
        assert compiled[kind + "identity_ms"] > 0
        assert compiled[kind + "above_identity_ms"] is not None
        assert chunks[kind + "chunk_ms"] is not None
    assert compiled["graph_note"] == "CUDA graphs need a GPU"
    assert "traced after all times" in capsys.readouterr().out


def test_host_time_of_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_methods, "METHODS", {"bf16-logits": jax_methods.METHODS["bf16-logits"]})
    rows = run("jax", tmp_path, ["host", "graph"])
    of = {row["mode"]: row for row in rows}
    row = of["host"]
    assert row["status"] == "ok", row["note"]
    assert min(row[key] for key in ("host_ms", "total_ms", "lower_s", "compile_s")) > 0
    assert row["trace_note"] == "no GPU is measured"
    assert row["framework"] == "jax"
    assert of["graph"]["note"] == "XLA builds the CUDA graphs of a program"
    compiled = jax.jit(lambda x: x + 1)
    assert compiled.lower(1.0).compile({"xla_gpu_enable_command_buffer": ""})(1.0) == 2


def test_the_identity_operator_has_the_gradients_of_a_loss() -> None:
    x, w, y = torch.ones(4, 3), torch.ones(5, 3), torch.zeros(4, dtype=torch.int64)
    identity = identity_operator()
    steps = Steps(lambda x, w, y: identity(x, w, y, 0), (x, w, y), CALL_MODES["host"])
    d_x, d_w = steps.grad()
    assert (d_x.shape, d_w.shape, steps.step().shape) == (x.shape, w.shape, ())
    assert steps._x.grad is not None
    operator: Any = torch.ops.linear_ce_benchmarks.nothing_backward.default
    torch.library.opcheck(operator, (torch.ones(()), x, w), test_utils=("test_schema", "test_faketensor"))


def test_a_busy_node_has_the_gradients_of_a_loss_and_keeps_the_gpu_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    x, w, y = torch.ones(4, 3), torch.ones(5, 3), torch.zeros(4, dtype=torch.int64)
    bench = HostBench(False, lambda run, calls: 2.0, linear_ce.Timing(0, 0, 0), trace=False)
    monkeypatch.setattr(HostBench, "_graph", lambda self, steps: {"graph_ms": 0.5})
    d_x, d_w = Steps(torch_host.bare_node(7), (x, w, y), CALL_MODES["host"]).grad()
    assert (d_x.shape, d_w.shape, slept.pop()) == (x.shape, w.shape, 7)
    mine = Method("mine", "ours", torch_loss)
    program = SimpleNamespace(arguments=(x, w, y), program=torch_loss(None))
    for mode in ("host", "host-compile"):
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        figures, _ = bench.figures(program, mine, CALL_MODES[mode])  # pyright: ignore[reportArgumentType]
        assert slept
        assert {*slept} == {torch_host.SLEEP_CYCLES // 4}  # 2 ms make SLEEP_CYCLES
        slept.clear()
        for thread in ("", torch_host.ONE_THREAD):
            assert figures[thread + "busy_identity_ms"] > 0
            assert thread + "above_busy_identity_ms" in figures


def test_a_further_chunk_is_the_difference_by_chunks() -> None:
    bench = HostBench(True, lambda run, calls: 1.0, linear_ce.Timing(0, 0, 0), trace=True)
    chunks = {"0": 2.0, "2": 6.0}
    bench._traced = lambda step: {"main_launches": step(), "kernels": 9.0}
    steps: Any = {name: SimpleNamespace(step=partial(float, count)) for name, count in chunks.items()}
    timed = {
        name: host.Timed([[ms]] * host.ROUNDS, [])
        for name, ms in (("0", 1.0), ("2", 1.2), ("one_thread_0", 0.5), ("one_thread_2", 0.9))
    }
    runs: list[dict[str, Any]] = [{}, {"note": "too small"}, {}]
    figures = bench._traced_chunks(runs, steps, timed)
    assert figures["chunk_ms"] == pytest.approx(0.05)
    assert figures["one_thread_chunk_ms"] == pytest.approx(0.1)
    assert [run["chunks"] for run in runs] == [2.0, None, 6.0]


def test_a_budget_that_is_too_small_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(mode: Any) -> Any:
        def loss(x: Any, w: Any, y: Any) -> Any:
            if mode.memory_budget is not None:
                raise ValueError("memory_budget must be at least 5 bytes")
            return torch_loss(mode)(x, w, y)

        return loss

    x, w, y = torch.ones(4, 3), torch.ones(5, 3), torch.zeros(4, dtype=torch.int64)
    bench = HostBench(False, lambda run, calls: 1.0, linear_ce.Timing(0, 0, 0), trace=False)
    figures, later = bench._chunks((x, w, y), Method("mine", "ours", build), CALL_MODES["host-chunks"])
    assert later is None
    assert figures["trace_note"] == "no GPU is measured"
    assert len(figures["chunk_runs"]) == 1 + len(torch_host.CHUNK_SHARES)
    assert "at least 5 bytes" in figures["chunk_runs"][-1]["note"]


def test_a_trace_gives_kernels_device_time_and_gaps() -> None:
    work = [
        Work("gemm", 0, 10, True),
        Work("small", 12, 2, True),
        Work("Memset", 13, 3, False),  # overlaps for 1
        Work("gemm", 20, 10, True),
        Work("small", 20, 2, True),  # on another stream
    ]
    figures = summary(work, 2)
    assert (figures["kernels"], figures["copies"]) == (2, 0.5)
    assert figures["device_ms"] == pytest.approx((10 + 4 + 10) / 2000)
    assert figures["gap_ms"] == pytest.approx((2 + 4) / 2000)
    assert (figures["main_kernel"], figures["main_launches"]) == ("gemm", 1)
    assert summary([], 1)["device_ms"] == summary([], 1)["gap_ms"] == 0
    gaps = by_gap(work, 2)
    assert [(gap["after"], gap["before"], gap["times"]) for gap in gaps] == [
        ("Memset", "gemm", 0.5),
        ("gemm", "small", 0.5),
    ]
    assert [gap["ms"] for gap in gaps] == pytest.approx([0.002, 0.001])
    assert results.gaps({"by_gap": gaps, "gap_ms": 0.003, "device_ms": 0.012}).splitlines() == [
        "      0.002 ms    0.5 x  between Memset and gemm",
        "      0.001 ms    0.5 x  between gemm and small",
        "      0.003 ms in all gaps, 0.012 ms of work",
    ]
    kernels = by_kernel(work, 2)
    assert [(each["name"], each["launches"]) for each in kernels] == [("gemm", 1), ("small", 1), ("Memset", 0.5)]
    assert [each["ms"] for each in kernels] == pytest.approx([0.01, 0.002, 0.0015])
    assert results.kernels({"by_kernel": kernels}).splitlines() == [
        "      0.010 ms    1.0 x  gemm",
        "      0.004 ms    1.5 x  shorter ones",
        "      0.013 ms    2.5 x  all",
    ]

    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 2},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 4, "dur": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    assert torch_work({"traceEvents": events}) == [Work("gemm", 1.5, 2, True), Work("Memset", 4, 1, False)]

    def line(name: str, *names: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, events=[SimpleNamespace(name=each, start_ns=2000, duration_ns=500) for each in names]
        )

    planes = [
        SimpleNamespace(
            name="/device:GPU:0", lines=[line("Stream #7(Compute)", "gemm", "MemcpyD2D"), line("XLA Ops", "dot")]
        ),
        SimpleNamespace(name="/host:CPU", lines=[line("Stream", "python")]),
    ]
    assert jax_work(planes) == [Work("gemm", 2, 0.5, True), Work("MemcpyD2D", 2, 0.5, False)]


def test_the_calls_that_are_measured_without_naming_shapes() -> None:
    assert DEFAULT_SHAPES.keys() == (OBJECTIVE_MODES | CALL_MODES).keys()
    items = plan(modes=["host", "graph"])
    names = [shape.name for shape, mode, _ in items if mode.name == "host"]
    assert names == ["h-4096-512-8192", "h-1024-768-50257", "h-2048-2048-32000", "qwen2.5-0.5b"]
    for name in names[:3]:
        shape = SHAPES[name]
        assert name == f"h-{shape.n}-{shape.d}-{shape.v}"
    graphs = [(shape.n, shape.d, shape.v) for shape, mode, _ in items if mode.name == "graph"]
    assert len(graphs) == 12
    assert (512, 1024, 32000) in graphs
    together = [shape.name for shape, *_ in plan(["seed", "long"], ["host", "graph"])]
    assert together == ["seed", "seed", "long", "long"]


def test_host_rows_are_printed() -> None:
    row = dict.fromkeys(host.MEASURED) | {"method": "mine", "status": "ok", "host_ms": 0.25, "lower_s": 1.0}
    assert "0.250" in results.line(row)
    assert len(results.heading(host=True).split()) > 10


def test_tables_have_milliseconds_beside_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"shape": "seed", "n": 16384, "d": 4096, "v": 128256, "dtype": "bfloat16", "targets": "peaked"}
    timed = {"mode": "train", "method": "mine", "status": "ok", "ms": 75.0, "floor_ms": 74.0, "ratio": 1.0135}
    hosted = {"mode": "host", "method": "mine", "status": "ok", "host_ms": 0.3, "kernels": 19.0}
    failed = {"mode": "train", "method": "theirs", "status": "failed", "ms": None}
    path = tmp_path / "torch.json"
    rows = [{**common, **row} for row in (timed, failed, hosted)]
    path.write_text(json.dumps({"device": "H200", "versions": {"torch": "2.11"}, "rows": rows}))
    tables.main(["--json", str(path)])
    printed = capsys.readouterr().out
    assert "| method | ms | floor, ms | x floor |" in printed
    assert "| mine | 75.00 | 74.00 | 1.014 |" in printed
    assert "| mine | 0.300 | 19 |" in printed
    assert "theirs" not in printed
    tables.main(["--json", str(path), "--modes", "host"])
    assert "75.00" not in capsys.readouterr().out
