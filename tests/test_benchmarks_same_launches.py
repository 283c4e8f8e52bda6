"""Tests of `benchmarks.same_launches`, which compares what two commits launch, and of `--resume` with its results."""

import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks import jax_launches, jax_ptx, results, same_launches
from benchmarks.chunk_rows import preferring
from benchmarks.launch_recorder import launch_of
from benchmarks.same_launches import Step, bare, compare, difference
from benchmarks.shapes import MODES, Shape
from benchmarks.torch_launches import Steps, code_of, steps_and_launches
from jax_pallas.hopper_common import COMPILER
from jax_pallas.triton_launch import arange, load, run, store

H100, H200 = results.COMPARED_GPUS
VERSIONS = {"torch": "1", "triton": "2"}
SMALL = Shape("small", 1024, 128, 5000)


def recorded(shape: Shape = SMALL, gpu: str = H200) -> list[Step]:
    return [step for step, _ in steps_and_launches(shape, MODES["train"], gpu)]


def kernel_names(steps: list[Step]) -> list[str]:
    return [step["kernel"].removeprefix("core_triton.") for step in steps]


def test_torch_compile_traces_functions_that_were_replaced_while_a_call_was_recorded() -> None:
    assert recorded()
    factories = torch.compile(
        lambda: torch.arange(3) + torch.full((3,), 2) + torch.zeros(3), fullgraph=True, backend="eager"
    )
    assert factories().tolist() == [2, 3, 4]


def test_equal_code_gives_equal_steps() -> None:
    steps = recorded()
    assert difference(steps, recorded()) is None
    names = kernel_names(steps)
    assert names[:2] == ["row_kernels.row_weights_kernel", "row_kernels.pack_kernel"]
    assert {"hopper_logits.exponentials_kernel", "hopper_gradients.d_weight_kernel"} < {*names}
    assert names[-1] == "row_kernels.scale_kernel"
    assert "'IN_PLACE': True" in steps[-1]["constexprs"]
    assert steps[-1]["d_input_ptr"] == steps[-1]["new_d_input_ptr"]
    assert "0x" not in json.dumps(steps)  # an address would differ in another process


def test_operators_of_pytorch_and_matmuls_of_the_library_are_steps() -> None:
    unaligned = recorded(Shape("unaligned", 300, 100, 1001))  # TMA cannot read its rows
    assert kernel_names(unaligned).count("matmul") == 2
    operators = [step for step in unaligned if step["kernel"] == "aten.new_zeros.default"]
    assert operators[0]["arguments"].startswith("(('torch.bfloat16 [300, 100], strides [100, 1], from 0 of array")
    steps = Steps()
    steps.multiplied(torch.empty(64, 32), torch.empty(64, 16), torch.empty(16, 32)[:, 1:], first=True)
    matmul = {"kernel": "matmul", "total": "torch.float32 [64, 32], strides [32, 1], from 0 of array 0"}
    matmul |= {"a": "torch.float32 [64, 16], strides [16, 1], from 0 of array 1"}
    matmul |= {"b": "torch.float32 [16, 31], strides [32, 1], from 1 of array 2", "first": "True"}
    assert steps.found == [(matmul, None)]


def test_another_choice_of_chunks_is_a_difference() -> None:
    with preferring(512):
        chosen = recorded()
    found = difference(recorded(), chosen)
    assert found is not None
    assert found.startswith("launch 1, core_triton.row_kernels.pack_kernel: ")


@pytest.mark.parametrize(
    ("key", "value", "change"),
    [
        ("num_warps", "16", "num_warps 8 -> 16"),
        ("tokens", "i32 1008", "tokens i32 1024 -> i32 1008"),
        ("code", "other", "code absent -> other"),
        ("grid", "(2,)", "grid (1,) -> (2,)"),
    ],
)
def test_the_first_difference_is_named(key: str, value: str, change: str) -> None:
    old, new = recorded(), recorded()
    new[0] |= {key: value}
    new[1] |= {key: value}
    assert difference(old, new) == f"launch 0, core_triton.row_kernels.row_weights_kernel: {change}"
    call = json.dumps({"call": "small, train", "steps": old})
    other = json.dumps({"call": "small, train", "steps": new})
    assert compare([call, call], [call, other]).differences == [f"small, train: {difference(old, new)}"]
    assert len(compare([call], [call, call]).differences) == 1


def test_constexprs_explain_a_difference_and_make_none() -> None:
    """What they change is in the code."""
    step = {"kernel": "k", "grid": "(1,)", "constexprs": "{'OLD': 1}", "code": "a"}
    assert difference([step], [{**step, "constexprs": "{}"}]) is None
    assert difference([step], [{**step, "constexprs": "{}", "code": "b"}]) == (
        "launch 0, k: constexprs {'OLD': 1} -> {}; code a -> b"
    )


def test_the_order_and_the_number_of_arguments_and_launches_count() -> None:
    step = {"kernel": "k", "grid": "(1,)", "a": "1", "b": "1"}
    assert difference([step], [{**step, "c": "1"}]) == "launch 0, k: c absent -> 1"
    swapped = dict(sorted(step.items(), reverse=True))
    assert difference([step], [swapped]) == "launch 0, k: the order of the arguments"
    assert difference([step], [step, step]) == "1 -> 2 launches"


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def kernel(out_ptr, n, FACTOR: tl.constexpr):
    at = tl.arange(0, 128)
    tl.store(out_ptr + at, at * FACTOR, mask=at < n)
"""


def test_the_hash_of_ptx_covers_instructions_and_not_lines(tmp_path: Path) -> None:
    def code(text: str, name: str, **more: Any) -> str:
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        values = {"FACTOR": 3, **more}
        out = torch.empty(128, dtype=torch.int32)
        return code_of(launch_of(module.kernel, (out, 100), values))

    first = code(KERNEL, "first")
    moved = KERNEL.replace("    at =", "    # A comment.\n    at =").replace(
        "\n@triton", "\n\n# Further down.\n\n@triton"
    )
    assert code(moved, "moved") == first
    switch = KERNEL.replace("FACTOR: tl.constexpr", "FACTOR: tl.constexpr, DOUBLES: tl.constexpr")
    switch += "    if DOUBLES:\n        tl.store(out_ptr, 2)\n"
    assert code(switch, "switch", DOUBLES=False) == first
    assert code(switch.replace("DOUBLES: tl.constexpr", "DOUBLES: tl.constexpr = False"), "default") == first
    assert code(switch, "switch_on", DOUBLES=True) != first
    assert code(KERNEL, "factor", FACTOR=5) != first
    assert code(KERNEL.replace("def kernel", "def other") + "\nkernel = other\n", "name") != first


def test_bare_ptx_has_no_lines_of_a_debugger() -> None:
    code = ".visible .entry k(\n$L__BB0_1:\n\tadd.s32 \t%r1, %r2, 1;\n}"
    lines = "//\n.visible .entry k(\n$L__func_begin0:\n\t.loc\t1 2 0 // a.py:2:0\n\n$L__BB0_1:\n$L__tmp0:\n"
    debug = '\t.file\t1 "a.py"\n\t.section\t.debug_abbrev\n\t{\n.b8 1\n\t}\n'
    assert bare(f"{lines}\tadd.s32 \t%r1, %r2, 1; // a sum\n}}\n{debug}") == bare(code)
    with pytest.raises(AssertionError):
        bare(f"{code}\n{debug}{code}")


def test_resuming_keeps_rows_of_code_that_launches_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SAME_LAUNCHES", tmp_path / "same.json")
    row = {"shape": "llama3-8b", "dtype": "bfloat16", "targets": "peaked", "mode": "train", "method": "triton"}
    row |= {"framework": "torch", "code_hash": "c"}
    gpus, versions = (H100, H200, "NVIDIA A100-SXM4-80GB"), VERSIONS | {"numpy": "2"}
    files = {gpu: results.ResultFile(None, gpu, versions, "c0ffee") for gpu in gpus}
    others = [{"method": "triton_sm80"}, {"dtype": "float16"}, {"mode": "none"}, {"shape": "v16384"}]
    for file in files.values():
        for other in ({}, *others):
            file.add({**row, **other, "code_hash": "a", "status": "ok"})
        assert not file.holds(row)
    same_launches.add({"old": "b", "new": "c", "versions": VERSIONS}, "torch")
    same_launches.add({"old": "x", "new": "y", "versions": VERSIONS}, "torch")
    same_launches.add({"old": "a", "new": "b", "versions": VERSIONS | {"triton": "3"}}, "torch")  # another compiler
    assert not files[H200].holds(row)
    same_launches.add({"old": "a", "new": "b", "versions": VERSIONS}, "torch")
    assert results.same_code("torch", "c", VERSIONS, "any call") == {"a", "b", "c"}
    assert results.same_code("torch", "c", {"torch": "1"}, "any call") == {"c"}
    assert results.same_code("jax", "c", VERSIONS, "any call") == {"c"}
    assert [file.holds(row) for file in files.values()] == [True, True, False]
    assert not files[H200].holds({**row, "code_hash": "y"})
    for other in others:  # not compared
        assert not files[H200].holds({**row, **other})
        assert files[H200].holds({**row, **other, "code_hash": "a"})


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_versions_are_those_of_recorded_rows(framework: str) -> None:
    """`2.11.0` is not `2.11.0+cu130`, so pairs with it would keep no row."""
    names = same_launches.versions_of(framework)
    assert names == {name: __import__(name).__version__ for name in names}
    for file in results.RECORDED.parent.glob(f"*/{framework}-grid.json"):
        assert names.keys() <= json.loads(file.read_text())["versions"].keys()


def test_only_compared_calls_of_jax_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SAME_LAUNCHES", tmp_path / "same.json")
    monkeypatch.setattr(results, "RECORDED", tmp_path / "h200")
    versions = {"jax": "1", "jaxlib": "2"}
    row = {"shape": "llama3-8b", "dtype": "bfloat16", "targets": "peaked", "mode": "train", "method": "mosaic"}
    row |= {"framework": "jax", "status": "ok", "code_hash": "a"}
    file = results.ResultFile(tmp_path / "h200" / "jax-grid.json", H200, versions, "c0ffee")
    for other in ({}, {"mode": "tight", "code_hash": "x"}, {"method": "bf16-logits"}, {"shape": "v16384"}):
        file.add({**row, **other})
    calls = results.recorded_calls("jax", "a", versions)
    assert calls == [f"llama3-8b, train, {H200}"]
    same_launches.add({"old": "a", "new": "b", "versions": versions, "only": calls}, "jax")
    file.add({**row, "mode": "tight"})  # measured later, so not compared
    assert file.holds({**row, "code_hash": "b"})
    assert not file.holds({**row, "mode": "tight", "code_hash": "b"})
    assert results.recorded_calls("jax", "b", versions) == calls


def test_steps_of_a_program_of_jax_are_its_kernels() -> None:
    """The tests of single kernels record each twice, and find no difference."""
    found = jax_launches.steps_of(SMALL, MODES["train"], H200)
    names = [step["kernel"] for step in found]
    assert '__gpu$xla.gpu.triton "finish_rows_kernel"' in names
    assert names.count("mosaic_gpu_v2 ") >= 3
    assert names[-1] == "the program"
    assert difference(found, [*found[:-1], {**found[-1], "code": "other"}]) is not None


@pytest.mark.slow
def test_a_program_of_jax_has_the_same_steps_again() -> None:
    found = jax_launches.steps_of(SMALL, MODES["train"], H200)
    assert difference(found, jax_launches.steps_of(SMALL, MODES["train"], H200)) is None


def lowered(function: Any, *dims: tuple[int, ...], modules: Path | None = None) -> list[Step]:
    """Returns the steps of a function of float32 arrays on an H200."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in dims]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(H200, 1, "gpu"))):
        program = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).compiler_ir()
    return jax_launches.steps_in(program, modules)


def chosen_kernel(options: tuple[bool, float], x_ref: Any, out_ref: Any) -> None:
    swapped, least = options
    at = arange(0, 8)
    x = load(x_ref, at, mask=at < 8)
    zeros = jnp.zeros(8) if swapped else None
    raised = jax.lax.max(x, jnp.float32(least))
    zeros = jnp.zeros(8) if zeros is None else zeros
    store(out_ref, at, values=jnp.where(at < 4, raised, zeros), mask=at < 8)


def test_where_a_constant_is_written_makes_no_other_code_of_a_triton_kernel() -> None:
    """XLA canonicalizes before it does anything else."""

    def steps(*options: Any) -> list[Step]:
        result = jax.ShapeDtypeStruct((8,), jnp.float32)
        return lowered(lambda x: run(chosen_kernel, options, (x,), (result,), (1,), stages=1)[0], (8,))

    assert difference(steps(False, 1.0), steps(True, 1.0)) is None
    assert str(difference(steps(False, 1.0), steps(True, 3.0))).startswith(
        'launch 0, __gpu$xla.gpu.triton "chosen_kernel": code '
    )
    with mock.patch.object(jax_launches, "CANONICAL", ""):  # as it comes from JAX, it differs
        assert difference(steps(False, 1.0), steps(True, 1.0)) is not None


def copies(folder: Path, *, steps: bool = False, more: int = 1, block: int = 0) -> list[Step]:
    """Returns the steps of a kernel of Mosaic that copies a block of an array, to shared memory and from it.

    Args:
        folder: of the kernel.
        steps: index the shared memory in two steps.
        more: buffers of shared memory that nothing uses.
        block: copied.
    """

    def body(x_ref: Any, out_ref: Any, buffers: Any, barrier: Any, *_: Any) -> None:
        slot = jax.lax.axis_index("program")
        buffer = buffers.at[slot].at[1] if steps else buffers.at[slot, 1]
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(64 * block, 64)], buffer, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, out_ref.at[pl.ds(64 * slot, 64)])
        plgpu.wait_smem_to_gmem(0)

    buffers = plgpu.SMEM((2, 2, 64, 32), jnp.float32)
    scratch = [buffers, plgpu.Barrier(), *[plgpu.SMEM((128,), jnp.float32)] * more]
    call = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128, 32), jnp.float32), scratch_types=scratch, grid=(2,),
        grid_names=("program",), compiler_params=COMPILER,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    return lowered(call, (128, 32), modules=folder)


def as_line(steps: list[Step]) -> str:
    return json.dumps({"call": "a call", "steps": steps})


def test_kernels_of_mosaic_are_compiled_if_nothing_else_differs(tmp_path: Path) -> None:
    one, two, more = copies(tmp_path), copies(tmp_path, steps=True), copies(tmp_path, more=2)
    assert difference(one, copies(tmp_path)) is None
    kept = {file.name for file in tmp_path.iterdir()}
    codes = [steps[0]["code"] for steps in (one, two, more)]
    assert kept == {*codes}
    assert len(kept) == 3
    assert same_launches.unequal_codes([as_line(one)], [as_line(one)], kept) == []
    assert same_launches.unequal_codes([as_line(one)], [as_line(two)], kept) == sorted(codes[:2])
    assert same_launches.unequal_codes([as_line(one)], [as_line(two)], {codes[0]}) == []
    for changed in (two[:1], [two[0], {**two[1], "code": "other"}], [{**two[0], "with": "other"}, two[1]]):
        assert same_launches.unequal_codes([as_line(one)], [as_line(changed)], kept) == []
    found = compare([as_line(one)] * 2, [as_line(two), as_line(more)], {codes[0]: "ptx", codes[1]: "ptx"})
    assert found.same == ["a call"]
    assert found.differences == [f"a call: launch 0, mosaic_gpu_v2 : code ptx -> {codes[2]}"]
    host = [jax_ptx.host_code((tmp_path / code).read_bytes()) for code in codes]
    assert host[0] == host[1]
    assert host[0] != host[2]  # the host asks for more shared memory


@pytest.mark.slow
def test_an_index_in_two_steps_is_the_same_ptx(tmp_path: Path) -> None:
    forms: Any = ({}, {"steps": True}, {"more": 2}, {"block": 1})
    one, two, more, other = (copies(tmp_path, **form)[0]["code"] for form in forms)
    compiled = same_launches.compiled_codes(tmp_path, [one, two, more, other])
    assert compiled[one] == compiled[two]
    assert len({*compiled.values()}) == 3


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(SystemExit, match="must be a commit, got no-such-commit"):
        same_launches.main(["no-such-commit"])
