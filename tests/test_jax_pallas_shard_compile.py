"""Compiles the loss for several H200s that divide the vocabulary, without a GPU: what they exchange, what runs beside
it, temporaries within the budget, and kernels that spill no registers.

`python test_jax_pallas_shard_compile.py PROGRAMS` compiles the programs, a JSON list of dicts with the arguments of
`compiled`, and prints a JSON line for each.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_jax_pallas_gpu_compile import GEMMA, LLAMA, QWEN, check_kernels, keep_printed, keeping_toolkit

from benchmarks.jax_ptx import COMPILER
from benchmarks.jax_ptx import environment as gpu_compiler
from jax_pallas import explain, linear_cross_entropy, linear_log_probs, linear_token_loss_with_stats, token_losses
from linear_ce.spec import DEFAULT_MEMORY_BUDGET

HERE = Path(__file__).parent
MATMULS = ("exponentials", "d_input_sums", "d_weight")
LOSSES = ("train", "padded", "float16", "float16 padded", "smoothing", "smoothing padded", "split", "split padded")
LOSSES += ("rounded", "rounded padded")


def dtype_of(mode: str) -> Any:
    return jnp.float16 if "float16" in mode else jnp.bfloat16


def head_dtype_of(mode: str) -> Any:
    return jnp.float32 if "split" in mode or "rounded" in mode else dtype_of(mode)


def precision_of(mode: str) -> dict[str, Any]:
    return {"head_precision": "float32"} if "split" in mode else {}


def arrays_of(mode: str, n: int, d: int, v: int, vocab_axis: int) -> Any:
    """Returns the shapes of the input and of the head of one GPU."""
    w = (v, d)[:: 1 - 2 * vocab_axis]
    return jax.ShapeDtypeStruct((n, d), dtype_of(mode)), jax.ShapeDtypeStruct(w, head_dtype_of(mode))


def compiled(mode: str, shards: int, n: int, d: int, v: int, vocab_axis: int) -> Any:
    """Compiles a call with gradients for so many GPUs. v: rows of one GPU; some of the last are no classes if the mode
    contains "padded". With "tokens" or "head" the GPUs divide the tokens too, and gather these. With "float16" the
    arrays have this dtype, with "smoothing" the call has label smoothing, and with "split" or "rounded" a float32 head
    that is split or rounded."""
    target = (HERE / "targets/h200.pbtxt").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{shards}")
    mesh = topologies.make_mesh(topology, (shards,), ("vocab",))
    options: dict[str, Any] = {"vocab_axis": vocab_axis, "vocab_axis_name": "vocab", "implementation": "mosaic"}
    options |= precision_of(mode)
    head, sizes = (P("vocab"), (shards * v, d)) if vocab_axis == 0 else (P(None, "vocab"), (d, shards * v))

    gather = next((one for one in ("tokens", "head") if one in mode), None)

    def shape(sizes: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    def call(x: jax.Array, w: jax.Array, y: jax.Array) -> Any:
        def loss(x: jax.Array, w: jax.Array) -> Any:
            smoothing = 0.1 if "smoothing" in mode else 0.0
            if gather is not None:
                return linear_cross_entropy(x, w, y, **options, gather=gather, label_smoothing=smoothing)
            if mode in LOSSES:
                classes = shards * v - 47 if "padded" in mode else None
                return linear_cross_entropy(x, w, y, **options, vocab_size=classes, label_smoothing=smoothing)
            if "saved" in mode:
                return linear_cross_entropy(x, w, y, **options, reduction="none", saved_budget=2**34).sum()
            if mode == "log_probs":
                return linear_log_probs(x, w, y, **options).log_prob.sum()
            rows = y.astype(jnp.float32)
            return linear_token_loss_with_stats(x, w, y, token_losses.ppo_clip(), rows, rows, **options)[0]

        return jax.value_and_grad(loss, (0, 1))(x, w)

    rows = P() if gather is None else P("vocab")
    arrays = shape((n, d), dtype_of(mode), rows), shape(sizes, head_dtype_of(mode), head), shape((n,), jnp.int32, rows)
    with jax.set_mesh(mesh):
        body = jax.shard_map(call, mesh=mesh, in_specs=(rows, head, rows), out_specs=(P(), (rows, head)))
        return jax.jit(body).lower(*arrays).compile()


def operations(program: str) -> list[str]:
    """Returns the operations of a compiled program in the order in which they are launched, those of a loop once:
    kernels of this library by their names, collectives with the shapes of their results."""
    computations: dict[str, list[tuple[str, str]]] = {}
    for line in re.sub(r"/\*.*?\*/", "", program).splitlines():
        opening = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if opening is not None:
            found = computations[opening[1]] = []
        operation = re.match(r"\s+(?:ROOT )?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if operation is None:
            continue
        kind = operation[2]
        if kind == "custom-call":
            kernel = re.search(r"op_name=\"[^\"]*?/(\w+)/(?:mpmd_map|pallas_call)", line)
            target = re.search(r'custom_call_target="([^"]*)"', line)
            assert target is not None
            if target[1] != "AllocateBuffer":
                found.append(("", target[1] if kernel is None else kernel[1]))
        elif kind in ("fusion", "while"):  # a kernel is in a fusion with the slice of its operand
            calls = re.search(r"(?:calls|body)=%?([\w.-]+)", line)
            assert calls is not None
            found.append((kind, calls[1]))
        elif re.match("all-|reduce-scatter|collective|dot|send|recv", kind):
            found.append(("", f"{kind} {operation[1]}"))
    called = {name for body in computations.values() for kind, name in body if kind}

    def names(body: list[tuple[str, str]]) -> list[str]:
        return [one for kind, name in body for one in (names(computations[name]) if kind else [name])]

    return [one for name, body in computations.items() if name not in called for one in names(body)]


def main() -> None:
    for program in json.loads(sys.argv[1]):
        executable = compiled(**program)
        temporaries = executable.memory_analysis().temp_size_in_bytes
        found = {"temporaries": temporaries, "operations": operations(executable.as_text())}
        print(json.dumps({**program, **found}), flush=True)


def compile_all(programs: list[dict[str, Any]], kept: Path) -> list[dict[str, Any]]:
    """Returns what `main` prints, and keeps the kernels in a folder."""
    if not COMPILER.is_dir():
        pytest.fail(f"{COMPILER} is missing: run `make test`, which installs it")
    paths = os.pathsep.join([str(HERE.parent), str(COMPILER)])
    kept_by = {"CUDA_ROOT": str(keeping_toolkit(kept)), "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    environment = {**os.environ, **gpu_compiler(), "PYTHONPATH": paths, **kept_by}
    command = [sys.executable, __file__, json.dumps(programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    keep_printed(done.stdout, kept)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"mode"')]


def waits(beside: list[str]) -> bool:
    """Returns whether a kernel waits before the first matmul of `operations`, if there is one."""
    first = next((index for index, name in enumerate(beside) if name in MATMULS), None)
    return first is None or any(name.startswith("let_begin") for name in beside[:first])


def check(mode: str, shards: int, n: int, shape: tuple[int, int], vocab_axis: int, kept: Path) -> None:
    d, rows = shape[0], shape[1] // shards
    program = {"mode": mode, "shards": shards, "n": n, "d": d, "v": rows, "vocab_axis": vocab_axis}
    [found] = compile_all([program], kept)
    options: dict[str, Any] = {"vocab_axis": vocab_axis, "device": "h200", "vocab_axis_name": "vocab"}
    plan = explain(*arrays_of(mode, n, d, rows, vocab_axis), **options, **precision_of(mode)).plan
    assert plan.path == "scaled_exp"
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET
    names = found["operations"]
    counts = Counter(names)
    chunks = counts["d_weight"]
    assert chunks > 1
    assert [counts[name] for name in MATMULS] == [
        chunks + (mode == "log_probs") * (name == "exponentials") for name in MATMULS
    ]
    assert not [name for name in names if "gemm" in name or name.startswith("dot")]
    started = [name for name in names if name.startswith("all-reduce ") or "-start " in name]
    assert not [name for name in names if re.match("all-(?!reduce)|reduce-scatter|collective|send|recv", name)]
    passes = 1 + (mode == "log_probs")
    assert len(started) <= passes + 2 * chunks
    assert not [name for name in started if re.search(rf"\b{rows}\b|\b{shape[1]}\b", name)]  # of logits or the head
    # Each sum of d_input runs beside the matmul of d_weight of the same chunk, and begins before it.
    sums = [index for index, name in enumerate(names) if re.match(rf"all-reduce-start .*f32\[\d+,{d}\]", name)]
    assert len(sums) == chunks
    for index in sums:
        done = next(i for i in range(index, len(names)) if names[i].startswith("all-reduce-done"))
        beside = names[index:done]
        assert "d_weight" in beside
        assert waits(beside)
        assert "{0,1}" not in names[index]  # row by row, or the operations before and after it are slow
    check_kernels(kept, *MATMULS, *(f"{name}_kernel" for name in ("pick", "own_numbers", "finish_rows", "repair")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "shards", "n", "shape", "vocab_axis"),
    [
        ("tokens", 8, 65536, LLAMA, 0),  # a loop over chunks
        ("tokens", 8, 32768, LLAMA, 0),
        ("tokens", 2, 16384, GEMMA, 1),
        ("tokens", 2, 16384, QWEN, 0),
        ("tokens smoothing", 8, 32768, LLAMA, 0),
        ("tokens float16", 8, 32768, LLAMA, 0),
        ("tokens split", 8, 65536, LLAMA, 0),
        ("tokens split", 2, 16384, GEMMA, 1),
        ("tokens rounded", 8, 32768, LLAMA, 0),
    ],
)
def test_tokens_are_gathered_beside_the_chunk_before(
    mode: str, shards: int, n: int, shape: tuple[int, int], vocab_axis: int, tmp_path: Path
) -> None:
    """The rows of the input of a chunk arrive beside the matmul of the logits of the one before, and d_input is summed
    beside the matmul of d_weight. No device has the rows of d_input of all tokens, or, in a long call, of the input."""
    d, rows = shape[0], shape[1] // shards
    program = {"mode": mode, "shards": shards, "n": n, "d": d, "v": rows, "vocab_axis": vocab_axis}
    [found] = compile_all([program], tmp_path)
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET
    names = found["operations"]
    chunks = Counter(names)["d_weight"]
    assert chunks > 1
    assert [Counter(names)[name] for name in MATMULS] == [chunks] * 3
    assert not [name for name in names if "gemm" in name or name.startswith("dot")]
    whole = rf"f32\[{n},{d}\]" if shards == 2 else rf"\[{n},{d}\]"
    assert not [name for name in names if re.search(rf"{whole}|\b{rows}\b", name)]

    def beside(start: str, done: str) -> list[set[str]]:
        """Returns which matmuls run beside each exchange of rows, which begins before them."""
        begun = [index for index, name in enumerate(names) if re.match(rf"{start}-start .*\[\d+,{d}\]", name)]
        ends = [next(i for i in range(index, len(names)) if names[i].startswith(done)) for index in begun]
        spans = [names[index:end] for index, end in zip(begun, ends, strict=True)]
        assert all(waits(span) for span in spans)
        return [{*MATMULS} & {*span} for span in spans]

    assert beside("reduce-scatter", "reduce-scatter-done") == [{"d_weight"}] * chunks
    gathers = [one for one in beside("all-gather", "all-gather-done") if one]
    # Nothing runs beside the first one, beside the second perhaps where chunks are small, and beside those at the end.
    assert gathers == [{"exponentials"}] * len(gathers)
    assert len(gathers) >= chunks - 2 + (chunks == 2)
    check_kernels(tmp_path, *MATMULS, *(f"{name}_kernel" for name in ("pick", "own_numbers", "finish_rows", "repair")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "shards", "n", "shape", "vocab_axis"),
    [
        ("head", 2, 16384, LLAMA, 0),
        ("head", 8, 65536, LLAMA, 0),  # shards of no multiple of 64 classes
        ("head", 2, 262144, LLAMA, 0),  # a loop over chunks
        ("head", 2, 16384, GEMMA, 1),
        ("head float16", 2, 16384, QWEN, 0),
        ("head smoothing", 2, 16384, LLAMA, 0),
        ("head split", 2, 16384, LLAMA, 0),
    ],
)
def test_the_gradient_of_a_gathered_head_is_sent_in_parts(
    mode: str, shards: int, n: int, shape: tuple[int, int], vocab_axis: int, tmp_path: Path
) -> None:
    """A part is summed over the GPUs beside the matmul of d_weight of the next one, and the last part beside that of
    d_input. The memory is that of the gathered head, of its float32 gradient and of the sums."""
    (d, v), hidden = shape, shape[0]
    program = {"mode": mode, "shards": shards, "n": n, "d": d, "v": v // shards, "vocab_axis": vocab_axis}
    [found] = compile_all([program], tmp_path)
    head = jnp.dtype(head_dtype_of(mode)).itemsize * hidden * v
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET + 1.02 * (head + (4 + 4 / shards) * hidden * v)
    names = found["operations"]
    begun = [index for index, name in enumerate(names) if name.startswith("reduce-scatter-start")]
    assert not [name for name in names if name.startswith("reduce-scatter ")]
    parts, counts = len(begun), Counter(names)
    assert parts >= 2
    assert counts["d_weight"] == parts * counts["exponentials"]
    assert counts["part_targets_kernel"] == parts
    for index in begun:
        done = next(i for i in range(index, len(names)) if names[i].startswith("reduce-scatter-done"))
        beside = names[index:done]
        assert ("d_input" if index == begun[-1] else "d_weight") in beside
        first = next(i for i, name in enumerate(beside) if name in ("d_weight", "d_input"))
        assert any(name.startswith("let_begin") for name in beside[:first])
    check_kernels(tmp_path, "exponentials", "d_weight", "d_input", "part_targets_kernel")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "shards", "n", "shape", "vocab_axis"),
    [
        ("saved", 8, 65536, LLAMA, 0),
        ("saved float16", 8, 65536, LLAMA, 0),
        ("saved", 2, 65536, QWEN, 0),
        ("saved", 2, 32768, GEMMA, 1),
    ],
)
def test_what_shards_save(
    mode: str, shards: int, n: int, shape: tuple[int, int], vocab_axis: int, tmp_path: Path
) -> None:
    """Three matmuls. Each sum of d_input runs beside the matmul of the logits of the next chunk; the last one, in this
    program, beside that of d_weight. The saved rows and the workspace are within their budgets."""
    d, rows = shape[0], shape[1] // shards
    program = {"mode": mode, "shards": shards, "n": n, "d": d, "v": rows, "vocab_axis": vocab_axis}
    [found] = compile_all([program], tmp_path)
    options: dict[str, Any] = {"vocab_axis": vocab_axis, "device": "h200", "vocab_axis_name": "vocab"}
    plan = explain(*arrays_of(mode, n, d, rows, vocab_axis), **options, reduction="none", saved_budget=2**34).plan
    assert plan.saved is not None
    assert plan.saved.rows == n
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET + plan.saved.bytes
    names = found["operations"]
    chunks = Counter(names)["d_weight"]
    assert chunks > 1
    assert [Counter(names)[name] for name in MATMULS] == [chunks] * 3
    assert not [name for name in names if "gemm" in name or name.startswith("dot")]
    started = [name for name in names if name.startswith("all-reduce ") or "-start " in name]
    assert len(started) <= 1 + 2 * chunks
    assert not [name for name in started if re.search(rf"\b{rows}\b|\b{shape[1]}\b", name)]  # of logits or the head
    sums = [index for index, name in enumerate(names) if re.match(rf"all-reduce-start .*f32\[\d+,{d}\]", name)]
    assert len(sums) == chunks
    for index in sums:
        done = next(i for i in range(index, len(names)) if names[i].startswith("all-reduce-done"))
        beside = names[index:done]
        assert ("d_weight" if index == sums[-1] else "exponentials") in beside
        assert waits(beside)
        assert "{0,1}" not in names[index]
    if mode == "saved":  # the kernel of the sample of float16 spills with so many rows, without saved rows too
        check_kernels(
            tmp_path, *MATMULS, *(f"{name}_kernel" for name in ("pick", "own_numbers", "finish_rows", "repair"))
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "shards", "n", "shape", "vocab_axis"),
    [
        ("train", 8, 8192, LLAMA, 0),
        ("train", 2, 8192, LLAMA, 0),
        ("train", 2, 8192, GEMMA, 1),
        ("train", 2, 8192, QWEN, 0),
        ("train", 8, 131072, LLAMA, 0),  # a loop over chunks
        ("padded", 2, 8192, LLAMA, 0),
        ("padded", 8, 8192, GEMMA, 1),
        ("float16", 8, 8192, LLAMA, 0),
        ("float16", 2, 8192, QWEN, 0),
        ("float16 padded", 2, 8192, LLAMA, 0),
        ("float16 padded", 8, 8192, GEMMA, 1),
        ("smoothing", 2, 8192, LLAMA, 0),
        ("smoothing padded", 8, 8192, GEMMA, 1),
        ("token_stats", 2, 8192, QWEN, 0),
        ("log_probs", 8, 8192, LLAMA, 0),
        ("split", 8, 8192, LLAMA, 0),
        ("split", 2, 8192, QWEN, 0),
        ("split", 8, 131072, LLAMA, 0),
        ("split padded", 8, 8192, GEMMA, 1),
        ("rounded", 2, 8192, LLAMA, 0),
        ("rounded padded", 8, 8192, GEMMA, 1),
    ],
)
def test_what_shards_exchange_and_hold(
    mode: str, shards: int, n: int, shape: tuple[int, int], vocab_axis: int, tmp_path: Path
) -> None:
    check(mode, shards, n, shape, vocab_axis, tmp_path)


if __name__ == "__main__":
    main()
