"""Checks of a gathered head whose gradient the last chunk of rows sends in parts: `jax_pallas/d_weight_parts.py`.
`test_jax_pallas_shard_rows.py` runs them on several devices.

Only the Hopper kernels add to parts. Mosaic's interpreter takes no loops and no collectives, so here XLA adds to them,
between the kernels of Pallas' Triton backend.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from sharded_cases import assert_within_budget, mesh_of, run_sharded

from jax_pallas import head_scatter, hopper_gradients, ops
from jax_pallas.head_scatter import HeadScatter
from jax_pallas.problem import Problem
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.cases import Case

# Of 1,088 classes a device has 544, which are no multiple of 64, and three blocks of 192: parts of two blocks and one.
# It has chunks of 24, 24 and 10 rows, or fewer.
SIZES: dict[str, Any] = {"lead": (116,), "hidden": 64, "vocab": 1088, "dtype": "bfloat16", "has_bias": True}
SIZES |= {"ignored": "some", "poison": ("ignored_rows",)}
CASES = (
    Case(name="mean", **SIZES, has_class_weight=True),
    Case(name="smoothing", **SIZES, has_class_weight=True, spec=LossSpec("sum", label_smoothing=0.3)),
    Case(name="none", **SIZES, spec=LossSpec("none", softcap=5.0, z_loss_weight=0.01), upstream="random", vocab_axis=1),
    Case(name="token loss", **SIZES, function="token_loss", token_loss="ppo_clip", token_stats=True),
    Case(name="frozen input", **SIZES, frozen=("input",)),
    replace(Case(name="float16", **SIZES, token_weight="signed", spec=LossSpec("sum")), dtype="float16"),
    replace(Case(name="no token", **SIZES), ignored="all"),
    Case(
        name="split head",
        **SIZES,
        head_dtype="float32",
        has_class_weight=True,
        spec=LossSpec("sum", label_smoothing=0.1, head_precision="float32"),
    ),
)


def add_d_weight(
    e: Array,
    x: Array,
    start: Any,
    *,
    vocab: int,
    classes: int,
    vocab_axis: int,
    rows: int,
    old: Array | None,
    first_class: Array,
    power: Array | None,
    float32: bool,
    of_shards: hopper_gradients.OfShards,
    **_: Any,
) -> Array:
    """As `hopper_gradients.add_d_weight`, of a part."""
    assert float32
    assert vocab_axis == 0
    row = jnp.arange(vocab)
    place = row // of_shards.part_rows * of_shards.shard_rows // 64 * 64 + first_class + row % of_shards.part_rows
    of_classes = e[:rows, :classes].at[:, place].get(mode="fill", fill_value=0)
    x = lax.dynamic_slice_in_dim(x, start, rows)
    sums = lax.dot_general(of_classes, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    sums = sums if power is None else sums * power
    return sums if old is None else old + sums


@contextmanager
def in_parts(rows: int, parts: int = 2) -> Iterator[list[int]]:
    """Lets calls have chunks of so many rows, and so many parts of d_weight. Collects the rows of what is sent."""
    plan_for, sent = ops.plan_for, list[int]()

    def planned(problem: Problem, *arguments: Any, **options: Any) -> Any:
        if not problem.sends_head:
            return plan_for(problem, *arguments, **options)
        plan = plan_for(replace(problem, grad_into=None), *arguments, **options)
        assert plan.path == "scaled_exp"
        last_rows = (problem.tokens - 1) % rows + 1
        chunks = replace(plan.scaled_exp_config, rows=rows, last_rows=last_rows)
        return replace(plan, chunks=chunks, d_weight_kernel=True)

    def send(self: HeadScatter, sums: Array) -> Array:
        sent.append(len(sums))
        return HeadScatter_send(self, sums)

    HeadScatter_send = HeadScatter.send
    with (
        mock.patch.object(ops, "plan_for", planned),
        mock.patch.object(hopper_gradients, "add_d_weight", add_d_weight),
        mock.patch.object(head_scatter, "PARTS", parts),
        mock.patch.object(HeadScatter, "send", send),
    ):
        yield sent


def check_case(case: Case, rows: int = 24, **axes: int) -> None:
    names = tuple(name for name in ("vocab", "fsdp") if name in axes)
    options = {"implementation": "pallas_triton", "vocab_axis_name": names, "gather": "head"}
    arrays = make_arrays(case)
    with in_parts(rows) as sent:
        found = run_sharded(case, arrays, mesh_of(**axes), **options, memory_budget=2**26)
    assert {*sent} == ({2 * 384, 2 * 192} if case.vocab == SIZES["vocab"] else {2 * 192}), sent
    assert_within_budget(case, arrays, found)


def check_divided_vocabulary() -> None:
    """Two devices gather each half of the head."""
    check_case(replace(CASES[1], vocab=1152), vocab=2, fsdp=2)


def check_saved() -> None:
    """Of 640 rows of a device 512 are saved. The gradients by both are sent together."""
    case = Case(
        name="part is saved", lead=(1280,), hidden=16, vocab=320, dtype="bfloat16", spec=LossSpec("none"),
        upstream="random", saved_budget=4096 + 512 * (32 + 2 * (16 + 320)),
    )  # fmt: skip
    arrays = make_arrays(case)
    options: dict[str, Any] = {"vocab_axis_name": ("fsdp",), "gather": "head"}
    found = run_sharded(case, arrays, mesh_of(fsdp=2), "chunked", saved_budget=case.saved_budget, **options)
    assert_within_budget(case, arrays, found)


def check_float32() -> None:
    """Only the sum of all devices is rounded."""
    case = CASES[0]
    arrays = make_arrays(case)
    options: dict[str, Any] = {"vocab_axis_name": ("fsdp",), "gather": "head", "memory_budget": 2**26}
    exact = run_sharded(replace(case, dtype="float32"), arrays, mesh_of(fsdp=2), "chunked", **options)["d_weight"]
    with in_parts(24):
        found = run_sharded(case, arrays, mesh_of(fsdp=2), "pallas_triton", **options)["d_weight"]
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16).astype(jnp.float32))
    error, least = (np.linalg.norm(one - exact) for one in (found, rounded))
    assert error < 1.5 * least


def check_parts() -> None:
    """The parts have all rows of each device, in whole tiles, and of each class one place."""
    for devices, vocab, chunks in (8, 128256, 4), (2, 1100, 40):
        with mock.patch.object(jax.lax, "axis_size", lambda _, devices=devices: devices):
            scatter = HeadScatter.of(mock.Mock(gather_axes=("fsdp",)), vocab, 4096, chunks=chunks, programs=132)
        assert 1 <= len(scatter.sizes) <= 8
        assert len(scatter.sizes) <= 2 or chunks < 40
        classes = np.concatenate([scatter.classes(part) for part in range(len(scatter.sizes))])
        own = np.arange(vocab)
        places = np.asarray(scatter.places(jnp.arange(vocab)))
        assert (classes[places] == own).all()
        ends = np.cumsum([0, *(devices * size for size in scatter.sizes)])
        part = np.searchsorted(ends, places, "right") - 1
        sizes, starts = np.asarray(scatter.sizes)[part], ends[part]
        assert ((places - starts) // sizes == own // scatter.shard_rows).all()  # the device's own rows
        assert scatter.places(jnp.array([-1]))[0] == -1


HEAD_CHECKS: dict[str, Callable[[], None]] = {
    "head, parts": check_parts,
    "head, float32": check_float32,
    **{f"head, {case.name}": partial(check_case, case, fsdp=2) for case in CASES},
    "head, one chunk": partial(check_case, CASES[1], 58, fsdp=2),
    "head, two chunks": partial(check_case, replace(CASES[1], has_bias=False), 29, fsdp=2),
    "head, part is saved": check_saved,
    "head, copies": partial(check_case, CASES[0], data=2, fsdp=2),
    "head, divided vocabulary": check_divided_vocabulary,
}
