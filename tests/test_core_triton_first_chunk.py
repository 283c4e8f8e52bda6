"""Tests a first chunk whose exponentials are in pieces: runs the kernels of the logits for Hopper and for compute
capability 8.x in NumPy (`hopper_in_numpy`, `gluon_in_numpy`), and counts the launches of a call. `run_pieces` of
interpret_loss.py tests its results."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import gluon_in_numpy
import hopper_in_numpy
import pytest
import torch

from benchmarks.launch_recorder import Launch, fake_gpu
from core_triton import (
    ampere_common,
    ampere_logits,
    gluon_common,
    hopper_common,
    hopper_logits,
    hopper_split_logits,
    kernels,
    ops,
    row_kernels,
)
from core_triton.first_chunk import StoredExponentials, Stores
from core_triton.kernels import Active
from core_triton.launch import At, cdiv
from core_triton.plan import DeviceInfo, PlanKey, make_plan
from core_triton.problem import NeedsGrad, Problem, layout_of
from core_triton.scaled_exp import scaled_exp
from core_triton.tile_config import CLASS_BLOCK, ROW_BLOCK
from linear_ce.spec import LossSpec
from linear_ce.statistics import ARGMAX, BY_ROW, MAX, OF_LOGITS, SHIFTS

MODULES = (hopper_common, hopper_logits, gluon_common)
AMPERE_MODULES = (ampere_common, ampere_logits, gluon_common, hopper_logits, kernels)
N, D, V, START = 150, 392, 700, 20  # START: the chunk's first row
PIECE, REFERENCE = 256, 3


def problem_of(
    n: int,
    d: int,
    v: int,
    device: str,
    budget: int,
    *,
    splits: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    capability: int = 90,
) -> Problem:
    x = torch.empty(n, d, dtype=dtype, device=device)
    w = torch.empty(v, d, dtype=torch.float32 if splits else dtype, device=device)
    plan = make_plan(
        PlanKey(
            "loss_and_gradients", layout_of(x), layout_of(w), v, copied_bytes=0, label_smoothing=False, softcap=False,
            entropy=False, d_input=True, d_weight=True, d_bias=False, statistics=False, memory_budget=budget,
            implementation="triton", splits_head=splits,
            device=DeviceInfo("cuda", 90, 132, "h100") if capability == 90 else DeviceInfo("cuda", 80, 108, "a100"),
        )
    )  # fmt: skip
    spec = LossSpec("sum", head_precision="float32" if splits else "input")
    target, weight = torch.empty(n, dtype=torch.int64, device=device), torch.empty(n, device=device)
    return Problem(x, w, None, target, weight, None, spec, v, plan=plan)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("step", "late", "dtype", "programs"),
    [
        (V, False, torch.bfloat16, 132),
        (512, True, torch.bfloat16, 132),
        (V, True, torch.bfloat16, 2),
        pytest.param(V, True, torch.bfloat16, 132, marks=pytest.mark.slow),
        pytest.param(512, False, torch.bfloat16, 132, marks=pytest.mark.slow),
        pytest.param(V, False, torch.bfloat16, 2, marks=pytest.mark.slow),
        (V, False, torch.float16, 132),
    ],
)
def test_each_tile_of_logits_goes_to_its_piece(
    step: int, late: bool, dtype: torch.dtype, programs: int, capability: int
) -> None:
    """One launch for each vocabulary chunk, of several pieces, with the quarters that hold a target if it is one. Two
    programs compute three tiles each on Hopper. The exponentials of float16 are too large and divided by powers of two.
    The sums are the same if nothing is stored."""
    generator = torch.Generator().manual_seed(0)
    problem, float16 = problem_of(N, D, V, "cpu", 2**28, dtype=dtype, capability=capability), dtype == torch.float16
    problem = replace(problem, plan=replace(ops.plan_of(problem), programs=programs))
    hopper, reference = capability == 90, REFERENCE - 16 * float16
    class_block = CLASS_BLOCK if hopper else 128
    x, w = (0.1 * torch.randn(rows, D, generator=generator).to(dtype) for rows in (N, V))
    target = torch.randint(0, V, (START + N,), generator=generator)
    stored, d_weight = (torch.full((rows, columns), torch.nan).to(dtype) for rows, columns in ((N, 300), (V, D)))
    e = StoredExponentials.in_d_weight(stored, d_weight, N, PIECE, V)
    blocks, row_blocks = -(-V // class_block), -(-N // ROW_BLOCK)
    hit = torch.zeros(2 * row_blocks * blocks, dtype=torch.int8)
    for row, column in enumerate(target[START:].tolist()):
        if hopper:
            hit[row // (ROW_BLOCK // 2) * blocks + column // class_block] |= 1 << (column % class_block // 64)
    sums, target_logit = torch.full((blocks, N), torch.nan), torch.full((START + N,), torch.nan)
    shifts, scored = torch.zeros((blocks, N)), torch.full((blocks, N), torch.nan)
    flag = torch.zeros(row_blocks, dtype=torch.int32)
    run = partial(*((hopper_in_numpy.run, MODULES) if hopper else (gluon_in_numpy.run, AMPERE_MODULES)), late=late)
    module, hits = (hopper_logits, {"hit": At(hit, 0) if step == V else None}) if hopper else (ampere_logits, {})
    with mock.patch.object(kernels, "launch", run):
        for start in range(0, V, step):
            chunk = slice(start, min(start + step, V))
            shared: dict[str, Any] = {
                "target": At(target, START),
                "ref_exponent": At(torch.full((START + N,), float(reference)), START),
                "flag": At(flag, 0),
                "target_logit": At(target_logit, START),
                **hits,
            }
            active = Active(torch.tensor(START + N, dtype=torch.int32), START, 0)
            at = start // class_block
            into = {"sums": At(sums, at), "of_logits": At(shifts, at) if float16 else None, "e": e.stores(chunk)}
            module.exponentials(problem, x, w[chunk], chunk, active, statistics=SHIFTS * float16, **shared, **into)
            into = {"sums": At(scored, at), "of_logits": None, "e": Stores(None)}
            module.exponentials(problem, x, w[chunk], chunk, active, statistics=0, **shared, **into)
    logits = x.float() @ w.float().T
    wanted = (logits / torch.log(torch.tensor(2.0)) - reference).exp2()
    found = torch.cat([e.of(piece) for piece in e.pieces(V)], 1).float()
    quarters = torch.stack([(shifts.int() >> (6 * i)) & 63 for i in range(4)], 1).view(4 * blocks, N)
    assert bool((quarters > 0).all()) == float16
    found *= quarters.T.repeat_interleave(class_block // 4, 1)[:, :V].exp2()
    assert (found - wanted).abs().max() < 4e-3 * wanted.abs().max()
    assert (e.pieces(V, 200)[1], e.pieces(V)[2]) == (slice(200, 256), slice(512, V))
    in_blocks = torch.nn.functional.pad(wanted, (0, blocks * class_block - V)).view(N, blocks, class_block).sum(2).T
    torch.testing.assert_close(sums, in_blocks, rtol=1e-4, atol=1e-4)
    assert torch.equal(scored, sums)
    torch.testing.assert_close(target_logit[START:], logits[range(N), target[START:]], rtol=1e-4, atol=1e-4)
    assert e.others is not None
    last = V - 2 * PIECE
    end = -(-last // CLASS_BLOCK) * CLASS_BLOCK if hopper else -(-last // 8) * 8
    assert (e.others[-1, :N, last:end] == 0).all(), "d_input reads whole steps, for compute capability 8.x 16 bytes"
    assert e.others[:, row_blocks * ROW_BLOCK if hopper else N :].isnan().all()
    assert d_weight[2 * PIECE :].isnan().all()
    assert not flag.any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # it is not selected
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capability", [80, 90])
def test_all_statistics_of_tiles_of_capped_logits(capability: int, dtype: torch.dtype) -> None:
    """For compute capability 8.x these have another layout than rows of logits, which NumPy does not show."""
    generator = torch.Generator().manual_seed(0)
    problem = problem_of(N, D, V, "cpu", 2**28, dtype=dtype, capability=capability)
    plan = replace(ops.plan_of(problem), programs=2)
    problem = replace(problem, plan=plan, spec=LossSpec("sum", softcap=2.0, logit_scale=0.7))
    hopper, float16 = capability == 90, dtype == torch.float16
    class_block, reference = CLASS_BLOCK if hopper else 128, -13 if float16 else 3
    blocks = -(-V // class_block)
    x, w = (0.1 * torch.randn(rows, D, generator=generator).to(dtype) for rows in (N, V))
    target = torch.randint(0, V, (N,), generator=generator)
    statistics = OF_LOGITS | SHIFTS * float16
    found = torch.full((blocks, 5 + float16, N), torch.nan)
    sums, target_logit, e = torch.full((blocks, N), torch.nan), torch.full((N,), torch.nan), torch.zeros(N, 704)
    e = e.to(dtype)
    run = partial(*((hopper_in_numpy.run, MODULES) if hopper else (gluon_in_numpy.run, AMPERE_MODULES)), late=True)
    with mock.patch.object(kernels, "launch", run):
        (hopper_logits if hopper else ampere_logits).exponentials(
            problem,
            x,
            w,
            slice(0, V),
            Active(torch.tensor(N, dtype=torch.int32), 0, 0),
            target=At(target, 0),
            ref_exponent=At(torch.full((N,), float(reference)), 0),
            flag=At(torch.zeros(-(-N // ROW_BLOCK), dtype=torch.int32), 0),
            target_logit=At(target_logit, 0),
            sums=At(sums, 0),
            of_logits=At(found, 0),
            e=Stores(e),
            statistics=statistics,
            **({"hit": None} if hopper else {}),
        )
    logits = 2.0 * torch.tanh(0.35 * (x.double() @ w.double().T))
    exponents = logits / torch.log(torch.tensor(2.0, dtype=torch.float64)) - reference
    kept = torch.nn.functional.pad(torch.ones(V), (0, blocks * class_block - V)).view(blocks, class_block) > 0

    def by_block(values: torch.Tensor, outside: float) -> torch.Tensor:
        padded = torch.nn.functional.pad(values, (0, blocks * class_block - V))
        return padded.view(N, blocks, class_block).where(kept, outside)

    largest = by_block(logits, -torch.inf).max(2)
    exps = by_block(exponents.exp2(), 0.0)
    wanted = [largest.values, largest.indices, (exps * by_block(exponents, 0.0)).sum(2)]
    wanted += [by_block(logits, 0.0).sum(2), exps.square().sum(2)]
    for index, values in enumerate(wanted):
        torch.testing.assert_close(found[:, index].double(), values.T.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.double(), exps.sum(2).T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target_logit.double(), logits[range(N), target], rtol=1e-4, atol=1e-4)
    capped = exponents.exp2() * (1 - (logits / 2.0).square())
    if float16:
        shifts = torch.stack([(found[:, 5].int() >> (6 * i)) & 63 for i in range(4)], 1).view(4 * blocks, N)
        assert (shifts > 0).all()
        capped /= shifts.T.repeat_interleave(class_block // 4, 1)[:, :V].exp2()
    assert (e[:, :V].double() - capped).abs().max() < 4e-3 * capped.abs().max()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("hidden", [8, 64, 72])
def test_logits_of_one_or_two_steps(hidden: int, late: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    problem = problem_of(N, hidden, V, "cpu", 2**28)
    problem = replace(problem, plan=replace(ops.plan_of(problem), programs=2))
    x, w = (torch.randn(rows, hidden, generator=generator).bfloat16() for rows in (N, V))
    sums, e = torch.full((-(-V // CLASS_BLOCK), N), torch.nan), torch.full((N, 704), torch.nan).bfloat16()
    vectors = {"target": torch.full((N,), -1), "ref_exponent": torch.zeros(N), "target_logit": torch.zeros(N)}
    found = {"flag": torch.zeros(2, dtype=torch.int32), "sums": sums, **vectors}
    at: dict[str, Any] = {name: At(one, 0) for name, one in found.items()}
    with mock.patch.object(kernels, "launch", partial(hopper_in_numpy.run, MODULES, late=late)):
        hopper_logits.exponentials(
            problem,
            x,
            w,
            slice(0, V),
            Active(torch.tensor(N, dtype=torch.int32), 0, 0),
            statistics=0,
            of_logits=None,
            hit=None,
            e=Stores(e[:, :V]),
            **at,
        )
    wanted = (x.float() @ w.float().T).exp()
    torch.testing.assert_close(e[:, :V].float(), wanted, rtol=4e-3, atol=0)
    torch.testing.assert_close(sums.sum(0), wanted.sum(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("splits", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float16)])
def test_all_pieces_take_one_launch_of_each_kernel_but_d_weight(splits: bool, dtype: torch.dtype) -> None:
    counts = Counter[str]()
    chunk_rows, hits = list[int](), list[bool]()

    def watch(launch: Launch, grid: tuple[int, ...], values: dict[str, Any]) -> None:
        counts[launch.kernel.__name__] += 1
        if launch.kernel is row_kernels.pick_kernel:
            chunk_rows.append(values["chunk_rows"])
        if launch.kernel is of_tiles:
            hits.append(values["hit_ptr"] is not None)

    of_tiles = hopper_split_logits.split_exponentials_kernel if splits else hopper_logits.exponentials_kernel
    with fake_gpu(90, "NVIDIA H100", watch):
        problem = problem_of(2048, 2304, 256000, "cuda", 2**28, splits=splits, dtype=dtype)
        found = ops.plan_of(problem).scaled_exp_config
        assert found.first_rows == 2048
        scaled_exp(problem, NeedsGrad(True, True, False), statistics=0)
    assert chunk_rows == [2048], "of the bytes that say which quarters of tiles have a target"
    assert hits == [True]
    assert counts["d_weight_kernel"] == -(-256000 // found.piece) > 1
    assert counts["repair_kernel"] == counts["d_input_of_pieces_kernel"] == 1
    assert counts["align_of_pieces_kernel"] == (dtype == torch.float16)
    assert not counts["align_kernel"]
    assert not counts["copy_head_kernel"]
    assert (counts["exponentials_kernel"] == 1) != splits


@pytest.mark.parametrize(("splits", "class_block"), [(False, 256), (True, 128)])
def test_all_kernels_have_the_class_blocks_of_the_plan(splits: bool, class_block: int) -> None:
    """The kernels of the exponentials of a split head sum over half of the classes of other tiles."""
    n, v, seen, names = 1000, 5000, dict[str, dict[str, Any]](), ("BLOCK_V", "HALF", "class_blocks", "block_width")

    def watch(launch: Launch, grid: tuple[int, ...], values: dict[str, Any]) -> None:
        found = values | dict(launch.constexprs)
        seen[launch.kernel.__name__] = {name: found[name] for name in names if name in found}
        if (hit := values.get("hit_ptr")) is not None:
            seen[launch.kernel.__name__]["hit"] = hit.nbytes

    with fake_gpu(90, "NVIDIA H100", watch):
        problem = problem_of(n, 512, v, "cuda", 2**28, splits=splits)
        assert ops.plan_of(problem).class_block == class_block
        scaled_exp(problem, NeedsGrad(True, True, False), statistics=MAX | ARGMAX | BY_ROW)
    class_blocks = cdiv(v, class_block)
    hit = 4 * cdiv(cdiv(n, 64) * class_blocks + class_blocks, 4)  # one byte for each half tile, and one more row
    assert seen["pick_kernel"] == {"BLOCK_V": class_block, "HALF": 64, "hit": hit}
    assert seen["finish_rows_kernel"] == seen["keep_rows_kernel"] == {"class_blocks": class_blocks}
    assert seen["finish_statistics_kernel"] == {"class_blocks": class_blocks, "block_width": class_block}
    assert seen["repair_kernel"]["BLOCK_V"] == 256
