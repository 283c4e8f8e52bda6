"""Tests the exponentials of a split float32 head on Hopper, in NumPy (`hopper_in_numpy`): pieces of transposed tiles,
and the sums of class blocks, which two tiles add to."""

from dataclasses import replace
from functools import partial
from unittest import mock

import hopper_in_numpy
import pytest
import torch
from test_core_triton_first_chunk import problem_of
from torch import Tensor

from core_triton import gluon_common, hopper_common, hopper_logits, hopper_split_head, hopper_split_logits, kernels, ops
from core_triton.first_chunk import StoredExponentials, Stores
from core_triton.kernels import Active
from core_triton.launch import At
from core_triton.problem import Problem
from core_triton.tile_config import ROW_BLOCK, SPLIT_CLASS_BLOCK
from linear_ce.spec import LossSpec
from linear_ce.statistics import OF_LOGITS

MODULES = (hopper_common, hopper_logits, hopper_split_head, hopper_split_logits, gluon_common)
N, D, V, START = 300, 200, 600, 20  # START: the chunk's first row. The last class block is alone in its tiles
PIECE, REFERENCE = 256, 3
BLOCKS = -(-V // SPLIT_CLASS_BLOCK)


def problem_for(spec: LossSpec, programs: int, d: int = D) -> Problem:
    """Returns a problem whose kernels read the head in place."""
    problem = problem_of(N, d, V, "cpu", 2**28, splits=True)
    plan = replace(ops.plan_of(problem), programs=programs)
    assert not plan.casts_head
    return replace(problem, plan=plan, spec=spec)


def arrays(d: int = D, *, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of the input, a head and targets."""
    generator = torch.Generator().manual_seed(0)
    x = 0.1 * torch.randn(N, d, generator=generator)
    w = torch.randn(*((d, V) if transposed else (V, d)), generator=generator)
    return x.bfloat16(), w.T if transposed else w, torch.randint(0, V, (START + N,), generator=generator)


def by_block(values: Tensor, outside: float) -> Tensor:
    """Returns values (rows, classes) by class block, (rows, blocks, classes of a block)."""
    more = BLOCKS * SPLIT_CLASS_BLOCK - V
    return torch.nn.functional.pad(values, (0, more), value=outside).view(len(values), BLOCKS, SPLIT_CLASS_BLOCK)


@pytest.mark.parametrize(
    ("programs", "late", "transposed", "hits"),
    [
        (132, False, False, True),
        (2, True, True, False),
        pytest.param(2, True, False, True, marks=pytest.mark.slow),
        pytest.param(132, False, True, True, marks=pytest.mark.slow),
    ],
)
def test_each_tile_goes_to_its_piece(programs: int, late: bool, transposed: bool, hits: bool) -> None:
    """The second tile of rows ends past the rows for which the pieces in d_weight have room."""
    problem = problem_for(LossSpec("sum", head_precision="float32"), programs)
    x, w, target = arrays(transposed=transposed)
    stored, d_weight = torch.full((N, 300), torch.nan).bfloat16(), torch.full((V, 384), torch.nan).bfloat16()
    e = StoredExponentials.in_d_weight(stored, d_weight, N, PIECE, V)
    assert e.others is not None
    assert e.others.shape[1] == 384 == -(-N // ROW_BLOCK) * ROW_BLOCK
    hit = torch.zeros(-(-N // 64) * BLOCKS, dtype=torch.int8)
    for row, column in enumerate(target[START:].tolist()):
        hit[row // 64 * BLOCKS + column // SPLIT_CLASS_BLOCK] |= 1 << (column % SPLIT_CLASS_BLOCK // 32)
    found: list[tuple[Tensor, Tensor]] = []
    flag = torch.zeros(-(-N // ROW_BLOCK), dtype=torch.int32)
    with mock.patch.object(kernels, "launch", partial(hopper_in_numpy.run, MODULES, late=late)):
        for stores in (e.stores(slice(0, V)), Stores(None)):  # the sums are the same if nothing is stored
            sums, target_logit = torch.full((BLOCKS, N), torch.nan), torch.full((START + N,), torch.nan)
            hopper_split_logits.split_exponentials(
                problem,
                x,
                w,
                slice(0, V),
                Active(torch.tensor(START + N, dtype=torch.int32), START, 0),
                target=At(target, START),
                ref_exponent=At(torch.full((START + N,), float(REFERENCE)), START),
                flag=At(flag, 0),
                sums=At(sums, 0),
                statistics=0,
                of_logits=None,
                target_logit=At(target_logit, START),
                e=stores,
                hit=At(hit, 0) if hits else None,
            )
            found.append((sums, target_logit[START:]))
    logits = x.double() @ w.double().T
    wanted = (logits / torch.log(torch.tensor(2.0)) - REFERENCE).exp2()
    for sums, target_logit in found:
        torch.testing.assert_close(sums.double(), by_block(wanted, 0).sum(2).T, rtol=3e-5, atol=0)
        torch.testing.assert_close(target_logit.double(), logits[range(N), target[START:]], rtol=3e-5, atol=3e-5)
    assert torch.equal(found[0][0], found[1][0])
    stored_e = torch.cat([e.of(piece) for piece in e.pieces(V)], 1)
    torch.testing.assert_close(stored_e.double(), wanted, rtol=4e-3, atol=0)
    last = V - 2 * PIECE
    assert (e.others[-1, :N, last:128] == 0).all(), "d_input reads whole steps"
    assert d_weight[2 * PIECE :].isnan().all()
    assert not flag.any()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("d", [8, 64, 72])
def test_one_or_two_steps(d: int, late: bool) -> None:
    """Of 250 active rows, so that the second tile of rows is not computed."""
    problem, (x, w, target) = problem_for(LossSpec("sum", head_precision="float32"), 2, d), arrays(d)
    sums, e = torch.full((BLOCKS, N), torch.nan), torch.full((N, 640), torch.nan).bfloat16()
    vectors = {"ref_exponent": torch.zeros(N), "target_logit": torch.zeros(N), "flag": torch.zeros(3).int()}
    with mock.patch.object(kernels, "launch", partial(hopper_in_numpy.run, MODULES, late=late)):
        hopper_split_logits.split_exponentials(
            problem,
            x,
            w,
            slice(0, V),
            Active(torch.tensor(250, dtype=torch.int32), 0, 0),
            target=At(target, 0),
            sums=At(sums, 0),
            statistics=0,
            of_logits=None,
            e=Stores(e[:, :V]),
            hit=None,
            **{name: At(one, 0) for name, one in vectors.items()},
        )
    wanted = (x.double() @ w.double().T).exp()
    torch.testing.assert_close(e[:256, :V].double(), wanted[:256], rtol=4e-3, atol=0)
    torch.testing.assert_close(sums[:, :256].double(), by_block(wanted, 0).sum(2).T[:, :256], rtol=3e-5, atol=0)
    assert e[256:].isnan().all()
    assert sums[:, 256:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # it is not selected
def test_all_statistics_of_capped_logits_and_flags() -> None:
    """Also of a row whose sum is too large, of one of which a logit is not a number, and of one with equal largest
    logits in both halves of a class block."""
    softcap, scale = 2.0, 0.7
    spec = LossSpec("sum", softcap=softcap, logit_scale=scale, head_precision="float32")
    problem, (x, w, _) = problem_for(spec, 2), arrays()
    b, target = torch.randn(V, generator=torch.Generator().manual_seed(1)), torch.full((N,), -1)
    problem = replace(problem, linear_bias=b)
    ref_exponent, x[299, 7] = torch.full((N,), float(REFERENCE)), torch.nan
    ref_exponent[140] = -55.0
    x[7] = 0
    b[[2, 70, 100]] = 3.0
    found, sums = torch.full((BLOCKS, 5, N), torch.nan), torch.full((BLOCKS, N), torch.nan)
    e, flag = torch.zeros(N, 640).bfloat16(), torch.zeros(3, dtype=torch.int32)
    with mock.patch.object(kernels, "launch", partial(hopper_in_numpy.run, MODULES, late=True)):
        hopper_split_logits.split_exponentials(
            problem,
            x,
            w,
            slice(0, V),
            Active(torch.tensor(N, dtype=torch.int32), 0, 0),
            target=At(target, 0),
            ref_exponent=At(ref_exponent, 0),
            flag=At(flag, 0),
            sums=At(sums, 0),
            statistics=OF_LOGITS,
            of_logits=At(found, 0),
            target_logit=At(torch.zeros(N), 0),
            e=Stores(e[:, :V]),
            hit=None,
        )
    assert flag.tolist() == [0, 1, 1]
    kept = [row for row in range(N) if row not in (140, 299)]
    logits = softcap * torch.tanh(scale / softcap * (x.double() @ w.double().T + b.double()))[kept]
    exponents = logits / torch.log(torch.tensor(2.0, dtype=torch.float64)) - REFERENCE
    largest, exps = by_block(logits, -torch.inf).max(2), by_block(exponents.exp2(), 0)
    wanted = [largest.values, largest.indices, (exps * by_block(exponents, 0)).sum(2)]
    wanted += [by_block(logits, 0).sum(2), exps.square().sum(2)]
    for index, values in enumerate(wanted):
        torch.testing.assert_close(found[:, index, kept].double(), values.T.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[:, kept].double(), exps.sum(2).T, rtol=1e-4, atol=0)
    capped = exponents.exp2() * (1 - (logits / softcap).square())
    torch.testing.assert_close(e[kept, :V].double(), capped, rtol=4e-3, atol=1e-6)
