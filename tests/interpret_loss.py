"""Runs the loss through its Triton kernels in Triton's interpreter. It needs its own process, because Triton decides at
import whether to interpret. test_core_triton_interpreted.py runs it as `python interpret_loss.py PROGRAMS`. PROGRAMS is
a JSON list of lists, each with a program's name and arguments. The file prints one JSON line per call, with the index
of the program.

Triton's interpreter truncates float32 to bfloat16 where a GPU rounds, which makes the errors of gradients two and a
half times as large. Here its casts round to nearest, so interpreted results have the same budgets as GPU results.
"""

import functools
import gc
import itertools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import gluon_in_numpy
import numpy as np
import quick_interpreter
import torch
import triton.language as tl
from assertions import least_budget
from token_loss_problem import NAMED, counted_chunks, make_problem, outputs, used_of_budget
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_problem import leaves, problem, total
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import core_triton
from core_triton import (
    ampere_common,
    ampere_gradients,
    ampere_logits,
    chunked,
    float32_matmuls,
    gluon_common,
    hopper_logits,
    input_grad,
    operators,
    ops,
    recompute,
    row_kernels,
    row_math,
    row_statistics,
    saved_kernels,
    saved_ops,
    scaled_exp,
    target_grad,
    tile_config,
    token_kernels,
    token_losses,
)
from core_triton import kernels as triton_kernels
from core_triton.first_chunk import Stores
from core_triton.head_copy import copy_head_kernel
from core_triton.launch import At, launch
from core_triton.plan import DeviceInfo
from core_triton.problem import NeedsGrad, Problem, halves, plan_of
from core_triton.stored_logits import STORED_TILES
from core_triton.token_hook import TokenHook
from linear_ce import float32_tiles
from linear_ce.chunking import ChunkConfig
from linear_ce.reference import reference_loss
from linear_ce.rounding import round_to
from linear_ce.spec import DEFAULT_MEMORY_BUDGET, LossSpec
from linear_ce.statistics import ARGMAX, LOGIT_SUM, OF_LOGITS, SQUARES
from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import FP16_LOSS_SCALE, Case, cases
from parity.expected import compare, expected
from parity.tolerances import error

_BUILDER: Any = interpreter.InterpreterBuilder
_SEMANTIC: Any = TritonSemantic
_cast = _BUILDER.cast_impl


def _rounding_cast(self: Any, source: Any, to: Any) -> Any:
    pair = source.dtype.scalar, to.scalar
    if pair == (tl.float32, tl.bfloat16):
        bits = round_to(source.data, "bfloat16").view(np.uint32) >> np.uint32(16)
        return interpreter.TensorHandle(bits.astype(np.uint16), tl.bfloat16)
    if pair == (tl.bfloat16, tl.float32):
        bits = source.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
    return _cast(self, source, to)


def _patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replaces the interpreter's function, which copies the keyword arguments of every call.

    Also skips the wrapper of Triton's built-in functions, which only requires the argument that is passed here.
    """
    if getattr(member, "__code__", None) is tl.core.add.__code__:
        member = member.__wrapped__

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return member(*arguments, **options)

    scope.set_attr(package, name, call)


def _patch_language() -> None:
    """Replaces Triton's functions with the interpreter's until the process ends.

    The interpreter does this at each launch and each function call, which took a seventh of the total time.
    """
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


_unwrap_if_constexpr = tl.core._unwrap_if_constexpr


def _unwrap(value: Any) -> Any:
    """Skips the search for constants in types that cannot contain any, which most values have."""
    return value if type(value) in (tl.tensor, int, tl.dtype) else _unwrap_if_constexpr(value)


_to_tensor = _SEMANTIC.to_tensor


def _tensor_of(self: Any, value: Any, check_type: bool = True) -> Any:
    """A constexpr times a tensor is a constexpr in the interpreter, and Triton 3.9 does not take the tensor from it."""
    return _to_tensor(self, _unwrap(value), check_type)


_dtypes_equal = tl.dtype.__eq__


def _equal(self: Any, other: Any) -> bool:
    return self is other or _dtypes_equal(self, other)


_broadcast = _SEMANTIC.broadcast_impl_value


def _broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


INTEGERS_OF_TRITON = tl.int1, tl.int32, tl.int64
_operands = _SEMANTIC.binary_op_type_checking_impl
_constants: dict[Any, Any] = {}  # operands that Triton makes of numbers


def _binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *arguments: Any, **options: Any) -> Any:
    """Returns operands whose dtypes fit as they are, and looks up what a number beside a tensor becomes.

    Triton finds the common dtype of both operands and makes an array of the number at every operation, which took a
    third of the time.
    """
    if type(lhs) is tl.tensor and type(rhs) is tl.tensor:
        left, right = lhs.dtype, rhs.dtype
        if left is right and (left in INTEGERS_OF_TRITON or left is tl.float32):
            return _broadcast_impl_value(self, lhs, rhs)
        if right in INTEGERS_OF_TRITON and right is not tl.int1:
            if type(left) is tl.pointer_type and arguments[:1] == (True,):
                return _broadcast_impl_value(self, lhs, rhs)
            if left is tl.int64 and right is tl.int32 and arguments[2:] == ():
                return _broadcast_impl_value(self, lhs, self.cast(rhs, left))
        return _operands(self, lhs, rhs, *arguments, **options)
    numbers = type(lhs) in (int, float), type(rhs) in (int, float)
    if numbers not in ((True, False), (False, True)):
        return _operands(self, lhs, rhs, *arguments, **options)
    number, tensor = (lhs, rhs) if numbers[0] else (rhs, lhs)
    dtype = tensor.dtype
    if type(dtype) is not tl.dtype:
        return _operands(self, lhs, rhs, *arguments, **options)
    key = number, numbers[0], type(number), dtype.name, _sizes(tensor.shape), arguments, *options.values()
    constant = _constants.get(key)
    if constant is None:
        found = _operands(self, lhs, rhs, *arguments, **options)
        constant = found[not numbers[0]]
        if found[numbers[0]] is not tensor or constant.shape is not tensor.shape:
            return found
        constant.handle.data.flags.writeable = False  # nothing may change what later operations get
        _constants[key] = constant
    return (constant, tensor) if numbers[0] else (tensor, constant)


def _check_size(self: Any) -> None:
    """Does what the interpreter does for every value, in one function call instead of four."""
    dtype = self.dtype
    if type(dtype) is tl.dtype and self.data.itemsize * 8 > max(dtype.primitive_bitwidth, 8):
        raise ValueError(f"an element of {self.data.dtype} is larger than {dtype}")


# The interpreter makes new tuples of the shape and a new table of dtypes for every value, which took a third of the
# time.

_SIZES: dict[int, tuple[int, ...]] = {}  # of the shapes that exist until the end, by their addresses


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
    """Returns the shape and the number of elements, first as a type has them, then as a tensor has them."""
    core = tl.core
    shape, numel = core.tuple(sizes), core.validate_block_shape(list(sizes))
    of_tensor = core.tuple([core.constexpr(size) for size in sizes])
    _SIZES[id(shape)] = _SIZES[id(of_tensor)] = sizes
    return shape, numel, of_tensor, core.constexpr(numel)


def _sizes(shape: Any) -> tuple[int, ...]:
    known = _SIZES.get(id(shape))
    if known is not None:
        return known
    return tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)


_element_types: dict[Any, Any] = {}


def _with_element_ty(self: Any, scalar_ty: Any) -> Any:
    if type(scalar_ty) is not tl.dtype:
        return tl.core.block_type(scalar_ty, self.shape)
    key = scalar_ty.name, _sizes(self.shape)
    if key not in _element_types:
        _element_types[key] = tl.core.block_type(scalar_ty, self.shape)
    return _element_types[key]


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = _sizes(shape)
    self.element_ty = element_ty
    self.shape, self.numel, *_ = _shape(sizes)
    self.name = f"<{sizes}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    *_, self.shape, self.numel = _shape(_sizes(type.shape) if type.is_block() else ())


_np_dtypes = functools.cache(interpreter._get_np_dtype)


def _get_np_dtype(dtype: Any) -> Any:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _np_dtypes(scalar)


class Running:
    """The index of the program that runs now, and the implementation that it tests."""

    program = 0
    implementation = "triton"


def say(**fields: Any) -> None:
    print(json.dumps({"program": Running.program, **fields}), flush=True)


def print_budget_used(case: Case, arrays: Mapping[str, np.ndarray], **fields: Any) -> None:
    """Runs a case and prints the percentage of its budget that each output used."""
    outcome = run_case(f"torch-{Running.implementation}", case, arrays)
    assert outcome.implementation == Running.implementation
    comparisons = compare(case, expected(case, arrays), outcome.outputs)
    say(name=case.name, used={name: comparison.percent for name, comparison in comparisons.items()}, **fields)


def run_table(*names: str) -> None:
    """Runs cases of the contract."""
    by_name = {case.name: case for case in cases()}
    for case in map(by_name.__getitem__, names):
        print_budget_used(case, make_arrays(case))


def run_fewer_rows(*names: str) -> None:
    """Runs cases with a quarter of their rows, because kernels with one program per row take most of the time. Cases
    whose rows have two axes keep two blocks of rows. Those with a tight budget keep two fifths, which take several
    chunks, as do those with special values, which are in rows up to the 47th."""
    by_name = {case.name: case for case in cases()}
    for case in map(by_name.__getitem__, names):
        rows = case.n * 2 // 5 if case.tight_memory or case.poison else case.n // 4
        fewer = (3, 43) if len(case.lead) == 2 else (rows,)
        smaller = replace(case, lead=fewer) if case.n > 100 else case
        print_budget_used(smaller, make_arrays(smaller))


# Reference exponents that must be repaired.

REPAIRED = (
    Case(name="far-nostats", logit_std=60.0, with_stats=False, lead=(60,), token_weight="mask", has_bias=True),
    Case(name="far-softcap", logit_std=60.0, lead=(50,), spec=LossSpec("sum", softcap=60.0, z_loss_weight=1e-3)),
    Case(name="far", logit_std=60.0),
    Case(name="far-weight", logit_std=60.0, has_class_weight=True, head_dtype="float32", vocab_axis=1),
    Case(name="far-frozen_weight", logit_std=60.0, frozen=("linear_weight",), vocab=300),
    Case(name="far-frozen_input", logit_std=60.0, frozen=("input",), tight_memory=True, lead=(150,)),
)
LIMIT = 64 * np.log(2)  # a reference exponent allows the logsumexp to be this many nats above the target's logit


def run_repair(which: Literal["quick", "more"]) -> None:
    """Runs cases with logits far above the target's, in every block of rows or in only one."""
    for case in REPAIRED[:2] if which == "quick" else REPAIRED[2:]:
        case = replace(case, dtype="bfloat16")
        arrays = make_arrays(case)
        print_budget_used(case, arrays, far=far_rows(case, arrays))
    case = Case(name="far-in_one_block", logit_std=60.0, dtype="bfloat16", lead=(150,))
    arrays = make_arrays(case)
    near = [row for row in range(150) if row != 140]
    arrays["input"][near] /= 64  # a power of two: exact
    print_budget_used(case, arrays, far=far_rows(case, arrays))


def far_rows(case: Case, arrays: Mapping[str, np.ndarray]) -> list[int]:
    """Returns the rows whose reference exponents are too low, so that their block must be computed again."""
    arguments: dict[str, Any] = {**arrays, "spec": replace(case.spec, reduction="none")}
    result = reference_loss(**arguments)
    return np.flatnonzero((result.lse - result.target_logit).reshape(-1) > LIMIT + 1).tolist()


def run_float16() -> None:
    """Runs cases of float16 whose exponentials leave its range, in one chunk and in several, and counts these rows.
    Runs label smoothing with fewer gradients, and with class weights below the range."""
    scale, smooth = FP16_LOSS_SCALE["sum"], LossSpec("sum", label_smoothing=0.2)
    for case in (
        # The targets are in class blocks of a tile whose other classes have most of the probability.
        Case(name="shifted", dtype="float16", logit_std=12.0, lead=(50,), spec=smooth, loss_scale=scale),
        Case(
            name="shifted-chunks",
            dtype="float16",
            logit_std=12.0,
            lead=(60,),
            has_bias=True,
            tight_memory=True,
            spec=LossSpec("sum", softcap=60.0),
            loss_scale=scale,
        ),
        replace(REPAIRED[0], name="repaired", dtype="float16", loss_scale=FP16_LOSS_SCALE["mean"]),
    ):
        with core_triton.range_report() as report:
            print_budget_used(case, make_arrays(case))
        say(name=case.name, used={}, shifted=report.shifted_rows, rows=report.rows, repaired=report.repaired_blocks)
    mean = LossSpec(label_smoothing=0.2)  # whose gradients have other scales than 1
    half: dict[str, Any] = {"dtype": "float16", "lead": (40,), "spec": mean, "loss_scale": FP16_LOSS_SCALE["mean"]}
    for case in (
        Case(name="smooth-frozen_input", **half, frozen=("input",), has_bias=True, tight_memory=True),
        Case(name="smooth-frozen_weight", **half, frozen=("linear_weight",), has_bias=True),
        Case(name="smooth-into", **{**half, "loss_scale": 1.0}, grad_into=True, has_bias=True, vocab_axis=1),
    ):
        print_budget_used(case, make_arrays(case))
    made, weight = problem(40, 24, 300, dtype=torch.float16), torch.linspace(0.5, 2.0, 300)
    losses = [
        core_triton.linear_cross_entropy(
            made["input"],
            made["linear_weight"],
            made["target"],
            weight=factor * weight,
            label_smoothing=0.3,
            implementation=Running.implementation,
        )
        for factor in (1.0, 2.0**-20)
    ]
    say(name="smooth-small", used={"loss": 0.0 if torch.equal(*losses) else 200.0})


# Writes.

GUARD = 1024  # elements on each side of a buffer: a multiple of 16 bytes, which descriptors need
FACTORIES = ("empty", "new_empty", "empty_like", "zeros", "new_zeros", "zeros_like", "full", "full_like", "new_full")
PATTERNS = {1: 0x5A, 2: 0x7FD3, 4: 0x7FC12345, 8: -(2**40) - 7}  # 2 and 4 bytes are NaN, so that reads show
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guards(TorchDispatchMode):
    """Writes a pattern before and after every buffer that is allocated while it is active, also inside operators."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "linear_ce":
            with self:
                return operators.IMPLEMENTATIONS[func._schema.name](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in FACTORIES and isinstance(out, Tensor) and out.numel():
            return self.guarded(out)
        return out

    def guarded(self, tensor: Tensor) -> Tensor:
        """Returns a copy between two patterns."""
        integer = INTEGERS[tensor.itemsize]
        buffer = torch.full((tensor.numel() + 2 * GUARD,), PATTERNS[tensor.itemsize], dtype=integer)
        inside = buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), GUARD)
        self.buffers.append(buffer)
        return inside.copy_(tensor)

    def assert_whole(self) -> None:
        for buffer in self.buffers:
            pattern = PATTERNS[buffer.itemsize]
            assert (buffer[:GUARD] == pattern).all(), "written before a buffer"
            assert (buffer[-GUARD:] == pattern).all(), "written after a buffer"


WRITES: tuple[dict[str, Any], ...] = (
    {},
    {"n": 135, "bias": True, "softcap": 4.0, "vocab_size": 290},
    {"n": 135, "bias": True, "ignored": True, "memory_budget": 90_000},
    {"bias": True, "transposed": True, "logit_scale": 0.5},
    {"d": 21, "transposed": True},
    {"d": 21, "frozen": ("linear_weight",)},
    {"n": 135, "frozen": ("input",), "memory_budget": 90_000},
    {"n": 1, "v": 1, "d": 1},
    {"bias": True, "label_smoothing": 0.1, "z_loss_weight": 0.1, "weight": torch.linspace(0.5, 2.0, 300)},
)


def run_writes(dtype: str, functions: Sequence[str], numbers: Sequence[int] = range(len(WRITES))) -> None:
    """Calls the loss on guarded buffers full of NaN. It must write every element, and access nothing outside."""
    for function in functions:
        for number, options in ((number, WRITES[number]) for number in numbers):
            if function == "log_probs" and "label_smoothing" in options:
                continue
            guards = Guards()
            value, arrays = guarded_call(guards, function, getattr(torch, dtype), dict(options))
            assert value.isfinite()
            for leaf in leaves(arrays):
                assert leaf.grad is not None
                assert leaf.grad.isfinite().all(), f"{function} {options}: a gradient has unwritten elements"
            guards.assert_whole()
            say(name=f"{function}-{number}", buffers=len(guards.buffers))


def guarded_call(guards: Guards, function: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Returns the sum of the function's results, and the arrays with their gradients."""
    sizes = {name: options.pop(name, default) for name, default in (("n", 40), ("d", 24), ("v", 300))}
    made = problem(**sizes, dtype=dtype, bias=options.pop("bias", False))
    frozen = options.pop("frozen", ())
    made["target"] %= options.get("vocab_size", sizes["v"])
    if options.pop("ignored", False):
        made["target"][::3] = -100
    if options.pop("transposed", False):
        made["linear_weight"] = made["linear_weight"].detach().T.contiguous().T
    arrays = {}
    for name, tensor in made.items():
        differentiated = tensor.is_floating_point() and name not in frozen
        arrays[name] = guards.guarded(tensor.detach()).requires_grad_(differentiated)
    with guards:
        value = total(function, arrays, implementation=Running.implementation, **options)
        value.backward()
    return value, arrays


# Shards of the vocabulary.

SHARDED = (
    Case(name="plain"),
    Case(name="bias-softcap", has_bias=True, spec=LossSpec("sum", softcap=4.0, z_loss_weight=0.01)),
    Case(name="smoothing", has_class_weight=True, spec=LossSpec("sum", label_smoothing=0.2, logit_scale=0.5)),
    Case(name="padded", has_bias=True, spec=LossSpec("sum", vocab_size=380)),  # the last shard is all padding
    Case(name="axis1", vocab_axis=1),
)
SIZES = (300, 100, 107)


def run_shards(dtype: str) -> None:
    """Merges the statistics and gradients of three vocabulary shards."""
    for case in SHARDED:
        case = replace(case, lead=(70,), dtype=dtype, spec=replace(case.spec, reduction="sum"))
        arrays = make_arrays(case)
        arguments: dict[str, Any] = {**arrays, "spec": case.spec}
        want = reference_loss(**arguments)
        budgets = expected(case, arrays)
        found = {name: value.float().numpy() for name, value in sharded(case, arrays).items()}
        used = {name: 100 * error(found[name], getattr(want, name)) / 2e-6 for name in ("lse", "target_logit", "loss")}
        # Each shard rounds its part of d_input once.
        parts = {"d_input": len(SIZES) ** 0.5, "d_weight": 1.0, "d_bias": 1.0}
        for name in parts:
            if name in budgets:
                used[name] = 100 * error(found[name], budgets[name].value) / (parts[name] * budgets[name].budget)
        say(name=case.name, used=used)


def sharded(case: Case, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Returns loss, lse, target_logit and gradients merged from shards, each computed from its rows of the head."""
    dtypes = {name: getattr(torch, case.dtype) for name in ("input", "linear_weight", "linear_bias")}
    t = {name: torch.tensor(array, dtype=dtypes.get(name)) for name, array in arrays.items()}
    classes, n, everything = case.classes, case.n, slice(0, case.n)
    class_weight = t["weight"][:classes].float() if "weight" in t else None
    row_weight = torch.ones(n)
    shards = list(shards_of(case, t, row_weight, class_weight))

    def statistics(shard: Problem) -> row_math.Partial:
        return chunked.chunk_statistics(shard, everything, 128, tiles=ops.tiles_of(plan_of(shard)))

    merged = statistics(shards[0])
    for shard in shards[1:]:
        merged = row_math.merge(merged, statistics(shard))
    found = row_math.finish(merged, t["target"], row_weight, classes)
    loss = row_math.row_loss(case.spec, found, t["target"], row_weight, class_weight, classes)
    coefficients = row_math.loss_coefficients(case.spec, found.lse, t["target"], row_weight, class_weight, classes)
    needs_grad = NeedsGrad(d_input=True, d_weight=True, d_bias=case.has_bias)
    config = ChunkConfig(rows=64, vocab_chunk=128, float32_sum=True)
    parts = [
        chunked.gradients(ops.tiles_of(plan_of(shard)), shard, config, found.lse, coefficients, needs_grad)
        for shard in shards
    ]
    gradients = {
        "d_input": torch.stack([part.d_input.float() for part in parts if part.d_input is not None]).sum(0),
        "d_weight": torch.cat([part.d_weight for part in parts if part.d_weight is not None]),
    }
    if case.has_bias:
        gradients["d_bias"] = torch.cat([part.d_bias for part in parts if part.d_bias is not None])
    return gradients | {"loss": loss.sum(), "lse": found.lse, "target_logit": found.target_logit}


def shards_of(
    case: Case, t: Mapping[str, Tensor], row_weight: Tensor, class_weight: Tensor | None
) -> Iterator[Problem]:
    offset = 0
    for size in SIZES:
        w = t["linear_weight"][offset : offset + size]
        b = t["linear_bias"][offset : offset + size] if case.has_bias else None
        w = w.T.contiguous().T if case.vocab_axis == 1 else w
        shard = Problem(
            t["input"], w, b, t["target"], row_weight, class_weight, case.spec, case.classes, vocab_offset=offset
        )
        plan = ops.plan_for(
            shard, "gradients", DEFAULT_MEMORY_BUDGET, Running.implementation, NeedsGrad(True, True, case.has_bias)
        )
        yield replace(shard, plan=plan)
        offset += size


# Layouts.


def run_layouts(dtype: str) -> None:
    """Checks that an input with contiguous columns, whose strides no descriptor allows, gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator).to(getattr(torch, dtype)) for shape in ((24, 24), (300, 24)))
    target = torch.randint(0, 300, (24,), generator=generator)
    for reduction, differentiates in itertools.product(("mean", "none"), (False, True)):
        results = []
        for input in (x.clone(), x.t().contiguous().t()):
            arrays = [input.requires_grad_(differentiates), w.clone().requires_grad_(differentiates)]
            loss = core_triton.linear_cross_entropy(
                *arrays, target, reduction=reduction, implementation=Running.implementation
            )
            gradients = torch.autograd.grad(loss.sum(), arrays) if differentiates else ()
            results.append([loss.detach(), *gradients])
        same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        say(name=f"{reduction}, gradients {differentiates}", used={"difference": 0.0 if same else 200.0})
    if dtype != "float32":
        run_head_chunks(getattr(torch, dtype), generator)
    if dtype == "bfloat16":
        run_segments(generator)


def run_head_chunks(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Checks that a float32 head that is cast in vocabulary chunks gives the same loss. The last chunk has fewer class
    blocks than the others."""
    x, w = (torch.randn(*shape, generator=generator) for shape in ((16, 24), (700, 24)))
    target = torch.randint(0, 700, (16,), generator=generator)
    for differentiates in (False, True):
        losses = []
        for budget in (None, 4 * 2 * 24 * 512):
            arrays = x.to(dtype), w.clone().requires_grad_(differentiates)
            losses.append(
                core_triton.linear_cross_entropy(
                    *arrays, target, memory_budget=budget, implementation=Running.implementation
                )
            )
        difference = abs(float((losses[0] - losses[1]).detach())) / 1e-6
        say(name=f"vocabulary chunks of a float32 head, gradients {differentiates}", used={"loss": 100 * difference})


def run_head_copy() -> None:
    """Copies heads directly, and in calls that need the copies for the repair of their last row block."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(18, 300, generator=generator)
    for splits, classes, width in ((False, 18, 304), (True, 17, 600)):
        for matrix in (w, w.T.contiguous().T):
            expected = w.new_zeros((classes, width)).bfloat16()
            expected[:, :300] = w[:classes]
            if splits:
                expected = halves(w[:classes], torch.bfloat16)
            for flags in (None, [0, 0], [0, 1]):
                copy = torch.full_like(expected, 7.0)
                copy[:, 300 * (1 + splits) :] = 0  # as `head_copy.head_of` allocates it
                before = copy.clone()
                flag = None if flags is None else torch.tensor(flags, dtype=torch.int32)
                sizes = 4, classes, 300, width
                arguments = matrix[:classes], copy, flag, *matrix.stride(), *sizes
                launch(copy_head_kernel, (3,), *arguments, SPLITS=splits, BLOCK_V=16, BLOCK_D=256, num_warps=8)
                wrong = (copy != (before if flags == [0, 0] else expected)).sum()
                say(name=f"copy of {classes} classes, flags {flags}", used={"wrong": 100.0 * int(wrong)})
    padded = torch.randn(20, 255, generator=generator).bfloat16(), torch.randn(30, 255, generator=generator)
    options: dict[str, Any]
    target, losses = torch.arange(20), []
    for implementation in (Running.implementation, "chunked"):
        options = {"head_precision": "float32", "implementation": implementation}
        losses.append(core_triton.linear_cross_entropy(*padded, target, **options))
    say(name="padding past both parts", used={"loss": 100 * abs(float(losses[0] / losses[1]) - 1) / 1e-5})
    x, head = torch.randn(130, 20, generator=generator).bfloat16(), torch.randn(140, 20, generator=generator)
    logits = x.float() @ head.T
    # Far below the largest logit in the last row block only.
    target = torch.where(torch.arange(130) < 128, logits.argmax(1), logits.argmin(1))
    for head_precision in (None, "float32"):
        gradients = []
        for implementation in (Running.implementation, "chunked"):
            arrays = x.clone().requires_grad_(), head.clone().requires_grad_()
            options = {"head_precision": head_precision, "logit_scale": 20.0}
            core_triton.linear_cross_entropy(*arrays, target, implementation=implementation, **options).backward()
            gradients.append([array.grad for array in arrays])
        used = {}
        for name, found, wanted in zip(("d_input", "d_weight"), *gradients, strict=True):
            assert found is not None
            assert wanted is not None
            used[name] = 100 * error(found.float().numpy(), wanted.float().numpy()) / 0.01
        say(name=f"repair with head_precision {head_precision}", used=used)
    # Rounding this head takes the same share of each number. The error of d_input must not be such a share.
    head = (head.bfloat16().float() * (1 + 0.9 * 2.0**-9)).requires_grad_(False)
    target, found, exact = logits.argmin(1), x.clone().requires_grad_(), x.float().requires_grad_()
    core_triton.linear_cross_entropy(
        found, head, target, head_precision="float32", logit_scale=20.0, implementation=Running.implementation
    ).backward()
    core_triton.linear_cross_entropy(exact, head, target, logit_scale=20.0, implementation="chunked").backward()
    assert found.grad is not None
    assert exact.grad is not None
    share = ((found.grad - exact.grad) * exact.grad).sum() / exact.grad.square().sum()
    say(name="d_input of a head that is not rounded", used={"share": 100 * abs(float(share)) / 2e-4})


def run_pieces(which: str = "all") -> None:
    """Checks calls whose first chunk has its exponentials in the memory of d_weight, in three pieces of the classes.

    Args:
        which: "all", or "repaired", those of which rows are repaired or shifted.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, vocab, classes = 230, 128, 700, 680
    x, head = (torch.randn(*shape, generator=generator) for shape in ((tokens, hidden), (vocab, hidden)))
    head /= 4  # few rows are repaired, but where logits are multiplied
    x, bias = x.bfloat16(), torch.randn(vocab, generator=generator)  # float16 holds its numbers too
    target = torch.randint(0, classes, (tokens,), generator=generator)
    target[1::2] = (x.float() @ head.T)[1::2, :classes].argmax(1)  # whose term of d_logits is large
    target[::7] = -100
    weight = torch.rand(tokens, generator=generator)
    choose, chunks = tile_config.choose_scaled_exp, []

    def in_pieces(rows: int, most: int, **options: Any) -> tile_config.ScaledExpConfig:
        found, others = choose(**options), -(-(tokens - most) // rows)
        first_rows = tokens - others * rows
        head_rows = 512 if options["needs_cast"] else found.head_rows  # vocabulary chunks of several pieces
        config = replace(
            found, rows=rows, first_rows=first_rows, piece=256, scratch=4 * found.scratch, head_rows=head_rows
        )
        chunks.append([(chunk.start, chunk.stop) for chunk in config.chunks(tokens)])
        return config

    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    calls = (
        (bfloat16, bfloat16, 40, 1.0, 1.0),
        (bfloat16, float32, 88, 1.0, 1.0),
        (bfloat16, bfloat16, 40, 20.0, 1.0),
        (float16, float16, 40, 4.0, FP16_LOSS_SCALE["mean"]),
    )
    for of_input, dtype, rows, scale, upstream in calls if which == "all" else calls[2:]:
        options: dict[str, Any] = {"token_weight": weight, "vocab_size": classes, "logit_scale": scale}
        results: list[list[Tensor]] = []
        for implementation in (Running.implementation, "chunked"):
            exact = implementation == "chunked"
            arrays = [array.float() if exact else array for array in (x.to(of_input), head.to(dtype))]
            arrays = [array.clone().requires_grad_() for array in (*arrays, bias)]
            if not exact and dtype == torch.float32:
                options |= {"head_precision": "float32"}
            choice = partial(in_pieces, rows, hidden * dtype.itemsize // 2)
            patch = mock.patch.object(tile_config, "choose_scaled_exp", choice)
            with patch, core_triton.range_report() as report:
                loss = core_triton.linear_cross_entropy(
                    arrays[0], arrays[1], target, linear_bias=arrays[2], implementation=implementation, **options
                )
            if of_input == float16 and not exact:
                say(name="shifted rows of float16", used={}, shifted=report.shifted_rows, rows=report.rows)
            options.pop("head_precision", None)
            loss.backward(torch.tensor(upstream))
            results.append([loss.detach(), *(array.grad for array in arrays if array.grad is not None)])
        names = ("loss", "d_input", "d_weight", "d_bias")
        budget = 6e-3 if of_input == bfloat16 else 6e-3 / 8  # three more bits
        used = {
            name: 100 * error(found.float().numpy(), wanted.float().numpy()) / (1e-4 if name == "loss" else budget)
            for name, found, wanted in zip(names, *results, strict=True)
        }
        used["padding"] = 100 * float(results[0][2][classes:].abs().sum())
        say(name=f"pieces, {of_input}, a head of {dtype}, logits times {scale}", used=used)
    assert {len(one) for one in chunks} == ({4, 1} if which == "all" else {4}), chunks


def run_segments(generator: torch.Generator) -> None:
    """Checks that targets that are sorted in three segments and merged give the same bits as one segment."""
    x, w = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((700, 8), (40, 8)))
    target = torch.randint(0, 50, (700,), generator=generator)
    target[target >= 40] = -100
    gradients = []
    for segment in (target_grad.SEGMENT, 256):
        head = w.clone().requires_grad_()
        with mock.patch.object(target_grad, "SEGMENT", segment):
            core_triton.linear_cross_entropy(
                x, head, target, reduction="sum", implementation=Running.implementation
            ).backward()
        gradients.append(head.grad)
    same = gradients[0] is not None and torch.equal(*gradients) and bool(gradients[0].isfinite().all())
    say(name="segments of targets", used={"difference": 0.0 if same else 200.0})


# Chunks.


def run_chunks() -> None:
    """Compares the head's gradients, summed over the many chunks of rows of the smallest budget, with one chunk."""
    x, w = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in ((100, 8), (300, 8))
    )
    x += 2  # the sum of the rows is large, as is its term of label smoothing
    target = torch.arange(100) % 47

    def gradients(dtype: torch.dtype, smoothing: float, budget: int | None) -> list[Tensor]:
        head = [one.to(dtype, copy=True).requires_grad_() for one in (w, torch.linspace(-1, 1, 300))]
        loss = core_triton.linear_cross_entropy(
            x.to(dtype),
            head[0],
            target,
            linear_bias=head[1],
            reduction="sum",
            label_smoothing=smoothing,
            memory_budget=budget,
            implementation=Running.implementation,
        )
        return list(torch.autograd.grad(loss, head))

    for dtype, smoothing in ((torch.bfloat16, 0.0), (torch.bfloat16, 0.3), (torch.float16, 0.3)):
        of_budget = partial(gradients, dtype, smoothing)
        found, want = of_budget(least_budget(of_budget)), of_budget(None)
        for name, few, one in zip(("d_weight", "d_bias"), found, want, strict=True):
            used = {name: 100 * error(few.float().numpy(), one.float().numpy()) / torch.finfo(dtype).eps}
            say(name=f"{name}, {dtype}, smoothing {smoothing}", used=used)


# Token losses.

TOKEN_LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"bias": True, "token_weight": True, "spec": LossSpec("mean", softcap=3.0, vocab_size=130)},
    "custom": {"bias": True, "normalizer": 7.0, "spec": LossSpec("mean", logit_scale=0.5)},
    "grpo-k3": {"out_of_range": True, "spec": LossSpec("sum")},
    "custom-entropy": {"bias": True, "token_weight": True, "spec": LossSpec("mean", softcap=3.0, vocab_size=130)},
    "grpo-k2-entropy": {"out_of_range": True, "spec": LossSpec("sum")},
}


def run_token_loss(dtype: str, *names: str) -> None:
    """Compares token losses, in the chunks of the smallest budget, with the float64 reference."""
    for name in names:
        made = make_problem(name, dtype, (3, 35), d=8, v=140, **TOKEN_LOSSES[name])
        call = functools.partial(outputs, made, implementation=Running.implementation)
        least = least_budget(lambda budget, call=call: call(memory_budget=budget))
        with counted_chunks() as chunks:
            found = call(memory_budget=least)
        used = used_of_budget(made, found, chunks.call_count)
        say(name=f"{dtype}-{name}", used=used, chunks=chunks.call_count)


def run_log_probs(dtype: str, spread: float) -> None:
    """Checks that a token loss with gradients gets the log-probabilities of `linear_log_probs`, bit for bit, with any
    budget and beside any other rows. With a large spread of the logits, rows are repaired."""
    generator = torch.Generator().manual_seed(0)
    n, d, v = 140, 16, 300  # two blocks of rows
    x, w = torch.randn(n, d, generator=generator), torch.randn(v, d, generator=generator)
    x[::7] *= spread
    target = torch.randint(0, v, (n,), generator=generator)
    arrays = x.to(getattr(torch, dtype)), w.to(getattr(torch, dtype))
    want = core_triton.linear_log_probs(*arrays, target, implementation=Running.implementation)
    half = target.clone()
    half[torch.rand(n, generator=generator) < 0.5] = -100

    def of_token_loss(
        target: Tensor, budget: int | None, reduction: Any = "mean", entropy_weight: float = 0.0
    ) -> core_triton.TokenStats:
        leaves = [one.clone().requires_grad_() for one in arrays]
        function = token_losses.weighted_nll(entropy_weight=entropy_weight)
        arguments: list[Any] = [*leaves, target, function, torch.linspace(-1, 1, n)]
        options: dict[str, Any] = {"memory_budget": budget, "implementation": Running.implementation}
        return core_triton.linear_token_loss_with_stats(
            *arguments, stats=("log_prob", "lse"), reduction=reduction, **options
        )[1]

    least = least_budget(lambda budget: of_token_loss(target, budget))
    for name, y, budget, reduction, entropy_weight in (
        ("all rows", target, None, "mean", 0.0),
        ("rows", target, None, "none", 0.0),
        ("least budget", target, least, "mean", 0.0),
        ("half of the rows", half, None, "mean", 0.0),
        ("half of the rows, least budget", half, 2 * least, "mean", 0.0),
        ("half of the rows, entropy bonus", half, 4 * least, "mean", 0.1),
        ("rows, entropy bonus", target, None, "none", 0.1),
    ):
        found = of_token_loss(y, budget, reduction, entropy_weight)
        counted = y >= 0
        assert found.log_prob is not None
        assert found.lse is not None
        same = [
            torch.equal(a[counted], b[counted]) for a, b in ((found.log_prob, want.log_prob), (found.lse, want.lse))
        ]
        repaired = int((-want.log_prob > LIMIT + 1).sum())
        say(name=f"{name}, spread {spread}", used={"difference": 0.0 if all(same) else 200.0}, repaired=repaired)
    if dtype != "float32":
        x, w = (one.clone().requires_grad_() for one in arrays)
        saved = core_triton.linear_log_probs(x, w, target, saved_budget=2**24, implementation=Running.implementation)
        same = all(torch.equal(a.detach(), b) for a, b in zip(saved, want, strict=True))
        say(name="saved rows", used={"difference": 0.0 if same else 200.0}, repaired=repaired)


PACK_ROWS = scaled_exp.pack_rows


def run_kept_rows() -> None:
    """Checks that a token loss keeps the reference exponents of the rows beside one that must be repaired, and that the
    loss does not."""
    arrays = make_arrays(Case(name="kept", logit_std=60.0, dtype="bfloat16", lead=(150,)))
    near = torch.arange(150) != 140
    arrays["input"][near] /= 64
    x, w = (torch.tensor(arrays[name]).bfloat16().requires_grad_() for name in ("input", "linear_weight"))
    target = torch.tensor(arrays["target"])
    for name, call, kept in (
        ("token loss", lambda: core_triton.linear_token_loss(x, w, target, torch.neg, implementation="triton"), True),
        ("loss", lambda: core_triton.linear_cross_entropy(x, w, target, implementation="triton"), False),
    ):
        packed: list[scaled_exp.PackedRows] = []

        def pack_rows(*arguments: Any, packed: Any = packed, **options: Any) -> scaled_exp.PackedRows:
            packed.append(PACK_ROWS(*arguments, **options))
            return packed[-1]

        with mock.patch.object(scaled_exp, "pack_rows", pack_rows):
            call()
        (rows,) = packed
        from_target = torch.floor(rows.target_logit / np.log(2) + 0.5)
        same = (rows.ref_exponent == from_target)[near]
        right = bool(same.all()) == kept and rows.ref_exponent[140] > from_target[140] + 64
        say(name=name, used={"kept": 0.0 if right else 200.0})


REPAIR = scaled_exp.kernels.repair


def run_repair_blocks() -> None:
    """Repairs rows whose tiles have two class blocks of sums, those of `hopper_split_logits`. Others keep their sums.

    Row 3 leaves its range. A bias of inf makes the lse of every row inf, wherever its class is.
    """
    n, d, v, block = 70, 64, 600, tile_config.SPLIT_CLASS_BLOCK
    generator = torch.Generator().manual_seed(0)
    x = (0.1 * torch.randn(n, d, generator=generator)).bfloat16()
    w, target = torch.randn(v, d, generator=generator), torch.randint(0, v, (n,), generator=generator)
    plan = core_triton.explain(x.to("meta"), w.to("meta"), head_precision="float32", device="h200").plan
    problem = Problem(x, w, None, target, torch.ones(n), None, LossSpec("sum", head_precision="float32"), v, plan=plan)
    for by_row, infinite, bits in itertools.product((False, True), (None, 5, 200), (0, OF_LOGITS)):
        bias, ref_exponent = torch.zeros(v), torch.zeros(n)
        ref_exponent[3] = -60.0
        if infinite is not None:
            bias[infinite] = torch.inf
        logits = x.double() @ w.double().T + bias.double()
        exponentials = (logits / np.log(2) - ref_exponent.double()[:, None]).exp2()
        sums = torch.nn.functional.pad(exponentials, (0, -v % block)).view(n, -1, block).sum(2).T.float().contiguous()
        lost, before, found = (sums >= 2.0**48).any(0), sums.clone(), torch.full((len(sums), 5, n), torch.nan)
        redone = lost if by_row else torch.ones_like(lost)
        REPAIR(
            replace(problem, linear_bias=bias),
            x,
            w,
            slice(0, v),
            target=At(target, 0),
            ref_exponent=At(ref_exponent, 0),
            top=At(torch.where(redone, -torch.inf, torch.inf), 0),
            flag=At(torch.ones(1, dtype=torch.int32), 0),
            ticket=At(torch.zeros(2, dtype=torch.int32), 0),
            sums=At(sums, 0),
            statistics=bits,
            of_logits=At(found, 0) if bits else None,
            target_logit=At(torch.zeros(n), 0),
            e=Stores(torch.zeros(n, 640).bfloat16()[:, :v]),
            finds=True,
            redoes=True,
            by_row=by_row,
        )
        lse = sums.double().sum(0).log2() + ref_exponent.double()
        right = torch.allclose(lse, logits.logsumexp(1) / np.log(2), rtol=1e-4, atol=1e-3)
        right &= torch.equal(sums[:, ~redone], before[:, ~redone])
        if bits and infinite is None:
            top, at = found[:, 0, redone].max(0)
            argmax = at * block + found[at, 1, redone.nonzero()[:, 0]].long()
            right &= torch.allclose(top.double(), logits[redone].max(1).values, rtol=1e-4, atol=1e-3)
            right &= torch.equal(argmax, logits[redone].argmax(1))
            right &= torch.allclose(found[:, 3, redone].sum(0).double(), logits[redone].sum(1), rtol=1e-4, atol=1e-2)
        say(name=f"by_row {by_row}, inf {infinite}, statistics {bits}", used={"sums": 0.0 if right else 200.0})


def run_batch_invariant() -> None:
    """Says which results of a row are other bits among other rows, and which rows are repaired."""
    for name, used in batch_invariant_differences().items():
        say(name=name, used={index: 200.0 if differs else 0.0 for index, differs in used.items()})


def batch_invariant_differences(
    part: tuple[int, int] = (0, 1),
    implementation: str | None = None,
    budget: int = 40_000,
    *,
    of_rows: bool = True,
    **of_shard: Any,
) -> dict[str, dict[str, bool]]:
    """Returns which results of a row with batch_invariant=True are other bits among other rows: alone, in another
    order, in other chunks, and beside rows that are repaired. A repair writes no other row.

    The interpreter runs no kernel of d_input, so here each row is multiplied by itself.

    Args:
        part: the part of the head that the call has, and how many there are.
        budget: the memory budget of a call in chunks.
        of_rows: whether functions are called too whose gradients are computed in the backward pass.
        of_shard: arguments of a call that has one.
    """
    generator = torch.Generator().manual_seed(0)
    n, d, v = 40, 16, 300
    x, w = (torch.randn(*shape, generator=generator) for shape in ((n, d), (v, d)))
    far = [5, 38]
    x[far] *= 40
    x, w, target = x.bfloat16(), w.bfloat16(), torch.randint(0, v, (n,), generator=generator)
    weight = torch.randn(n, generator=generator)
    w = w.chunk(part[1])[part[0]]
    repaired: list[int] = []

    def repair(*arguments: Any, e: Stores, **options: Any) -> None:
        stored = e.first
        before = None if stored is None else stored.clone()
        if stored is not None:
            stored.fill_(7.0)
        REPAIR(*arguments, e=e, **options)
        if stored is not None and before is not None:
            redone = (stored != 7).any(1)
            repaired.append(int(redone.sum()))
            stored[~redone] = before[~redone]

    def row_by_row(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
        for i in range(len(a)):
            total[i] = a[i] @ b if first else total[i] + a[i] @ b

    def results(rows: Sequence[int], budget: int | None = None, kept: Tensor | None = None) -> list[Tensor]:
        input, head = x[rows].requires_grad_(), w.clone().requires_grad_()
        y = target[rows] if kept is None else torch.where(kept[rows], target[rows], -100)
        options: dict[str, Any] = {"memory_budget": budget, "batch_invariant": True, **of_shard}
        options["implementation"] = implementation or Running.implementation
        loss = token_losses.weighted_nll(), weight[rows]
        summed, stats = core_triton.linear_token_loss_with_stats(
            input, head, y, *loss, stats=("log_prob", "lse"), reduction="sum", **options
        )
        losses, made = [summed], [stats.log_prob, stats.lse]
        if of_rows:
            log_probs = core_triton.linear_log_probs(input, head, y, softcap=200.0, **options)
            loss_of_rows, of_call = core_triton.linear_cross_entropy_with_stats(
                input, head, y, reduction="none", **options
            )
            losses += [log_probs.log_prob * weight[rows], loss_of_rows]
            made += [log_probs.log_prob, log_probs.lse, loss_of_rows, of_call.lse]
        made += [torch.autograd.grad(one.sum(), input)[0] for one in losses]
        return [one.detach() for one in made if one is not None]

    with (
        mock.patch("core_triton.plan.why_variant", return_value=None),
        mock.patch.object(scaled_exp, "add_matmul", row_by_row),
        mock.patch.object(scaled_exp.kernels, "repair", repair),
    ):
        everything = [*range(n)]
        want = results(everything)
        differences = {"repaired rows": {str(repaired): not repaired or not {*repaired} <= {1, 2}}}
        half = torch.rand(n, generator=generator) < 0.5
        for name, rows, options in (
            ("a repaired row alone", [38], {}),
            ("a few in another order, without those that are repaired", [*range(30, 20, -1)], {}),
            ("in other chunks, half of them ignored", everything, {"budget": budget, "kept": half}),
        ):
            counted = half[rows] if "kept" in options else torch.ones(len(rows), dtype=torch.bool)
            found = results(rows, **options)
            differ = [not torch.equal(a[counted], b[rows][counted]) for a, b in zip(found, want, strict=True)]
            differences[name] = {str(index): one for index, one in enumerate(differ)}
    return differences


def run_token_kernel() -> None:
    """Compares `token_kernels` with the formulas under autograd: all named losses, on rows in any order and on a slice,
    with strided arguments of other dtypes, and with rows that do not contribute or are NaN. With rows in any order the
    kernel gets nll of all rows of the call."""
    generator = torch.Generator().manual_seed(0)
    tokens, n = 700, 600
    row_weight = torch.rand(tokens, generator=generator)
    row_weight[::5] = 0.0
    order, nll = torch.randperm(tokens, generator=generator)[:n], 8 * torch.rand(n, generator=generator) ** 2
    nll[row_weight[order] == 0], nll[3] = torch.nan, torch.nan
    for name, function in NAMED.items():
        entropy = torch.rand(n, generator=generator) if function.entropy_weight else None
        arguments = torch.randn(2, tokens, 4, generator=generator)
        arguments[..., 1:] *= 0.5
        arguments[0, :, 1:] -= torch.zeros(tokens).index_put((order,), nll.nan_to_num())[:, None]
        arguments[:, ::5] = torch.nan
        per_token = [arguments[0, :, 0].bfloat16(), *arguments[0, :, 1:].unbind(1)][: len(function.per_token)]
        for rows in (order, slice(50, 50 + n)):
            for d_logits, d_per_token in ((True, True), (True, False), (False, True)):
                outputs: list[list[Tensor]] = []
                for kernels in (True, False):
                    hook = TokenHook(
                        function,
                        per_token,
                        row_weight,
                        d_logits=d_logits,
                        d_per_token=[d_per_token] * len(per_token),
                        log_prob=d_logits,
                        with_entropy=entropy is not None,
                        kernels=kernels,
                    )
                    of_call = rows is order and kernels and entropy is None
                    given = torch.full((tokens,), 7.0).index_put((order,), nll) if of_call else nll
                    weight = hook.process(rows, given, entropy, of_call=of_call)
                    full = hook.loss, hook.gradient_weight, hook.d_entropy, hook.contributes, hook.log_prob
                    full = *full, *hook.d_per_token
                    outputs.append([one[rows] for one in full if one is not None])
                    if d_logits:
                        assert weight is not None
                        outputs[-1].append(weight)
                used = {
                    f"{index}": 100 * error(found.numpy(), want.numpy()) / 1e-6
                    for index, (found, want) in enumerate(zip(*outputs, strict=True))
                }
                say(name=f"{name}, {type(rows).__name__}, {d_logits}, {d_per_token}", used=used)
    found, want = token_kernels.contributes(row_weight), (row_weight != 0).float()
    say(name="contributes", used={"rows": 0 if torch.equal(found, want) else torch.inf})


# Rows of several programs.


def run_rows() -> None:
    """Checks row weights and packing with several programs, each of which counts the rows before its own."""
    generator = torch.Generator().manual_seed(0)
    tokens, classes = 5000, 40
    target = torch.randint(0, classes + 20, (tokens,), generator=generator)
    target[target >= classes] = -100
    token_weight, class_weight = torch.rand(2, tokens, generator=generator)
    token_weight[::7] = 0.0
    class_weight = class_weight[:classes].clone()
    spec = LossSpec("mean")
    for name, vectors in (
        ("count", (None, None, None)),
        ("class weights", (class_weight, token_weight, None)),
        ("normalizer", (None, token_weight, torch.tensor(7.5))),
    ):
        want = row_math.row_weights(spec, target, *vectors, classes)
        found = row_kernels.row_weights(target, *vectors, classes, spec.ignore_index, mean=True)
        used = {"row_weight": 100 * error(found.numpy(), want.numpy()) / 1e-6}
        order, packed_target, packed_weight = torch.empty_like(target), torch.empty_like(target), torch.empty_like(want)
        count, zeros = torch.empty((), dtype=torch.int32), torch.ones(3000, dtype=torch.int32)
        hit = torch.ones(10_000, dtype=torch.int32)
        row_kernels.pack(
            target,
            want,
            order=order,
            packed_target=packed_target,
            packed_weight=packed_weight,
            count=count,
            zeros=zeros,
            hit=hit,
        )
        first = torch.argsort((want == 0).int(), stable=True)
        right = torch.equal(order, first) and torch.equal(packed_target, target[first])
        right &= torch.equal(packed_weight, want[first]) and int(count) == int((want != 0).sum())
        used["packing"] = 0.0 if right and not zeros.any() and not hit.any() else 200.0
        say(name=name, used=used)
    run_merge(generator)


def run_merge(generator: torch.Generator) -> None:
    """Merges the largest logits, their columns and the sums of exponentials and of their squares of three blocks."""
    n, width = 5, 20
    logits = torch.randn(n, 3 * width, generator=generator)
    blocks = logits.view(n, 3, width)
    top = blocks.amax(2)
    exponentials = (blocks - top[:, :, None]).exp()
    of_top = torch.stack([top, blocks.argmax(2).float(), exponentials.square().sum(2)]).permute(2, 0, 1).contiguous()
    sums, sum_exp_log = exponentials.sum(2).T.contiguous(), torch.zeros(3, n)
    argmax, sum_squared = torch.empty(n, dtype=torch.int64), torch.empty(n)
    row_statistics.merge(of_top, sums, None, sum_exp_log, argmax, sum_squared, ARGMAX | SQUARES, 3, width, n)
    all_exponentials = (logits - logits.amax(1, keepdim=True)).exp()
    pairs = {
        "sum": (sums[0], all_exponentials.sum(1)),
        "squares": (sum_squared, all_exponentials.square().sum(1)),
        "argmax": (argmax.float(), logits.argmax(1).float()),
    }
    say(name="merge", used={name: 100 * error(a.numpy(), b.numpy()) / 1e-6 for name, (a, b) in pairs.items()})


def run_stored() -> None:
    """Compares the two passes over stored float32 logits with those of `chunked`, where a row takes several blocks."""
    generator = torch.Generator().manual_seed(0)
    n, d, v, classes = 6, 16, 9000, 8990
    x, w = torch.randn(n, d, generator=generator), torch.randn(v, d, generator=generator)
    b = torch.randn(v, generator=generator)
    b[:4100] = -torch.inf  # no finite logit in the first block
    target = torch.tensor([5000, 8989, 4096, 8191, 8192, 7])
    class_weight = torch.rand(classes, generator=generator)
    chunk, whole = slice(0, n), slice(0, classes)
    for name, bias, spec in (
        ("masked", b, LossSpec("sum", logit_scale=0.7)),
        ("smoothing", None, LossSpec("sum", label_smoothing=0.1, softcap=3.0)),
    ):
        row_weight = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.0])
        problem = Problem(x, w, bias, target, row_weight, class_weight, spec, classes)
        found, want = [], []
        for results, tiles in ((found, STORED_TILES), (want, chunked.TORCH_TILES)):
            kept: list[Tensor] = []
            # The sum of the logits is for token losses, which have no class weights.
            partial = tiles.partial(problem, x, w[whole], target, whole, kept, OF_LOGITS & ~LOGIT_SUM)
            results += [one for one in partial if one is not None]
            lse = row_math.finish(partial, target, row_weight, classes).lse
            sigma = row_weight if spec.label_smoothing else None
            coefficients = row_math.Coefficients(row_weight, row_weight / 2, row_weight / 3, sigma)
            row = chunked.RowGradient(lse, coefficients, True, row_weight)
            results += tiles.d_logits(problem, x, w[whole], chunk, whole, row, kept)
        used = {
            str(i): 100 * error(a.numpy(), b.numpy()) / 1e-5 for i, (a, b) in enumerate(zip(found, want, strict=True))
        }
        say(name=name, used=used)


def run_float32_matmuls() -> None:
    """Compares matmuls of float32 operands with float64, where tiles and parts of the inner dimension are not whole."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, layout: str) -> Tensor:
        if layout == "strided":
            return torch.randn(rows, 2, columns, 2, generator=generator)[:, 0, :, 0]
        made = torch.randn(rows, columns, generator=generator)
        return made if layout == "by rows" else made.T.contiguous().T

    layouts = ("by rows", "by columns", "strided")
    with (
        mock.patch.object(float32_tiles, "BLOCK", 32),
        mock.patch.object(float32_tiles, "BLOCK_K", 16),
        mock.patch.object(float32_tiles, "LEAST_INNER", 32),
    ):
        for rows, inner, columns in ((5, 100, 3), (5, 80, 3), (64, 96, 64), (33, 50, 1), (0, 4, 5)):
            every = itertools.product(layouts, repeat=3) if columns == 3 else [layouts]
            for of_a, of_b, of_total in every:
                a, b = matrix(rows, inner, of_a), matrix(inner, columns, of_b)
                for first in (True, False):
                    total = matrix(rows, columns, of_total)
                    want = a.double() @ b.double() + (0 if first else total.double())
                    float32_matmuls.add_matmul(total, a, b, first=first, programs=3, waves=3)
                    used = 100 * error(total.numpy(), want.numpy()) / 1e-6 if rows else 0.0
                    say(name=f"{rows}-{inner}-{columns}, {of_a}, {of_b}, {of_total}, {first}", used={"matmul": used})


def run_float32_chunks() -> None:
    """Compares a call in chunks of rows, whose matmuls the kernel computes, with PyTorch in float64."""
    generator = torch.Generator().manual_seed(0)
    x, w, into = (torch.randn(rows, 40, generator=generator) for rows in (300, 500, 500))
    bias, upstream = torch.randn(500, generator=generator), torch.randn(300, generator=generator)
    target = torch.randint(0, 500, (300,), generator=generator)
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("mean", {}),
        ("all", {"linear_bias": bias, "logit_scale": 0.7, "softcap": 5.0, "reduction": "sum"}),
        ("into", {"grad_into": into.clone()}),
        ("none", {"reduction": "none"}),
        ("saved", {"reduction": "none", "saved_budget": 2**20}),
    )
    for name, options in calls:
        each = options.get("reduction") == "none"
        leaves = [tensor.clone().requires_grad_() for tensor in (x, w)]
        with mock.patch.object(float32_matmuls, "_launch", wraps=float32_matmuls._launch) as launches:
            loss = core_triton.linear_cross_entropy(
                leaves[0], leaves[1], target, memory_budget=2**19, implementation="triton", **options
            )
            forward = launches.call_count
            ((loss * upstream) if each else loss).sum().backward()
        if name == "saved" and launches.call_count <= forward:
            raise AssertionError("the kernel must multiply saved rows")
        if launches.call_count <= 6:
            raise AssertionError(f"{name}: the kernel must multiply several chunks, got {launches.call_count} launches")
        exact = [tensor.double().requires_grad_() for tensor in (x, w)]
        logits = (exact[0] @ exact[1].T + options.get("linear_bias", 0)) * options.get("logit_scale", 1.0)
        softcap = options.get("softcap", torch.inf)
        logits = logits if softcap == torch.inf else softcap * torch.tanh(logits / softcap)
        want = torch.nn.functional.cross_entropy(logits, target, reduction=options.get("reduction", "mean"))
        ((want * upstream) if each else want).sum().backward()
        pairs = {"loss": (loss.detach(), want.detach()), "d_input": (leaves[0].grad, exact[0].grad)}
        d_weight = exact[1].grad
        assert d_weight is not None
        if name == "into":
            pairs["d_weight"] = options["grad_into"], d_weight + into
        else:
            pairs["d_weight"] = leaves[1].grad, d_weight
        used = {key: 100 * error(one.numpy(), other.numpy()) / 1e-5 for key, (one, other) in pairs.items()}
        say(name=name, used=used)


# The scaling kernel.


def run_scale() -> None:
    """Scales buffers that end within a block, in place and out of place, with guards after them."""
    scale_kernel: Any = row_kernels.scale_kernel
    guard = torch.full((23,), 7.0)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (1.0, 1 / 3, 65536.0 / 4096, float("nan")):
            sizes = (1001, 300, 0)
            before = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
            buffers = [torch.cat([one, guard.to(dtype)]) for one in before]
            factor = torch.tensor(value)
            other, new = torch.tensor(0.5), [torch.full_like(buffer, 7.0) for buffer in buffers]
            scale_kernel[(4,)](*buffers[:2], None, other, factor, *new[:2], None, *sizes, IN_PLACE=False, BLOCK=256)
            in_place = *buffers[:2], None
            scale_kernel[(4,)](*in_place, other, factor, *in_place, *sizes, IN_PLACE=True, BLOCK=256)
            for size, one, by, *results in zip(sizes, before, (other, factor, factor), buffers, new, strict=True):
                expected = one if by == 1.0 else (one.float() * by).to(dtype)
                for result in results:
                    torch.testing.assert_close(result[:size], expected, rtol=0, atol=0, equal_nan=True)
                    assert (result[size:] == 7.0).all(), "written past the end"
            say(name=f"{dtype}-{value}")


# The kernels that read through pointers.


def run_views(dtype: str) -> None:
    """Parts of matrices, beside which there are NaN, give what copies of them give."""
    generator = torch.Generator().manual_seed(0)
    n, d, v = 40, 21, 301
    stored = [torch.full(sizes, float("nan")).to(getattr(torch, dtype)) for sizes in ((n, 24), (v, 24), (d, 304))]
    matrices = [stored[0][:, :d], stored[1][:, :d], stored[2][:, :v].t()]
    for matrix in matrices:
        matrix.copy_(torch.randn(matrix.shape, generator=generator))
    target = torch.randint(0, v, (n,), generator=generator)
    for w, smoothing in itertools.product(matrices[1:], (0.0, 0.1)):
        results = []
        for copied in (False, True):
            x, head = ((a.contiguous() if copied else a.detach()).requires_grad_() for a in (matrices[0], w))
            loss = core_triton.linear_cross_entropy(
                x,
                head,
                target,
                label_smoothing=smoothing,
                weight=torch.linspace(0.5, 1.5, v).to(w.dtype),
                implementation=Running.implementation,
            )
            results.append([loss.detach(), *torch.autograd.grad(loss, (x, head))])
        differences = [error(a.float().numpy(), b.float().numpy()) for a, b in zip(*results, strict=True)]
        say(name=f"strides {w.stride()}, smoothing {smoothing}", used={"difference": 100 * max(differences) / 1e-6})


def run_weighted_views(dtype: str) -> None:
    """The weighted sums of logits do not contain what is beside a (D, V) head. Calls in the interpreter copy 16-bit
    operands, so this runs the kernel itself."""
    generator = torch.Generator().manual_seed(0)
    n, d, v = 40, 24, 301
    stored = [torch.full(sizes, float("nan")).to(getattr(torch, dtype)) for sizes in ((n, 32), (d, 304))]
    x, w = stored[0][:, :d], stored[1][:, :v].t()
    for matrix in (x, w):
        matrix.copy_(torch.randn(matrix.shape, generator=generator))
    target, ones = torch.randint(0, v, (n,), generator=generator), torch.ones(n)
    spec = LossSpec("sum", label_smoothing=0.1, softcap=20.0)
    problem = Problem(x, w, None, target, ones, torch.linspace(0.5, 1.5, v), spec, v)
    needs_grad = NeedsGrad(True, True, False)
    plan = ops.plan_for(problem, "loss_and_gradients", 2**29, Running.implementation, needs_grad)
    problem = replace(problem, plan=plan)
    found, want = (
        recompute.KERNEL_TILES.partial(problem, a, b, target, slice(0, v), None, 0)
        for a, b in ((x, w), (x.contiguous(), w.contiguous()))
    )
    for name, one, other in zip(found._fields, found, want, strict=True):
        if one is not None and other is not None:
            say(name=f"{plan.path}, {name}", used={"difference": 100 * error(one.numpy(), other.numpy()) / 1e-6})


# Rows that are saved for the backward pass.


def run_saved(dtype: Literal["bfloat16", "float16"]) -> None:
    """A row of NaN and one without a class change nothing if their upstream gradients are 0. A second backward pass
    repeats the first. The entropies of several class blocks are those of `chunked`."""
    made = problem(40, 24, 300, dtype=getattr(torch, dtype))
    upstream = torch.linspace(-1.0, 2.0, 40)
    kept = [row for row in range(40) if row not in (1, 4, 7)]
    results = []
    for rows in (kept, list(range(40))):
        arrays = {name: one[rows] if name in ("input", "target") else one for name, one in made.items()}
        arrays = {name: one.detach().clone() for name, one in arrays.items()}
        of_rows = upstream[rows].clone()
        if len(rows) == 40:
            arrays["input"][1], arrays["input"][4] = float("nan"), float("nan")
            arrays["target"][1], arrays["target"][7] = -100, 300
            of_rows[1], of_rows[4], of_rows[7] = float("nan"), 0.0, 0.0
        for name in ("input", "linear_weight", "linear_bias"):
            arrays[name].requires_grad_()
        options = {"saved_budget": 2**24, "implementation": Running.implementation}
        log_prob, entropy, _ = core_triton.linear_log_probs(**arrays, **options)
        if len(rows) < 40:
            with torch.no_grad():
                exact = core_triton.linear_log_probs(**arrays, implementation="chunked").entropy
            say(name="entropy", used={"entropy": 100 * error(entropy.detach().numpy(), exact.numpy()) / 1e-6})
        first = torch.autograd.grad(log_prob, leaves(arrays), of_rows, retain_graph=True)
        first = [one.clone() for one in first]
        second = torch.autograd.grad(log_prob, leaves(arrays), of_rows)
        torch.testing.assert_close(list(second), first, rtol=0, atol=0)
        d_input, *d_head = first
        results.append([d_input[[rows.index(row) for row in kept]], *d_head])
    used = {
        str(i): 100 * error(a.float().numpy(), b.float().numpy()) / 4e-3
        for i, (a, b) in enumerate(zip(*results, strict=True))
    }
    say(name=f"saved, {dtype}", used=used)


def run_saved_float16() -> None:
    """Rows of float16 whose upstream gradients reach from 1e-6 to 1e3, and whose targets have up to 1 - 1e-7 of the
    probability, in several chunks: the gradient of each row is that of a call that saves nothing, and those of the head
    are exact. Then in one chunk with one gradient. What torch.compile knows of the saved rows."""
    made, rows = problem(80, 64, 300, dtype=torch.float16), torch.arange(80)
    x, of_target = 0.2 * made["input"].detach().float(), made["linear_weight"].detach()[made["target"]].float()
    more = (8.0 + rows % 4 * 6.0 - (of_target * x).sum(1)) / of_target.square().sum(1)
    made["input"] = (x + more[:, None] * of_target).half().requires_grad_()
    upstream = 10.0 ** torch.linspace(-6.0, 3.0, 80)[torch.randperm(80, generator=torch.Generator().manual_seed(0))]
    upstream *= 1.0 - 2.0 * (rows % 2)
    upstream[3] = 0.0
    exact = {name: one.detach().float().requires_grad_() if one.requires_grad else one for name, one in made.items()}
    log_prob = core_triton.linear_log_probs(**exact, implementation="chunked").log_prob
    want = dict(zip(exact, torch.autograd.grad(log_prob, leaves(exact), upstream), strict=False))
    log_prob = core_triton.linear_log_probs(**made, implementation=Running.implementation).log_prob
    (unsaved,) = torch.autograd.grad(log_prob, made["input"], upstream)
    options = {"implementation": Running.implementation, "saved_budget": 2**24}
    save, pick = saved_ops._save, saved_kernels.pick_rows
    # Of the last, E^T (rho x) would be below the range of float16 without a power of two.
    for wanted, budget, factor in (
        (tuple(want), 50000, 1.0),
        (("input",), None, 1.0),
        (("linear_weight",), None, 1e-5),
    ):
        arrays = {name: one if name in wanted else one.detach() for name, one in made.items()}
        calls = []

        def saving(*call: Any, calls: list[Any] = calls) -> Any:
            calls.append((call, save(*call)))
            return calls[0][1]

        with (
            mock.patch.object(saved_ops, "_save", side_effect=saving),
            mock.patch.object(saved_kernels, "pick_rows", side_effect=pick) as picks,
        ):
            log_prob = core_triton.linear_log_probs(**arrays, **options, memory_budget=budget).log_prob
            found = dict(zip(wanted, torch.autograd.grad(log_prob, leaves(arrays), factor * upstream), strict=True))
        (((of_arrays, of_call, _, needs_grad, _), (*_, kept)),) = calls
        fake = saved_ops.fake_saved_rows(of_arrays, of_call, needs_grad)
        for one, other in zip(kept, fake, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or (one.shape, one.dtype) == (other.shape, other.dtype)
        used = {name: 100 * error(found[name].float().numpy(), factor * want[name].numpy()) / 1e-3 for name in wanted}
        if "input" in found:  # a gradient below the range of float16 is off by half of its smallest number
            wrong = (found["input"].float() - unsaved.float()).norm(dim=1)
            used["row"] = (100 * wrong / (1e-3 * unsaved.float().norm(dim=1) + 2.0**-25 * 64**0.5)).max().item()
        say(name=f"saved_float16, {len(wanted)}", used=used, chunks=picks.call_count)


def run_sm80(name: str, *arguments: Any) -> None:
    """A program with the kernels for compute capability 8.x."""
    with mock.patch.object(Running, "implementation", "triton_sm80"):
        PROGRAMS[name](*arguments)


def run_gluon(name: str, *arguments: Any) -> None:
    """A program with the kernels for compute capability 8.x. Those in Gluon run in NumPy, on both multiprocessors."""
    launched = set[str]()
    modules = (ampere_common, ampere_gradients, ampere_logits, gluon_common, hopper_logits, input_grad, triton_kernels)

    def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if isinstance(kernel, interpreter.InterpretedFunction):
            launch(kernel, grid, *arguments, **options)
            return
        launched.add(kernel.__name__)
        gluon_in_numpy.run(modules, kernel, grid, *arguments, late=True, **options)

    gpu = DeviceInfo("cuda", 80, 2, "a100")
    with (
        mock.patch.object(triton_kernels, "launch", run),
        mock.patch.object(ampere_gradients, "launch", run),
        mock.patch.object(input_grad, "launch", run),
        mock.patch.object(ops, "DeviceInfo", return_value=gpu),
    ):
        PROGRAMS[name](*arguments)
    say(name="kernels", kernels=sorted(launched))


PROGRAMS: dict[str, Callable[..., None]] = {
    "table": run_table,
    "fewer_rows": run_fewer_rows,
    "repair": run_repair,
    "float16": run_float16,
    "writes": run_writes,
    "shards": run_shards,
    "layouts": run_layouts,
    "chunks": run_chunks,
    "pieces": run_pieces,
    "token_loss": run_token_loss,
    "log_probs": run_log_probs,
    "kept_rows": run_kept_rows,
    "repair_blocks": run_repair_blocks,
    "batch_invariant": run_batch_invariant,
    "token_kernel": run_token_kernel,
    "head_copy": run_head_copy,
    "rows": run_rows,
    "stored": run_stored,
    "float32_matmuls": run_float32_matmuls,
    "float32_chunks": run_float32_chunks,
    "scale": run_scale,
    "saved": run_saved,
    "saved_float16": run_saved_float16,
    "views": run_views,
    "weighted_views": run_weighted_views,
    "sm80": run_sm80,
    "gluon": run_gluon,
}


def prepare_process() -> None:
    """Makes the interpreter round as a GPU does and take less time, until the process ends."""
    gc.disable()  # collecting takes 4% of the time, and the process ends before cycles take much memory
    _BUILDER.cast_impl = _rounding_cast
    interpreter._get_np_dtype = _get_np_dtype
    tl.core._unwrap_if_constexpr = _unwrap
    tl.dtype.__eq__ = _equal
    _SEMANTIC.to_tensor = _tensor_of
    _SEMANTIC.broadcast_impl_value = _broadcast_impl_value
    _SEMANTIC.binary_op_type_checking_impl = _binary_op_type_checking_impl
    interpreter.TensorHandle.__post_init__ = _check_size
    # The interpreter repeats each integer addition and multiplication to check for overflow, and drops the result.
    _SEMANTIC.binary_op_sanitize_overflow_impl = lambda *_: None
    tl.core.block_type.__init__ = _init_block_type
    tl.core.block_type.with_element_ty = _with_element_ty
    tl.core.tensor.__init__ = _init_tensor
    _patch_language()
    if "PLAIN_INTERPRETER" not in os.environ:
        quick_interpreter.install(_shape, _sizes)
    torch.use_deterministic_algorithms(True)  # fills new buffers with NaN, so that unwritten elements show
    torch.set_num_threads(1)
    # NumPy, which interprets the kernels, warns of infinities and NaN, which the edge cases contain on purpose. It also
    # warns of how Triton 3.6's interpreter converts arrays to scalars.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0 to a scalar", DeprecationWarning)


def main() -> None:
    prepare_process()
    for Running.program, (name, *arguments) in enumerate(json.loads(sys.argv[1])):
        try:
            PROGRAMS[name](*arguments)
        except Exception:  # a failing program must not hide the others
            say(name=name, failure=traceback.format_exc()[-5000:])


if __name__ == "__main__":
    main()
