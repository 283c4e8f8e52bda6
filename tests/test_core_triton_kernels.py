"""Compiles the Triton kernels for GPUs that the machine does not have, as calls with the shapes of models launch them.
Also measures the memory of these calls, and runs the scaling kernel on a GPU (mark gpu).

The quick suite compiles one launch of each kernel, with most switches on. `make test-slow` compiles all launches.
"""

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton
from allocations import Meter, bytes_of
from sass import disassemble, innermost_loop, missing_overlap, opcodes
from torch import Tensor
from triton.runtime.jit import JITFunction

import core_triton
from benchmarks.chunk_rows import preferring
from benchmarks.launch_recorder import SHARED_MEMORY, Launch, compile_launch, fake_gpu, launches_of
from benchmarks.shapes import SHAPES, Shape
from core_triton import (
    chunked,
    float16,
    hopper_gradients,
    ops,
    replay,
    row_kernels,
    tile_config,
    token_kernels,
    vocab_shard,
)
from core_triton import token_losses as named_losses
from core_triton.head_scatter import HeadScatter
from core_triton.plan import MatrixLayout, Stage
from core_triton.problem import NOTHING_COMPUTED, Gradients, NeedsGrad, Problem
from core_triton.row_math import Coefficients
from core_triton.scaled_exp import save_rows, saved_gradients, scaled_exp
from core_triton.vocab_shard import VocabShard
from linear_ce.spec import LossSpec
from linear_ce.statistics import BY_ROW, ENTROPY, LSE, MAX, OF_LOGITS

DEFAULT = 512 * 2**20


class Call(NamedTuple):
    """A call of the loss. The tests compile its launches and count its memory.

    Args:
        plan: "train", "stats" (training with the largest logits), "token-stats" (training with all statistics),
        "eval", "eval-stats", "entropy" (evaluation with the entropy), or the backward pass of "none" or "log_probs".
        shape: a name from benchmarks/shapes.py.
        dtype: the dtype of the input.
        head: the dtype of linear_weight. None means `dtype`.
        bias: whether there is a bias.
        transposed: whether linear_weight is a transposed (D, V) array.
        class_weight: whether there are class weights.
        needs_grad: whether d_input and d_weight are computed.
        softcap, smoothing: see LossSpec.
        splits: whether a float32 head is the sum of two matrices: head_precision "float32".
        scale: the logit_scale.
        ranks: of the vocabulary, of which linear_weight is the second shard; 0: linear_weight is the whole head.
        gathers: whether input has the tokens of the second rank, which the ranks gather chunk by chunk.
        sends: the ranks that d_weight is sent to, which gathered the head; 0: it is a result.
    """

    plan: str
    shape: str
    dtype: torch.dtype = torch.bfloat16
    head: torch.dtype | None = None
    bias: bool = False
    transposed: bool = False
    class_weight: bool = False
    needs_grad: tuple[bool, bool] = (True, True)
    softcap: float | None = None
    smoothing: float = 0.0
    implementation: str = "triton"
    splits: bool = False
    scale: float = 1.0
    ranks: int = 0
    gathers: bool = False
    sends: int = 0

    def problem(self) -> Problem:
        """Returns the call's arrays. Nothing reads their contents."""
        shape = SHAPES[self.shape]
        head, rows = self.head or self.dtype, shape.v // max(self.ranks, 1)
        sizes = (shape.d, rows) if self.transposed else (rows, shape.d)
        w, tokens = array(*sizes, dtype=head), shape.n // self.ranks if self.gathers else 0
        return Problem(
            input=array(tokens or shape.n, shape.d, dtype=self.dtype),
            linear_weight=w.T if self.transposed else w,
            linear_bias=array(rows, dtype=head) if self.bias else None,
            target=array(shape.n, dtype=torch.int64),
            row_weight=array(shape.n),
            class_weight=array(shape.v) if self.class_weight else None,
            spec=LossSpec(
                "sum",
                label_smoothing=self.smoothing,
                softcap=self.softcap,
                logit_scale=self.scale,
                head_precision="float32" if self.splits else "input",
            ),
            classes=shape.v,
            vocab_offset=rows if self.ranks else 0,
            shard=VocabShard("", self.ranks, rows, rows, "float32", tokens) if self.ranks else None,
        )

    def scatter(self, problem: Problem) -> HeadScatter | None:
        """Returns what sends d_weight, if it is sent."""
        if not self.sends:
            return None
        w, group = problem.linear_weight, mock.Mock(size=lambda: self.sends)
        return HeadScatter(group, len(w), w[: -(-len(w) // self.sends)])

    def run(self, budget: int = DEFAULT) -> tuple[Tensor | None, ...]:
        """Runs the call and returns the gradients."""
        problem = self.problem()
        needs_grad = NeedsGrad(*self.needs_grad, self.bias and self.needs_grad[1])
        stage, entropy, statistics = STAGES[self.plan]
        stage_needs_grad = NeedsGrad(False, False, False) if stage in ("losses", "statistics") else needs_grad
        plan = ops.plan_for(
            problem, stage, budget, self.implementation, stage_needs_grad, statistics=statistics, entropy=entropy
        )
        problem = replace(problem, plan=plan)
        if stage == "saved_rows":
            saved = save_rows(problem, needs_grad, statistics=statistics)[2]
            head = saved_gradients(problem, saved, problem.row_weight, needs_grad, NOTHING_COMPUTED)
            return saved.unit_d_input, *head[1:]
        if plan.path == "scaled_exp":
            scales = None
            if plan.fits_float16 and stage == "loss_and_gradients":
                scales = float16.scales_of(problem.row_weight)
            options: dict[str, Any] = {"statistics": statistics, "scales": scales, "scatter": self.scatter(problem)}
            with mock.patch.multiple(vocab_shard, **COLLECTIVES):
                found = scaled_exp(problem, stage_needs_grad, **options)[2]
            sent = options["scatter"]
            return found if sent is None else found._replace(d_weight=sent.result)
        if stage == "loss_and_gradients":
            found = chunked.loss_and_gradients(
                ops.tiles_of(plan), problem, plan.chunk_config, needs_grad, (array(), array()), statistics
            )[2]
        elif stage == "losses":
            chunked.losses(ops.tiles_of(plan), problem, plan.chunk_config, statistics)
            return ()
        elif stage == "statistics":
            chunked.row_statistics(ops.tiles_of(plan), problem, plan.chunk_config, statistics)
            return ()
        else:
            row = problem.row_weight
            beta, sigma = row if entropy else None, row if self.smoothing else None
            coefficients = Coefficients(row, row, beta, sigma)
            found = chunked.gradients(ops.tiles_of(plan), problem, plan.chunk_config, row, coefficients, needs_grad)
        return tuple(found)


# Stand-ins that return tensors of the same sizes, without a process group.
COLLECTIVES = {
    "all_sum": lambda tensor, group: tensor,
    "start_all_sum": lambda tensor, group: mock.Mock(),
    "start_gather": lambda result, own, group: mock.Mock(),
    "start_own_sum": lambda own, tensor, group: mock.Mock(),
    "gather": lambda tensor, ranks, group: tensor.new_empty((ranks * len(tensor), *tensor.shape[1:])),
}

# For each plan: the stage, whether it differentiates the entropy, and the statistics that it computes.
STAGES: dict[str, tuple[Stage, bool, int]] = {
    "train": ("loss_and_gradients", False, 0),
    "stats": ("loss_and_gradients", False, MAX),
    "token-stats": ("loss_and_gradients", False, LSE | OF_LOGITS | BY_ROW),
    "eval": ("losses", False, 0),
    "eval-stats": ("losses", False, MAX),
    "entropy": ("statistics", False, LSE | ENTROPY | BY_ROW),
    "rows": ("row_gradients", False, 0),
    "saved": ("saved_rows", False, LSE | ENTROPY | BY_ROW),
    "saved-stats": ("saved_rows", False, MAX),
    "none": ("gradients", False, 0),
    "log_probs": ("gradients", True, 0),
}


def array(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


# Together, these calls launch every kernel with each of its switches on and off.
CALLS = {
    "train": Call("train", "llama3-8b"),
    "train-options": Call("stats", "gemma2-2b", bias=True, softcap=30.0, scale=0.7),
    "train-smoothing": Call(
        "train", "qwen2.5-0.5b", bias=True, softcap=30.0, smoothing=0.1, class_weight=True, scale=0.7
    ),
    "train-long": Call("train", "long"),
    "train-pieces": Call("train", "n4096"),
    "pieces-options": Call("stats", "n4096", bias=True, softcap=30.0, scale=0.7),
    "train-shard": Call("train", "llama3-8b", ranks=2),
    "shard-stats": Call("token-stats", "llama3-8b", bias=True, scale=0.7, ranks=8),
    "shard-transposed": Call("stats", "qwen2.5-0.5b", transposed=True, softcap=30.0, scale=0.7, ranks=4),
    "shard-fp16": Call("stats", "llama3-8b", torch.float16, bias=True, ranks=2),
    "train-gathered": Call("train", "llama3-8b", ranks=2, gathers=True),
    "train-sent": Call("train", "llama3-8b", sends=2),
    "sent-smoothing": Call("train", "qwen2.5-0.5b", smoothing=0.1, class_weight=True, sends=8),
    "train-transposed": Call("train", "qwen2.5-0.5b", transposed=True),
    "stats-transposed": Call("stats", "qwen2.5-0.5b", transposed=True, softcap=30.0),
    "smoothing-transposed": Call("train", "qwen2.5-0.5b", transposed=True, bias=True, softcap=30.0, smoothing=0.1),
    "train-head32": Call("train", "llama3-8b", head=torch.float32, scale=0.7),
    "train-split": Call("train", "llama3-8b", head=torch.float32, splits=True),
    "split-transposed": Call("train", "gemma2-2b", head=torch.float32, splits=True, transposed=True),
    "train-fp16": Call("train", "llama3-8b", torch.float16),
    "options-fp16": Call("stats", "gemma2-2b", torch.float16, bias=True, softcap=30.0, scale=0.7),
    "pieces-fp16": Call("train", "n4096", torch.float16),
    "smoothing-fp16": Call("train", "qwen2.5-0.5b", torch.float16, smoothing=0.1),
    "smoothing-fp16-head32": Call("train", "qwen2.5-0.5b", torch.float16, smoothing=0.1, head=torch.float32),
    "train-fp32": Call("train", "llama3-8b", torch.float32, bias=True, softcap=30.0, smoothing=0.1),
    "saved": Call("saved", "gemma2-2b", bias=True, softcap=30.0, scale=0.7),
    "saved-plain": Call("saved", "llama3-8b", scale=0.7),
    "saved-transposed": Call("saved", "qwen2.5-0.5b", transposed=True),
    "saved-fp16": Call("saved", "llama3-8b", torch.float16),
    "none": Call("none", "llama3-8b"),
    "none-transposed": Call("none", "llama3-8b", transposed=True),
    "eval": Call("eval", "qwen2.5-0.5b"),
    "eval-fp32": Call("eval", "llama3-8b", torch.float32, bias=True),
    "eval-stats": Call("eval-stats", "llama3-8b", torch.float16, bias=True),
    "entropy": Call("entropy", "gemma2-2b", bias=True, softcap=30.0, scale=0.7),
    "entropy-fp16": Call("entropy", "gemma2-2b", torch.float16, bias=True, softcap=30.0),
    "token-stats": Call("token-stats", "llama3-8b", bias=True, scale=0.7),
    "token-stats-softcap": Call("token-stats", "gemma2-2b", softcap=30.0),
    "token-stats-fp16": Call("token-stats", "qwen2.5-0.5b", torch.float16),
    "token-stats-fp32": Call("token-stats", "qwen2.5-0.5b", torch.float32),
    "log_probs": Call("log_probs", "llama3-8b", bias=True, softcap=30.0, scale=0.7),
    "log_probs-fp32": Call("log_probs", "qwen2.5-0.5b", torch.float32, transposed=True),
}


def scale(dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        gradients = Gradients(array(8192, 4096, dtype=dtype), array(128256, 4096, dtype=dtype), None)
        row_kernels.scale(gradients, array(), array(), gradients)

    return run


def row_weights() -> None:
    target = array(8192, dtype=torch.int64)
    row_kernels.row_weights(target, array(128256), array(8192), None, 128256, -100, mean=True)


def total() -> None:
    row_kernels.finish_call(array(8192), None, array(8192))


def zero() -> None:
    row_kernels.zero(array(64, 4096, dtype=torch.bfloat16))


def token_losses() -> None:
    rows, vectors = array(1024, dtype=torch.int64), [array(8192) for _ in range(9)]
    function = named_losses.grpo(beta=0.04)
    hook = {"loss": vectors[0], "gradient_weight": vectors[1], "log_prob": vectors[2], "d_per_token": vectors[3:6]}
    for nll in (array(1024), array(8192)):
        token_kernels.token_loss(function, rows, nll, array(8192), vectors[6:], of_call=len(nll) > len(rows), **hook)
    token_kernels.contributes(array(1024))


SCALES = {"row_weights": row_weights, "total": total, "zero": zero, "token_losses": token_losses} | {
    f"scale-{name}": scale(dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
}
LAUNCHING: dict[str, Callable[[], Any]] = {**{name: call.run for name, call in CALLS.items()}, **SCALES}
# Run only for Hopper to save time. For other GPUs, the remaining calls have kernels that differ by one switch.
FOR_HOPPER = (
    "train-long",
    "pieces-options",
    "train-transposed",
    "train-head32",
    "smoothing-fp16-head32",
    "train-split",
    "split-transposed",
    "entropy",
    "eval",
    "eval-fp32",
    "eval-stats",
    "scale-fp32",
)
FOR_AMPERE = (
    "stats-transposed",
    "smoothing-transposed",
)  # run only for compute capability 8.x: kernels that spilled


def of_ampere(arch: int) -> bool:
    """Whether a GPU runs the kernels for compute capability 8.x."""
    return tile_config.kernel_capability(arch) < 90


# Those of `FOR_HOPPER` that have kernels on other GPUs which no remaining call launches.
WITH_OTHER_KERNELS = ["train-long", "split-transposed", "smoothing-fp16-head32"]
COMPILED = [
    (arch, name)
    for arch in SHARED_MEMORY
    for name in LAUNCHING
    if (arch == 90 or name not in FOR_HOPPER) and (of_ampere(arch) or name not in FOR_AMPERE)
]


def multiplies(launch: Launch) -> str:
    """Returns the dtype of the operands that a kernel multiplies, or "" if it has no matmul."""
    names = ("x_desc", "w_desc", "e_desc", "x_matrix", "w_matrix", "e_matrix")
    operands = [kind for name, kind in launch.signature if name in names]
    return operands[0].removeprefix("*").removeprefix("tensordesc<").partition("[")[0] if len(operands) > 1 else ""


RESERVED = 1024  # bytes of a multiprocessor's shared memory that each program takes besides its own
MATRIX_UNITS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}
# The GPUs and operand dtypes of which the tests compile a launch of each kernel.
SAMPLES = [(90, ""), (90, "bf16"), (80, "bf16"), (89, "bf16"), (100, "bf16"), (120, "bf16")]


@cache
def launches(arch: int, name: str) -> list[Launch]:
    """Returns the launches of a call of `LAUNCHING` on a GPU."""
    return launches_of(arch, LAUNCHING[name])


def sample(arch: int, operands: str) -> list[Launch]:
    """Returns a launch of each kernel that multiplies these operands on a GPU, with as many switches on as possible."""
    names = [name for name in LAUNCHING if (arch, name) not in SPILLS and (arch == 100 or (arch, name) in COMPILED)]
    found: dict[tuple[str, str], Launch] = {}
    for launch in (launch for name in names for launch in launches(arch, name) if multiplies(launch) == operands):
        place = launch.kernel.__module__, launch.kernel.__name__
        if place not in found or switches_on(launch) > switches_on(found[place]):
            found[place] = launch
    return list(found.values())


def switches_on(launch: Launch) -> int:
    return sum(value is True for _, value in launch.constexprs) + dict(launch.constexprs).get("STATISTICS", 0)


def assert_fits(launch: Launch, arch: int) -> None:
    """Fails if a kernel needs too much shared memory, or does not use the GPU's matrix units as it should."""
    compiled = compile_launch(launch, arch)
    assert compiled.shared <= SHARED_MEMORY[arch], f"{launch.name} takes {compiled.shared} bytes of shared memory"
    operands = multiplies(launch)
    if operands in ("bf16", "fp16"):
        assert MATRIX_UNITS[arch] in compiled.ptx, f"{launch.name} does not use the matrix units"


# Bytes of registers that only the ptxas of a later Triton spills, in kernels that the quick tests compile.
SPILLS_OF_LATER_PTXAS = {
    "3.8": {
        (80, "ampere_gradients.d_input_kernel(; W_BY_CLASS)"): 16,
        (80, "ampere_gradients.d_weight_of_old_kernel(; ADDS)"): 8,
    },
    "3.9": {
        (80, "ampere_gradients.d_input_kernel(; W_BY_CLASS)"): 8,
        (
            90,
            "hopper_logits.exponentials_kernel(bf16[64, 64], bf16[256, 64], bf16[64, 64]; STORES,W_BY_CLASS,HAS_BIAS,"
            "STATISTICS=31)",
        ): 64,
        (
            90,
            "kernels.repair_kernel(bf16[64, 64], bf16[256, 64], bf16[64, 256]; FINDS,REDOES,STORES,BY_ROW,W_BY_CLASS,"
            "HAS_BIAS,STATISTICS=31)",
        ): 16,
    },
}


def assert_no_spill(launch: Launch, arch: int) -> None:
    known = SPILLS_OF_LATER_PTXAS.get(".".join(triton.__version__.split(".")[:2]), {}).get((arch, launch.name), 0)
    assert compile_launch(launch, arch).stack <= known, f"{launch.name} spills registers"


SASS: dict[tuple[Launch, int], str] = {}


def disassemble_all(launches: Iterable[Launch], arch: int) -> None:
    """Disassembles launches together, which is quicker than one after the other in `sass_of`."""
    new = [launch for launch in dict.fromkeys(launches) if (launch, arch) not in SASS]
    if new:
        found = disassemble([compile_launch(launch, arch).cubin for launch in new], arch)
        SASS.update({(launch, arch): sass for launch, sass in zip(new, found, strict=True)})


def sass_of(launch: Launch, arch: int) -> str:
    disassemble_all([launch], arch)
    return SASS[launch, arch]


def assert_overlaps(launch: Launch) -> None:
    """Fails if ptxas cannot follow the accumulator. It then silently waits for each matmul: a fifth of the time."""
    code = sass_of(launch, 90)
    waits = len(re.findall(r"DEPBAR\.LE gsb0, 0x0", code))
    assert waits == 2, f"{launch.name} waits {waits} times for all matmuls, not once per warpgroup"


def assert_pipelined(launch: Launch, arch: int) -> None:
    """Fails where a matmul does not copy its next operands while it multiplies."""
    wrong = missing_overlap(sass_of(launch, arch))
    assert wrong is None, f"{launch.name} {wrong}"


@pytest.mark.parametrize(("arch", "operands"), SAMPLES)
def test_a_launch_of_each_kernel_compiles_fits_and_overlaps(arch: int, operands: str) -> None:
    chosen = sample(arch, operands)
    assert chosen
    for launch in chosen:
        assert_fits(launch, arch)
        assert_no_spill(launch, arch)
    overlap = [launch for launch in chosen if operands and "hopper" in launch.kernel.__module__]
    pipelined = chosen if operands and of_ampere(arch) else []
    disassemble_all([*overlap, *pipelined], arch)
    for launch in overlap:
        assert_overlaps(launch)
    for launch in pipelined:
        assert_pipelined(launch, arch)


def test_kernels_for_compute_capability_8_are_compiled_for_it_on_hopper() -> None:
    """Otherwise Triton compiles their matmuls to wgmma. The next test, which is slow, reads the instructions."""
    call = Call("train", "llama3-8b", implementation="triton_sm80")
    launched = {launch for launch in launches_of(90, call.run) if multiplies(launch)}
    assert {launch.kernel.__name__ for launch in launched} == {
        *("exponentials_kernel", "repair_kernel", "d_weight_kernel", "d_input_kernel")
    }
    assert all(("arch", "sm80") in launch.options for launch in launched)


def test_kernels_for_compute_capability_8_keep_their_instructions_on_hopper() -> None:
    call = Call("train", "llama3-8b", implementation="triton_sm80")
    names = ("exponentials_kernel", "d_weight_kernel", "d_input_kernel")
    chosen = [launch for launch in launches_of(90, call.run) if launch.kernel.__name__ in names]
    assert {launch.kernel.__name__ for launch in chosen} == {*names}
    disassemble_all(chosen, 90)
    for launch in set(chosen):
        ptx = compile_launch(launch, 90).ptx
        assert_no_spill(launch, 90)
        assert MATRIX_UNITS[80] in ptx
        assert MATRIX_UNITS[90] not in ptx
        assert_pipelined(launch, 90)


# The inner dimension of each kernel for compute capability 8.x.
AMPERE_INNER = {
    "exponentials_kernel": "BLOCK_D",
    "d_weight_kernel": "BLOCK_N",
    "d_weight_of_old_kernel": "BLOCK_N",
    "d_input_kernel": "BLOCK_V",
    "d_input_of_pieces_kernel": "BLOCK_V",
}


@pytest.mark.parametrize(("arch", "step", "stages"), [(80, 64, 2), (89, 32, 3), (120, 32, 3)])
def test_a_multiprocessor_runs_two_programs_of_the_ampere_kernels(arch: int, step: int, stages: int) -> None:
    chosen = [launch for launch in sample(arch, "bf16") if "ampere" in launch.kernel.__module__]
    assert {launch.kernel.__name__ for launch in chosen} == {*AMPERE_INNER}
    disassemble_all(chosen, arch)
    for launch in chosen:
        inner = AMPERE_INNER[launch.kernel.__name__]
        assert {inner: step, "STAGES": stages}.items() <= dict(launch.constexprs).items()
        shared = compile_launch(launch, arch).shared
        assert 2 * (shared + RESERVED) <= SHARED_MEMORY[arch] + RESERVED, f"{launch.name} takes {shared} bytes"
        assert_no_spill(launch, arch)
        assert_pipelined(launch, arch)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("arch", "capability"), [(80, 80), (89, 86), (89, 89), (90, 90)])
def test_gradients_for_compute_capability_8_take_either_head(arch: int, capability: int, transposed: bool) -> None:
    """A proxy on Hopper too. Compute capability 8.6 runs what 8.9 does. D is a multiple of 8 and not of 16."""
    with mock.patch.dict(SHAPES, odd=Shape("odd", 8192, 904, 151936)):
        call = Call("train", "odd", transposed=transposed, implementation="triton_sm80")
        launched = [launch for launch in launches_of(arch, call.run) if "ampere_gradients" in launch.kernel.__module__]
    assert {launch.kernel.__name__ for launch in launched} == {"d_weight_kernel", "d_input_kernel"}
    disassemble_all(launched, capability)
    for launch in launched:
        compiled = compile_launch(launch, capability)
        assert_no_spill(launch, capability)
        assert_pipelined(launch, capability)
        # The epilogue of a tile uses the memory of the matmul's stages.
        sizes = dict(launch.constexprs)
        blocks = {name: sizes[name] for name in ("BLOCK_N", "BLOCK_V", "BLOCK_D")}
        inner = blocks.pop(AMPERE_INNER[launch.kernel.__name__])
        assert compiled.shared == sizes["STAGES"] * 2 * inner * sum(blocks.values())


@pytest.mark.parametrize("call", [{"bias": True}, {"plan": "stats", "softcap": 30.0, "transposed": True}], ids=str)
@pytest.mark.parametrize(("arch", "capability"), [(80, 80), (89, 86), (90, 90)])
def test_pieces_for_compute_capability_8_move_16_bytes_at_a_time(
    arch: int, capability: int, call: dict[str, Any]
) -> None:
    """If the compiler does not know that columns of a piece are aligned, stores are narrower and registers spill."""
    made = Call(**{"plan": "train", "shape": "gemma2-2b", "implementation": "triton_sm80", **call})
    chosen = {
        launch.kernel.__name__: launch
        for launch in launches_of(arch, made.run)
        if dict(launch.signature).get("others_matrix", "constexpr") != "constexpr"
    }
    assert {*chosen} == {"exponentials_kernel", "d_input_of_pieces_kernel", "repair_kernel"}
    disassemble_all(chosen.values(), capability)
    for name, launch in chosen.items():
        sass = sass_of(launch, capability)
        assert_no_spill(launch, capability)
        assert_pipelined(launch, capability)
        stores = {"exponentials_kernel": 16, "repair_kernel": 8}.get(name)
        assert stores is None or sass.count("STG.E.128") == stores, name


@pytest.mark.parametrize("arch", [80, 89, 120])
def test_d_weight_for_compute_capability_8_moves_16_bytes_at_a_time(arch: int) -> None:
    """Its operands are turned on the way from shared memory (ldmatrix.trans). The old tile is loaded after the loop,
    and prefetched to L2 before."""
    chosen = [launch for launch in launches(arch, "train") if launch.kernel.__name__ == "d_weight_kernel"]
    assert sorted(dict(launch.constexprs)["ADDS"] for launch in chosen) == [False, True]
    disassemble_all(chosen, arch)
    for launch in chosen:
        sass = sass_of(launch, arch)
        loop, step = opcodes(innermost_loop(sass, "HMMA")), dict(launch.constexprs)["BLOCK_N"]
        assert (loop["HMMA"], loop["LDSM"], loop["LDGSTS"]) == (2 * step, step // 2, step // 4)
        assert "LDSM.16.M88" not in sass
        assert sass.count("STG.E") == sass.count("STG.E.128") == 16
        assert sass.count("LDG.E.128") == (16 if dict(launch.constexprs)["ADDS"] else 0)
        assert sass.count("CCTL") == (2 if dict(launch.constexprs)["ADDS"] else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "name"), COMPILED)
def test_what_a_call_launches_compiles_and_fits(arch: int, name: str) -> None:
    for launch in launches(arch, name):
        assert_fits(launch, arch)
        if of_ampere(arch) and multiplies(launch):
            assert_pipelined(launch, arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["train", "train-options", "train-smoothing", "train-transposed", "train-split", "eval"]
)
def test_matmuls_of_the_hopper_kernels_overlap(name: str) -> None:
    for launch in launches(90, name):
        if "hopper" in launch.kernel.__module__ and multiplies(launch):
            assert_overlaps(launch)


@pytest.mark.parametrize(("in_l2", "late"), [(0, {}), (0.5, {}), (1, {}), (0, {"LATE": 24, "ROUNDS": 9})])
def test_d_weight_is_loaded_or_added_in_l2(in_l2: float, late: dict[str, int]) -> None:
    """Each warpgroup stores a tile's quarters at two places: under the next matmul, and after the last one."""
    found = [launch for launch in launches(90, "train") if launch.kernel is hopper_gradients.d_weight_kernel]
    adds = next(launch for launch in found if dict(launch.constexprs)["ADDS"])
    loaded = round(4 * (1 - in_l2))
    launch = adds._replace(constexprs=tuple((dict(adds.constexprs) | {"LOADED": loaded} | late).items()))
    compiled = compile_launch(launch, 90)
    assert_no_spill(launch, 90)
    assert_overlaps(launch)
    assert compiled.ptx.count("cp.reduce.async.bulk.tensor") == 4 * (4 - loaded)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", compiled.ptx)) == 4 * loaded


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), [("train-split", set()), ("split-transposed", {"d_input_kernel"})])
def test_gradients_of_a_split_head_on_hopper_keep_all_in_registers(name: str, chunks: set[str]) -> None:
    """The first chunk, which is the only one of "train-split", is in pieces."""
    chosen = {launch for launch in launches(90, name) if launch.kernel.__module__ == hopper_gradients.__name__}
    assert {launch.kernel.__name__ for launch in chosen} == {"d_weight_kernel", "d_input_of_pieces_kernel", *chunks}
    for launch in chosen:
        assert_fits(launch, 90)
        compiled, switches = compile_launch(launch, 90), dict(launch.constexprs)
        assert_no_spill(launch, 90)
        assert_overlaps(launch)  # ptxas serializes matmuls whose operands it cannot keep in registers
        if "d_input" in launch.kernel.__name__:  # both parts of four matrix instructions of a step, by two warpgroups
            assert compiled.ptx.count("wgmma.mma_async") == 16
        else:  # two quarters at once, two under the next matmul, and these again at the end
            reduced = compiled.ptx.count("cp.reduce.async.bulk.tensor")
            assert reduced == (12 if switches["ADDS"] else 0)


def test_all_chunks_add_to_the_float32_buffer_of_the_caller() -> None:
    needs_grad = NeedsGrad(True, True, False)
    with fake_gpu(90) as launched:
        problem = Call("train", "qwen2.5-0.5b").problem()
        problem = replace(problem, grad_into=array(*problem.linear_weight.shape))
        plan = ops.plan_for(problem, "loss_and_gradients", DEFAULT, "triton", needs_grad)
        scaled_exp(replace(problem, plan=plan), needs_grad, statistics=0)
    found = [dict(one.constexprs) for one in launched if one.kernel is hopper_gradients.d_weight_kernel]
    assert len(found) > 1
    assert {(one["ADDS"], one["LOADED"]) for one in found} == {(True, 0)}


@pytest.mark.parametrize(("gpu", "loaded"), [("H100", [0, 0, 4]), ("H200", [4, 0, 2])])
def test_what_is_loaded_of_d_weight_depends_on_the_gpu_and_on_the_rows(gpu: str, loaded: list[int]) -> None:
    found = []
    for rows in (1664, 768, 384):
        with fake_gpu(90, f"NVIDIA {gpu}") as launched, preferring(rows):
            Call("train", "qwen2.5-0.5b").run()
        [quarters] = {
            switches["LOADED"]
            for launch in launched
            if launch.kernel is hopper_gradients.d_weight_kernel and (switches := dict(launch.constexprs))["ADDS"]
        }
        found.append(quarters)
    assert found == loaded


# Bytes of registers that the kernels of a call spill with Triton 3.6. Those for compute capability 8.x and 9.0 spill
# none (docs/options.md).
SPILLS = {
    (100, "train-smoothing"): {
        "kernels.d_logits_kernel(bf16[128, 64], bf16[128, 64], bf16[128, 128]; HAS_SIGMA,W_BY_CLASS,HAS_BIAS,"
        "HAS_SOFTCAP)": 72
    },
    (100, "entropy"): {
        "kernels.exponentials_kernel(bf16[128, 64], bf16[128, 64]; W_BY_CLASS,HAS_BIAS,HAS_SOFTCAP,STATISTICS=4)": 40
    },
    (100, "saved"): {
        "kernels.exponentials_kernel(bf16[128, 64], bf16[128, 64], bf16[128, 128]; STORES,W_BY_CLASS,HAS_BIAS,"
        "HAS_SOFTCAP,STATISTICS=4)": 64
    },
    (100, "saved-fp16"): {
        "kernels.exponentials_kernel(fp16[128, 64], fp16[128, 64], fp16[128, 128]; STORES,W_BY_CLASS,STATISTICS=132)": 8
    },
    (100, "token-stats"): {
        "kernels.exponentials_kernel(bf16[128, 64], bf16[128, 64], bf16[128, 128]; STORES,W_BY_CLASS,HAS_BIAS,"
        "STATISTICS=31)": 56
    },
    (100, "token-stats-softcap"): {
        "kernels.exponentials_kernel(bf16[128, 64], bf16[128, 64], bf16[128, 128]; STORES,W_BY_CLASS,HAS_SOFTCAP,"
        "STATISTICS=31)": 136
    },
    (100, "token-stats-fp16"): {
        "kernels.exponentials_kernel(fp16[128, 64], fp16[128, 64], fp16[128, 128]; STORES,W_BY_CLASS,"
        "STATISTICS=159)": 16
    },
    (100, "entropy-fp16"): {
        "kernels.exponentials_kernel(fp16[128, 64], fp16[128, 64]; W_BY_CLASS,HAS_BIAS,HAS_SOFTCAP,STATISTICS=4)": 40
    },
}
SPILLS[100, "shard-stats"] = SPILLS[100, "token-stats"]
# The sample of the logits of a float16 call: one launch for a tile of classes.
SPILLS |= {
    (120, f"{name}-fp16"): {f"kernels.statistics_kernel(; W_BY_CLASS{options})": stack}
    for name, options, stack in (
        *((name, "", 80) for name in ("train", "pieces", "smoothing", "saved", "token-stats")),
        ("shard", ",HAS_BIAS", 88),
        *((name, ",HAS_BIAS,HAS_SOFTCAP", 256) for name in ("options", "entropy")),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "name"), COMPILED)
def test_no_other_register_is_spilled(arch: int, name: str) -> None:
    spilled: dict[str, int] = {}
    for launch in launches(arch, name):
        if stack := compile_launch(launch, arch).stack:
            spilled[launch.name] = max(stack, spilled.get(launch.name, 0))
    assert spilled == SPILLS.get((arch, name), {})


def kernels_of(module: Any) -> set[str]:
    return {name for name, value in vars(module).items() if name.endswith("_kernel") and isinstance(value, JITFunction)}


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_kernel_is_launched(arch: int) -> None:
    names = [name for of_gpu, name in COMPILED if of_gpu == arch] + WITH_OTHER_KERNELS
    launched = {(launch.kernel.__module__, launch.kernel.__name__) for name in names for launch in launches(arch, name)}
    modules = {"core_triton.kernels", "core_triton.row_kernels", "core_triton.target_grad", "core_triton.stored_logits"}
    modules |= {
        "core_triton.row_statistics",
        "core_triton.float16",
        "core_triton.saved_kernels",
        "core_triton.shard_rows",
        "core_triton.token_slices",
        "core_triton.token_kernels",
    }
    if arch == 90:
        modules |= {"core_triton.hopper_logits", "core_triton.hopper_gradients", "core_triton.input_grad"}
    if of_ampere(arch):
        modules |= {"core_triton.ampere_logits", "core_triton.ampere_gradients", "core_triton.input_grad"}
    for module in modules:
        expected = kernels_of(sys.modules[module])
        if module == "core_triton.kernels" and arch != 100:  # other files have these kernels for 16-bit operands
            hopper = {"exponentials_kernel", "statistics_kernel", "d_logits_kernel"}
            expected -= hopper if arch == 90 else {"exponentials_kernel"}
        if arch == 100:  # cuBLAS, which computes d_input there, reads no pieces
            expected -= {"finish_rows_of_pieces_kernel", "align_of_pieces_kernel"}
        assert expected <= {kernel for owner, kernel in launched if owner == module}


# The memory of a call, without its arguments and gradients.


BUDGETS = {"128 MiB": 2**27, "512 MiB": 2**29, "2 GiB": 2**31}


def calls_of(shape: str) -> tuple[Call, ...]:
    return (
        Call("train", shape),
        Call("stats", shape, bias=True, softcap=30.0),
        Call("train", shape, needs_grad=(True, False)),
        Call("train", shape, needs_grad=(False, True)),
        Call("train", shape, torch.float16),
        Call("train", shape, torch.float32),
        Call("train", shape, head=torch.float32),
        Call("train", shape, smoothing=0.1, class_weight=True),
        Call("train", shape, torch.float16, smoothing=0.1, class_weight=True),
        Call("entropy", shape),
        Call("rows", shape),
        Call("rows", shape, needs_grad=(True, False)),
        Call("none", shape),
        Call("none", shape, needs_grad=(True, False)),
        Call("log_probs", shape, torch.float16),
        Call("train", shape, head=torch.float32, splits=True),
        Call("train", shape, ranks=2),
        Call("token-stats", shape, ranks=8),
        Call("stats", shape, torch.float16, ranks=2),
        Call("train", shape, smoothing=0.1, class_weight=True, ranks=2),
        Call("train", shape, head=torch.float32, splits=True, ranks=2),
        Call("train", shape, ranks=2, gathers=True),
        Call("stats", shape, torch.float16, bias=True, ranks=8, gathers=True),
        Call("train", shape, smoothing=0.1, class_weight=True, ranks=4, gathers=True),
        Call("train", shape, head=torch.float32, splits=True, ranks=2, gathers=True),
    )


# Indices into the result of `calls_of`: each plan, dtype and option, but not each pair.
QUICK_CALLS = (1, 2, 5, 6, 8, 9, 10, 12, 14, 15, 17, 22, 23)


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workspace_of_each_call_is_within_a_budget(others: bool) -> None:
    """Tests each call with one shape and one budget, in rotation. The smallest budget, which needs hundreds of
    launches, is tested with the smallest shape."""
    turns = [("llama3-8b", 2**29), ("qwen2.5-0.5b", 2**27), ("llama3-8b", 2**31), ("qwen2.5-0.5b", 2**29)]
    for turn, call in enumerate(calls_of("llama3-8b")):
        if (turn in QUICK_CALLS) == others:
            continue
        shape, budget = turns[turn % len(turns)]
        assert_within(90, call._replace(shape=shape), budget)


@pytest.mark.parametrize(("shape", "ranks"), [("llama3-8b", 2), ("gemma2-2b", 8)])
def test_parts_of_a_gradient_that_is_sent_are_in_the_memory_of_the_head(shape: str, ranks: int) -> None:
    """The sums of the other chunks, (V, D), are no result. The rows of the last chunk have a buffer: 1 to 3%."""
    call = Call("train", shape, sends=ranks)
    used = workspace(90, call, DEFAULT) - 2 * SHAPES[shape].v * SHAPES[shape].d
    assert used <= 1.03 * DEFAULT


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("shape", ["llama3-8b", "qwen2.5-0.5b", "gemma2-2b"])
def test_workspace_of_models_is_within_budget(shape: str, budget: int) -> None:
    for call in calls_of(shape):
        assert_within(90, call, budget)


@pytest.mark.parametrize("budget", [pytest.param(2**27, marks=pytest.mark.slow), 2**29], ids=["128 MiB", "512 MiB"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_workspace_of_many_tokens_is_within_budget(smoothing: float, budget: int) -> None:
    assert_within(90, Call("train", "long", smoothing=smoothing), budget)


@pytest.mark.parametrize("head", [None, torch.float32])
@pytest.mark.parametrize("arch", [80, 90])
def test_workspace_of_rows_that_kernels_cannot_read_is_within_budget(arch: int, head: torch.dtype | None) -> None:
    """Rows of 1001 elements are copied to rows of a multiple of 16 bytes, after a head of another dtype is cast."""
    with mock.patch.dict(SHAPES, odd=Shape("odd", 512, 1001, 50257)):
        for call in (Call("none", "odd", head=head), Call("train", "odd", head=head, smoothing=0.1)):
            assert_within(arch, call, 2**25)


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("plan", ["train", "eval", "none"])
def test_workspace_on_other_gpus_is_within_budget(arch: int, plan: str) -> None:
    assert_within(arch, Call(plan, "llama3-8b"), DEFAULT)


@pytest.mark.parametrize("name", ["train-pieces", "pieces-options", "pieces-fp16"])
def test_workspace_of_a_first_chunk_in_the_memory_of_d_weight_is_within_budget(name: str) -> None:
    assert_within(90, CALLS[name], 2**28)
    assert "d_input_of_pieces_kernel" in {
        launch.kernel.__name__ for launch in launches_of(90, lambda: CALLS[name].run(2**28))
    }


def test_gradients_of_saved_rows_of_float16_take_no_more_memory() -> None:
    """The kernel of d_weight adds in place. Numbers of the rows and chunks are all that float16 has more."""
    of_bfloat16, of_float16 = (
        workspace(90, Call("saved", "qwen2.5-0.5b", dtype), DEFAULT) for dtype in (torch.bfloat16, torch.float16)
    )
    assert of_float16 - of_bfloat16 < 32 * SHAPES["qwen2.5-0.5b"].n


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_workspace_of_a_loss_of_the_entropy_is_within_budget(dtype: torch.dtype) -> None:
    shape, budget = SHAPES["qwen2.5-0.5b"], 2**28
    with fake_gpu(90):
        leaves = [array(rows, shape.d, dtype=dtype).requires_grad_() for rows in (shape.n, shape.v)]
        arguments: list[Any] = [*leaves, array(shape.n, dtype=torch.int64), named_losses.grpo(entropy_weight=0.1)]
        arguments += [array(shape.n) for _ in range(2)]
        with Meter() as meter:
            core_triton.linear_token_loss(*arguments, memory_budget=budget, implementation="triton")
    assert meter.peak - bytes_of(*leaves) <= budget  # the gradients are as large as these


def assert_within(arch: int, call: Call, budget: int) -> None:
    used = workspace(arch, call, budget)
    assert used <= budget, f"{call} takes {used} bytes, {used / budget:.0%} of its budget"


def workspace(arch: int, call: Call, budget: int) -> int:
    with fake_gpu(arch):
        problem = call.problem()
        with Meter() as meter:
            found = call.run(budget)
        inputs = [t for t in problem.__dict__.values() if isinstance(t, Tensor)]
        return meter.peak - bytes_of(*found) - bytes_of(*inputs)


@pytest.mark.parametrize(
    "name", ["train", "train-options", "train-long", "train-pieces", "train-fp16", "pieces-fp16", "eval"]
)
def test_calls_that_can_be_replayed_only_allocate_and_launch(name: str) -> None:
    """Otherwise `replay.Recorder` records nothing, and each call takes the host time of the first."""
    with fake_gpu(90), Meter() as meter:
        CALLS[name].run()
    assert meter.operators <= replay.ALLOCATIONS | replay.VIEWS


def test_launches_are_recorded_as_triton_specializes_them() -> None:
    [launch] = launches_of(90, scale(torch.bfloat16))
    assert launch.kernel is row_kernels.scale_kernel
    assert dict(launch.signature) == {
        "d_input_ptr": "*bf16",
        "d_weight_ptr": "*bf16",
        "d_bias_ptr": "constexpr",
        "input_factor_ptr": "*fp32",
        "head_factor_ptr": "*fp32",
        "new_d_input_ptr": "*bf16",
        "new_d_weight_ptr": "*bf16",
        "new_d_bias_ptr": "constexpr",
        "inputs": "i32",
        "weights": "i32",
        "biases": "i32",
        "IN_PLACE": "constexpr",
        "BLOCK": "constexpr",
    }
    pointers = [name for name, kind in launch.signature if kind.startswith("*")]
    assert launch.divisible == (*pointers, "inputs", "weights", "biases")
    constexprs = dict(launch.constexprs)
    assert constexprs == {"d_bias_ptr": None, "new_d_bias_ptr": None, "IN_PLACE": True, "BLOCK": 4096}
    assert dict(launch.options) == {"num_warps": 8}


# The scaling kernel.


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 65536.0])
def test_no_wait_and_a_second_backward_on_a_gpu(dtype: torch.dtype, factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((300, 64), (1001, 64)))
    y = torch.randint(0, 1001, (300,), generator=generator)
    upstream = torch.tensor(factor)

    def gradients(device: str, backwards: int) -> list[torch.Tensor]:
        arrays = [a.to(device).requires_grad_() for a in (x, w)]
        target, d_loss = y.to(device), upstream.to(device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # waiting for the device is an error
        try:
            loss = core_triton.linear_cross_entropy(arrays[0], arrays[1], target)
            for left in reversed(range(backwards)):
                found = torch.autograd.grad(loss, arrays, d_loss, retain_graph=left > 0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [a.cpu() for a in found]

    for once, twice, reference in zip(gradients("cuda", 1), gradients("cuda", 2), gradients("cpu", 1), strict=True):
        assert torch.equal(once, twice)
        bound = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
        assert (once.double() - reference.double()).norm() <= bound * reference.double().norm()


@pytest.mark.parametrize(
    ("shape", "strides", "described", "by_pointers"),
    [
        ((8, 64), (64, 1), True, True),
        ((8, 63), (64, 1), True, False),  # the last 16 bytes of a row are not all inside
        ((8, 64), (65, 1), False, False),  # rows do not start at multiples of 16 bytes
        ((64, 7), (1, 64), True, True),  # stored as (7, 64)
        ((8, 64), (2 * 64, 2), False, False),
        ((8, 64), (tile_config.MAX_STRIDE, 1), True, False),  # offsets within a block would exceed int32
    ],
)
def test_which_matrices_kernels_can_read(
    shape: tuple[int, int], strides: tuple[int, int], described: bool, by_pointers: bool
) -> None:
    layout = MatrixLayout(shape, strides, 2, "bfloat16", aligned=True)
    assert layout.tma_compatible() is described
    assert layout.tma_compatible(pointers=True) is by_pointers
    assert not layout._replace(aligned=False).tma_compatible()


def test_rows_longer_than_int32_offsets_are_refused_on_compute_capability_8() -> None:
    x, w = (torch.empty(2, tile_config.MAX_STRIDE, dtype=torch.bfloat16, device="meta") for _ in range(2))
    message = rf"input must have fewer than {tile_config.MAX_STRIDE} columns on this GPU, got {tile_config.MAX_STRIDE}"
    with pytest.raises(ValueError, match=message):
        core_triton.explain(x, w, device="a100", memory_budget=2**40)
    assert core_triton.explain(x, w, device="h200", memory_budget=2**40).name == "triton"
