"""--compile-jobs: programs that other processes compile before they are measured."""

import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable

from benchmarks import jax_bench, jax_methods, jax_programs, linear_ce
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
    bench: Any = SimpleNamespace(
        compile_ahead=lambda programs, jobs: compiled.append([program.shape.name for program in programs])
    )
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


def test_wrong_uses_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        linear_ce.main(["--framework", "torch", *SMOKE, "--methods", "chunked", "--compile-jobs", "2"])
    assert "--compile-jobs is for JAX" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        linear_ce.main(["--framework", "jax", *SMOKE, "--compile-jobs", "-1"])
    assert "--compile-jobs must not be negative, got -1" in capsys.readouterr().err
