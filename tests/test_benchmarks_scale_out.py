"""benchmarks.scale_out on two CPU processes or devices, and its arithmetic."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale_out, scale_peers
from benchmarks.scale_model import SIZES, Link, agrees, band, fit, predict
from benchmarks.scale_out import FORMS, Work, in_turns, line, on_each, row_of
from benchmarks.shapes import SHAPES

ROOT = Path(__file__).parent.parent
OPTIONS = ["--device", "cpu", "--shapes", "smoke", "--rounds", "2", "--seconds", "0.01", "--warmup", "0.01"]


def work_of(form: Any, gpus: int = 2) -> Work:
    return Work(form, SHAPES["smoke"], gpus, rounds=4, seconds=0.1, warmup=0.0)


@pytest.mark.parametrize("form", FORMS)
def test_efficiency_is_the_rate_of_a_gpu_relative_to_one_alone(form: str) -> None:
    times = {"blocks": [5.0, 6.0, 4.0], "one_gpu_blocks": [10.0, 9.0, 8.0]}
    row = row_of(work_of(form), "torch", {**times, "workspace_bytes": 1})
    assert (row["ms"], row["one_gpu_ms"], row["speedup"]) == (5.0, 9.0, 2.0)
    assert row["efficiency"] == (1.0 if form == "vocabulary" else 2.0)
    assert work_of(form).all_tokens == SHAPES["smoke"].n * (1 if form == "vocabulary" else 2)
    wrong = row_of(work_of(form), "torch", {"err_d_input": 2e-3, "err_d_weight": 0.2, **times})
    assert (wrong["status"], "ms" in wrong) == ("failed", False)
    assert line(wrong).endswith("smoke: failed: not timed: err_d_weight is 0.2, above the sanity bound 0.1")


def test_rounds_alternate_in_order() -> None:
    order: list[str] = []

    def run(name: str) -> Any:
        return lambda calls: order.append(name) or float(calls)

    found = in_turns(work_of("vocabulary"), run("several"), run("one"), (3, 5))
    assert order == ["several", "one", "one", "several"] * 2
    assert found == {"blocks": [3.0] * 4, "one_gpu_blocks": [5.0] * 4}


def test_each_gpu_is_measured_alone() -> None:
    order: list[str] = []

    def run(name: str) -> Any:
        return lambda calls: order.append(name) or float(calls * len(order))

    found = on_each(work_of("vocabulary"), [run("first"), run("second")], 2)
    assert order == ["first", "second"] * 4
    row = row_of(work_of("vocabulary"), "torch", {"blocks": [5.0], "one_gpu_blocks": [9.0], **found})
    assert row["one_gpu_ms_of_each"] == [8.0, 10.0]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_rows_are_measured_on_two_cpus(framework: str, tmp_path: Path) -> None:
    """In a process of its own, because JAX's number of devices is fixed when it starts. Of the other libraries, those
    that are not installed are skipped."""
    path = tmp_path / "rows.json"
    names = ["loss-parallel", "megatron", "verl", "fsdp2-liger"] if framework == "torch" else []
    methods = ["--methods", "core_triton", *names] if names else []
    command = [sys.executable, "-m", "benchmarks.scale_out", "--framework", framework, *methods]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # like compiling.quick_compilation
    done = subprocess.run(
        [*command, *OPTIONS, "--every-gpu", "--json", str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    every = json.loads(path.read_text())["rows"]
    rows = [row for row in every if "method" not in row]
    others = {row["method"]: row for row in every if "method" in row}
    assert list(others) == names
    assert all(line(row) in done.stdout for row in every if row["form"] == "vocabulary")
    for form, row in zip(FORMS, rows, strict=True):
        assert (row["framework"], row["form"], row["gpus"]) == (framework, form, 2)
        assert len(row["one_gpu_ms_of_each"]) == 2
        for name in ("err_d_input", "err_d_weight"):
            assert 0 < row[name] < 4e-3
            assert form != "vocabulary" or row[name] <= 1.01 * row[f"one_gpu_{name}"]
    for name, row in others.items():
        assert (row["form"], row["gpus"]) == (scale_peers.PEERS[name].form, 2)
        if scale_peers.PEERS[name].needs_gpu:
            assert (row["status"], row["note"]) == ("skipped", f"{name} needs a GPU")
        elif name == "megatron" and importlib.util.find_spec("megatron") is None:
            assert row["status"] == "skipped"
            assert row["note"].endswith("No module named 'megatron'; pip install megatron-core==0.19.2")
        else:
            assert all(0 < row[error] < 4e-3 for error in ("err_d_input", "err_d_weight"))


def test_verl_is_imported_without_what_its_kernels_do_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tmp_path / "verl" / "utils" / "kernel"
    kernels.mkdir(parents=True)
    for folder in (tmp_path / "verl", tmp_path / "verl" / "utils"):
        (folder / "__init__.py").write_text("import ray_is_not_installed")
    (tmp_path / "verl" / "utils" / "device.py").write_text("found = 3")
    (kernels / "__init__.py").write_text("")
    (kernels / "linear_cross_entropy.py").write_text("from verl.utils.device import found as linear_cross_entropy")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert scale_peers._verl_kernels().linear_cross_entropy == 3
        assert scale_peers._verl_kernels().linear_cross_entropy == 3
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]


LINK = Link(0.02, 3e8)


def transfers(link: Link = LINK) -> list[tuple[float, float]]:
    return [(size, link.latency_ms + size / link.bytes_per_ms) for size in map(float, SIZES)]


def test_the_model_finds_latency_and_bandwidth() -> None:
    assert fit(transfers()) == pytest.approx(LINK, rel=0.02)


def test_the_band_is_from_hidden_to_exposed_communication() -> None:
    hidden, exposed = band(10.0, chunks=2, reduced_bytes=6 * 10**8, ranks=4, link=LINK)
    assert hidden == pytest.approx(10.1)
    assert exposed == pytest.approx(10.1 + 1.5 * 2)
    assert agrees(9.9, (hidden, exposed))
    assert agrees(13.4, (hidden, exposed))
    assert not agrees(9.7, (hidden, exposed))
    assert not agrees(13.6, (hidden, exposed))


def test_more_gpus_are_predicted_only_if_two_agree() -> None:
    parts = [
        {"kind": "compute", "shape": "smoke", "ranks": ranks, "chunks": 1, "ms": ms}
        for ranks, ms in ((2, 5.0), (4, 2.5))
    ]
    links = [{"kind": "all-reduce", "bytes": size, "ms": ms} for size, ms in transfers()]
    row = {"framework": "torch", "form": "vocabulary", "gpus": 2, "status": "ok", "shape": "smoke", "one_gpu_ms": 9.8}
    assert "smoke: two GPUs were not measured" in predict(parts + links, [])[1]
    assert "4 GPUs 2.56 to 2.56 ms" in predict(parts + links, [row | {"ms": 5.1}])[1]
    assert "they disagree" in predict(parts + links, [row | {"ms": 6.0}])[1]
    assert "were not measured" in predict(parts + links, [row | {"ms": 5.1, "method": "megatron"}])[1]
    assert predict(parts, [row]) == ["no row of kind all-reduce: run `collectives` on two GPUs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "7"], "--shapes must have classes that 7 GPUs can divide equally, got llama3-8b"),
        (["--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["--shapes", "llama9"], "--shapes must be names of benchmarks/shapes.py, got llama9"),
    ],
)
def test_a_wrong_argument_is_an_error(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale_out.main(arguments)
    assert message in capsys.readouterr().err
