"""--compile-jobs: programs that other processes compile before they are measured."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import jax_methods, linear_ce
from benchmarks.jax_programs import compile_in_processes, load
from benchmarks.methods import Program
from benchmarks.shapes import MODES, SHAPES

SMOKE = ("--device", "cpu", "--shapes", "smoke", "--seconds", "0", "--pairs", "2", "--dtype", "float32")


def test_programs_of_other_processes_give_the_same_bits() -> None:
    shape = SHAPES["smoke"]
    programs = [Program(shape, "float32", "chunked", MODES[mode]) for mode in ("train", "none")]
    impossible = Program(shape, "float32", "mosaic", MODES["train"])  # Hopper's kernels take no float32
    *found, failed = compile_in_processes([*programs, impossible], 2, "cpu")
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


def test_rows_use_programs_that_were_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_wrong_uses_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        linear_ce.main(["--framework", "torch", *SMOKE, "--methods", "chunked", "--compile-jobs", "2"])
    assert "--compile-jobs is for JAX" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        linear_ce.main(["--framework", "jax", *SMOKE, "--compile-jobs", "-1"])
    assert "--compile-jobs must not be negative, got -1" in capsys.readouterr().err
