"""--compile-jobs: programs that other processes compile before they are measured."""

import json
import multiprocessing
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable

from benchmarks import jax_bench, jax_methods, jax_programs, linear_ce, sweep
from benchmarks.jax_programs import Ahead, compile_in_processes, load
from benchmarks.methods import Program
from benchmarks.shapes import MODES, SHAPES, Shape

SMOKE = ("--device", "cpu", "--shapes", "smoke", "--seconds", "0", "--pairs", "2", "--dtype", "float32")


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_programs_of_other_processes_give_the_same_bits(jobs: int) -> None:
    shape = SHAPES["smoke"]
    programs = [Program(shape, "float32", "chunked", MODES[mode]) for mode in ("train", "none")]
    impossible = Program(shape, "float32", "mosaic", MODES["train"])  # Hopper's kernels take no float32
    *found, failed = compile_in_processes([*programs, impossible], jobs, "cpu")
    assert found[0].line.startswith("smoke, train, chunked: ")
    assert "not compiled: ValueError" in failed.line
    assert failed.data is None
    keys = jax.random.split(jax.random.key(0), 4)
    x, w = jax.random.normal(keys[0], (shape.n, shape.d)), jax.random.normal(keys[1], (shape.v, shape.d))
    y, upstream = jax.random.randint(keys[2], (shape.n,), 0, shape.v), jax.random.normal(keys[3], (shape.n,))
    for program, ahead in zip(programs, found, strict=True):
        assert ahead.data is not None
        loaded = load(ahead.data, jax_methods.METHODS["chunked"], program.mode)
        arguments = x, w, y, upstream if program.mode.reduction == "none" else None
        assert loaded.figures["compile_note"] == "beside other programs"
        assert loaded.program.memory_analysis().temp_size_in_bytes > 0
        for result, expected in zip(loaded.program(*arguments), loaded.call(*arguments), strict=True):
            assert bool(jnp.array_equal(result, expected))


def compile_here(programs: Sequence[Program], jobs: int, platform: str) -> Iterator[Ahead]:
    """Has the results of `compile_in_processes`, and starts no process."""
    return map(jax_programs.compile_ahead, programs)


@pytest.mark.parametrize("compiles", [compile_here, pytest.param(compile_in_processes, marks=pytest.mark.slow)])
def test_rows_use_programs_that_were_compiled_ahead(
    compiles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax_bench, "compile_in_processes", compiles)
    methods = jax_methods.METHODS
    monkeypatch.setattr(jax_methods, "METHODS", methods | {"chunked": replace(methods["chunked"], ahead=True)})
    file = tmp_path / "jax.json"
    names = ["--methods", "floor", "chunked", "bf16-logits", "--compile-jobs", "1", "--json", str(file)]
    assert linear_ce.main(["--framework", "jax", *SMOKE, "--targets", "peaked", "random", *names]) == 0
    assert "compiling 1 programs in 1 processes" in capsys.readouterr().out
    rows = {(row["method"], row["targets"]): row.get("compile_note") for row in json.loads(file.read_text())["rows"]}
    assert rows["chunked", "peaked"] == "beside other programs"
    assert rows["chunked", "random"] == "compiled before"
    assert rows["bf16-logits", "peaked"] != "beside other programs"


def test_the_runtime_of_mosaic_gpu_is_found_before_a_program_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Mosaic(ModuleType):
        def __getattr__(self, name: str) -> None:
            order.append(name)

    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic", Mosaic("jax.experimental.mosaic"))
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", lambda: order.append("load"))
    load(pickle.dumps(((), {})), jax_methods.METHODS["chunked"], MODES["train"])
    assert order.index("gpu") < order.index("load")


def test_a_program_that_cannot_be_loaded_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, mode, method = SHAPES["smoke"], MODES["train"], jax_methods.METHODS["chunked"]
    program = Program(shape, "float32", "chunked", mode)
    arguments = (
        *(jax.ShapeDtypeStruct((rows, shape.d), jnp.float32) for rows in (shape.n, shape.v)),
        jax.ShapeDtypeStruct((shape.n,), jnp.int32),
        None,
    )
    unreadable = Ahead("smoke: 1.0 s, 0.01 MiB", b"no program")
    monkeypatch.setattr(jax_bench, "compile_in_processes", lambda programs, jobs, platform: [unreadable])
    programs = jax_bench.Programs()
    programs.compile_ahead([program], 1, "cpu")
    compiled = programs.of(program, method, arguments)
    assert "smoke, train, chunked: not loaded, so it is compiled again: UnpicklingError" in capsys.readouterr().out
    assert compiled.figures["compile_s"] > 0
    assert compiled.figures["compile_note"] != "beside other programs"
    assert programs.of(program, method, arguments).figures["compile_note"] == "compiled before"


def test_programs_are_compiled_in_batches() -> None:
    """A run that ends early has compiled few programs that it does not measure."""
    compiled: list[list[str]] = []

    def compile_ahead(programs: Sequence[Program], jobs: int, *, beside: bool) -> None:
        compiled.append([program.shape.name for program in programs])

    bench: Any = SimpleNamespace(compile_ahead=compile_ahead)
    items = [
        [Program(Shape(f"{item}.{index}", 1, 1, 1), "bfloat16", "mosaic", MODES["train"]) for index in range(count)]
        for item, count in enumerate((1, 0, 2, 3, 3, 1))
    ]
    ahead = linear_ce.CompileAhead(bench, 1, items)
    ahead.before(0)
    assert compiled == [["0.0", "2.0", "2.1", "3.0", "3.1", "3.2"]]  # until there are 4 for a process
    for item in (2, 3):
        ahead.before(item)
    assert len(compiled) == 1
    ahead.before(4)
    ahead.before(5)
    assert compiled[1:] == [["4.0", "4.1", "4.2", "5.0"]]
    compiled.clear()
    linear_ce.CompileAhead(bench, 0, items).before(0)
    assert compiled == []
    planned: list[int] = []
    ahead = linear_ce.CompileAhead(bench, 1, (planned.append(index) or of_item for index, of_item in enumerate(items)))
    assert planned == [0]
    ahead.before(0)
    assert planned == [0, 1, 2, 3, 4]  # the next batch begins with the last of them
    compiled.clear()
    ahead = linear_ce.CompileAhead(bench, 1, items * 2, beside=True)
    for item, batches in ((0, 2), (3, 2), (4, 3), (5, 3)):  # the next batch is always begun
        ahead.before(item)
        assert len(compiled) == batches
    compiled.clear()
    linear_ce.CompileAhead(bench, 1, [items[3] + items[4], [], [], items[0]], beside=True).before(0)
    assert [len(batch) for batch in compiled] == [6, 1]  # --resume found the rows of two items


def test_rows_are_measured_while_programs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, mode, method = SHAPES["smoke"], MODES["train"], jax_methods.METHODS["chunked"]
    later, batch = (
        [Program(replace(shape, name=name), "float32", "chunked", mode) for name in names]
        for names in (("later",), ("first", "second", "third"))
    )
    measured, begun = threading.Event(), list[str]()

    def compile_slowly(programs: Sequence[Program], jobs: int, platform: str) -> Iterator[Ahead]:
        for program in programs:
            begun.append(program.shape.name)
            if program.shape.name == "second":
                assert measured.wait(10)
            yield Ahead(f"{program.shape.name}: 1.0 s", program.shape.name.encode())

    def loaded(data: bytes, method: Any, mode: Any) -> Any:
        return data.decode()

    monkeypatch.setattr(jax_bench, "compile_in_processes", compile_slowly)
    monkeypatch.setattr(jax_bench, "load", loaded)
    programs = jax_bench.Programs()
    programs.compile_ahead(batch, 1, "cpu", beside=True)
    programs.compile_ahead(later, 1, "cpu", beside=True)
    assert programs.of(batch[0], method, ()) == "first"  # the second is not compiled yet
    programs.stop()
    measured.set()
    monkeypatch.setattr(jax_bench, "compile_call", lambda method, mode, arguments: "here")
    assert [programs.of(program, method, ()) for program in (*batch[1:], *later)] == ["second", "here", "here"]
    assert begun == ["first", "second"]


def test_an_interrupt_ends_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python waits for the thread before it exits, so a batch must not be compiled to its end."""
    begun, interrupted = list[str](), threading.Event()

    def compile_slowly(programs: Sequence[Program], jobs: int, platform: str) -> Iterator[Ahead]:
        for program in programs:
            begun.append(program.shape.name)
            assert interrupted.wait(10)
            yield Ahead(f"{program.shape.name}: 1.0 s", b"")

    def interrupt(future: Future[None]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jax_bench, "compile_in_processes", compile_slowly)
    programs = jax_bench.Programs()
    monkeypatch.setattr(Future, "result", interrupt)
    batch = [Program(Shape(name, 1, 1, 1), "float32", "chunked", MODES["train"]) for name in ("first", "second")]
    with pytest.raises(KeyboardInterrupt):
        programs.compile_ahead(batch, 1, "cpu")
    interrupted.set()
    programs._thread.shutdown()
    assert begun == ["first"]


def test_a_stop_ends_the_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A compilation takes 20 seconds, in which a GPU would wait."""

    def compile_slowly(programs: Sequence[Program], jobs: int, platform: str) -> Iterator[Ahead]:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(abs, 1).result() == 1
            yield from pool.map(time.sleep, [20, 20])  # pyright: ignore[reportReturnType]

    monkeypatch.setattr(jax_bench, "compile_in_processes", compile_slowly)
    programs = jax_bench.Programs()
    batch = [Program(Shape(name, 1, 1, 1), "float32", "chunked", MODES["train"]) for name in ("first", "second")]
    programs.compile_ahead(batch, 1, "cpu", beside=True)
    while not multiprocessing.active_children():
        time.sleep(0.01)
    start = time.monotonic()
    programs.stop()
    programs._thread.shutdown()
    assert time.monotonic() - start < 15
    assert not multiprocessing.active_children()
    assert "not compiled" not in capsys.readouterr().out


def test_a_failed_batch_is_compiled_row_by_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(programs: Sequence[Program], jobs: int, platform: str) -> Iterator[Ahead]:
        raise OSError("no memory for processes")

    monkeypatch.setattr(jax_bench, "compile_in_processes", fails)
    monkeypatch.setattr(jax_bench, "compile_call", lambda method, mode, arguments: "here")
    program = Program(SHAPES["smoke"], "float32", "chunked", MODES["train"])
    programs = jax_bench.Programs()
    programs.compile_ahead([program], 1, "cpu", beside=True)
    assert programs.of(program, jax_methods.METHODS["chunked"], ()) == "here"
    assert "each is compiled when its row comes: OSError: no memory for processes" in capsys.readouterr().out
    with pytest.raises(OSError, match="no memory"):
        jax_bench.Programs().compile_ahead([program], 1, "cpu")


def test_wrong_uses_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        linear_ce.main(["--framework", "torch", *SMOKE, "--methods", "chunked", "--compile-jobs", "2"])
    assert "--compile-jobs is for JAX" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        linear_ce.main(["--framework", "jax", *SMOKE, "--compile-jobs", "-1"])
    assert "--compile-jobs must not be negative, got -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.main(["--framework", "jax", "--device", "cpu", "--shapes", "smoke", "--beside"])
    assert "--beside needs --compile-jobs" in capsys.readouterr().err
