"""Tests jax_pallas.plan, which is a pure function, and `explain`, which prints its result. No GPU is needed."""

import itertools
import re
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from assertions import least_budget
from compiling import kernels_of_zeros
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax_problem import problem

from jax_pallas import kernels, launch
from jax_pallas.launch import DeviceInfo
from jax_pallas.linear_ce import explain, linear_cross_entropy
from jax_pallas.plan import ExecutionPlan, MatrixLayout, PlanKey, make_plan
from jax_pallas.tile_config import padded
from linear_ce.spec import DEFAULT_MEMORY_BUDGET

HOPPER, AMPERE = DeviceInfo("cuda", 90, 132, "h200"), DeviceInfo("cuda", 80, 108, "a100")
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}


def plan(
    n: int = 8192, d: int = 896, v: int = 151936, dtype: str = "bfloat16", head: str | None = None, **options: Any
) -> ExecutionPlan:
    """Returns the plan of a training call, changed by `options`."""
    axis, head = options.get("vocab_axis", 0), head or dtype
    defaults: dict[str, Any] = {
        "stage": "loss_and_gradients",
        "input": MatrixLayout((n, d), ITEMSIZES[dtype], dtype),
        "linear_weight": MatrixLayout((v, d) if axis == 0 else (d, v), ITEMSIZES[head], head),
        "vocab_axis": axis,
        "classes": v,
        **dict.fromkeys(("label_smoothing", "softcap", "entropy", "d_bias", "statistics"), False),
        **dict.fromkeys(("d_input", "d_weight"), options.get("stage") not in ("losses", "statistics")),
        "memory_budget": DEFAULT_MEMORY_BUDGET,
        "implementation": "mosaic",
        "device": HOPPER,
    }
    return make_plan(PlanKey(**defaults | options))


def test_a_plan_is_frozen_and_made_once() -> None:
    assert plan() is plan()
    assert hash(plan()) == hash(plan())
    with pytest.raises(FrozenInstanceError):
        plan().path = "chunked"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("options", "path", "ours"),
    [
        ({}, "scaled_exp", True),
        ({"vocab_axis": 1}, "scaled_exp", True),
        ({"stage": "losses"}, "scaled_exp", True),
        ({"stage": "losses", "dtype": "float16"}, "scaled_exp", False),
        ({"stage": "losses", "head": "float32"}, "recompute", False),
        ({"stage": "statistics", "entropy": True}, "scaled_exp", True),
        ({"stage": "gradients"}, "recompute", True),
        ({"stage": "gradients", "vocab_axis": 1, "classes": 151930}, "recompute", False),
        ({"stage": "row_gradients"}, "scaled_exp", True),
        ({"stage": "row_gradients", "label_smoothing": 0.5}, "recompute", True),
        ({"stage": "row_gradients", "dtype": "float16"}, "scaled_exp", True),
        ({"stage": "row_gradients", "memory_budget": 2**26}, "recompute", True),  # chunks of few rows
        ({"stage": "row_gradients", "memory_budget": 2**22}, "recompute", True),  # no chunk of exponentials fits
        ({"stage": "row_gradients", "memory_budget": 2**26, "n": 100}, "scaled_exp", True),  # all rows
        ({"stage": "row_gradients", "implementation": "chunked"}, "chunked", False),
        ({"dtype": "float16"}, "scaled_exp", True),
        ({"dtype": "float16", "label_smoothing": 0.1}, "scaled_exp", True),
        ({"dtype": "float16", "label_smoothing": 0.1, "softcap": True}, "recompute", False),
        ({"dtype": "float16", "implementation": "pallas_triton", "device": AMPERE}, "scaled_exp", False),
        ({"dtype": "float16", "implementation": "pallas_triton", "grad_into": True}, "recompute", False),
        ({"dtype": "float16", "implementation": "pallas_triton", "classes": 151900}, "recompute", False),
        ({"dtype": "float16", "implementation": "pallas_triton", "stage": "row_gradients"}, "scaled_exp", False),
        ({"head": "float32"}, "recompute", False),
        ({"label_smoothing": 0.1}, "scaled_exp", True),
        ({"label_smoothing": 0.1, "softcap": True}, "recompute", True),
        ({"label_smoothing": 0.1, "classes": 200}, "recompute", True),
        ({"label_smoothing": 0.5}, "recompute", True),
        ({"d": 72}, "recompute", False),  # the gradient kernels need multiples of 64
        ({"implementation": "pallas_triton", "device": AMPERE}, "scaled_exp", False),
        ({"implementation": "pallas_triton", "device": AMPERE, "v": 50257}, "recompute", False),
        ({"implementation": "pallas_triton", "device": AMPERE, "dtype": "float32"}, "recompute", False),
        ({"implementation": "chunked"}, "chunked", False),
    ],
)
def test_paths(options: dict[str, Any], path: str, ours: bool) -> None:
    found = plan(**options)
    assert found.path == path
    assert found.d_weight_kernel == ours
    assert found.d_input_kernel == (ours and path == "scaled_exp")
    assert found.casts_head == ("head" in options)
    assert (found.tile is None) == (path == "chunked")


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({}, True),
        ({"n": 1024}, False),  # one chunk
        ({"classes": 151936 - 192}, False),  # a tile of padding, which must become zeros
        ({"stage": "losses"}, False),
        ({"dtype": "float16", "n": 2048}, True),
        ({"dtype": "float16", "n": 2048, "label_smoothing": 0.1}, False),  # d_weight has begun
        ({"implementation": "pallas_triton", "device": AMPERE}, False),
    ],
)
def test_the_kernel_that_adds_to_d_weight_starts_it_where_chunks_share_kernels(
    options: dict[str, Any], starts: bool
) -> None:
    assert plan(**options).d_weight_starts == starts


@pytest.mark.parametrize(
    ("options", "num_warps"),
    [
        ({}, 4),
        ({"softcap": 3.0}, 8),  # a slope for each logit
        ({"softcap": 3.0, "gradients": False}, 4),
        ({"label_smoothing": 0.5}, 8),  # a class weight
        ({"vocab_axis": 1}, 8),  # the 321 classes are loaded one by one
        ({"vocab_axis": 1, "gradients": False}, 8),
        ({"dtype": jnp.float32}, 8),
    ],
)
def test_the_plan_has_the_tile_of_the_kernels(
    options: dict[str, Any], num_warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, run = [], kernels.run

    def record(kernel: Any, matmul: Any, *arguments: Any, **static_args: Any) -> Any:
        if kernel in (kernels.exponentials_kernel, kernels.statistics_kernel):
            tiles.append((matmul.tile.block_v, static_args["warps"]))
        return run(kernel, matmul, *arguments, **static_args)

    monkeypatch.setattr(kernels, "run", record)
    shared = {"implementation": "pallas_triton", **options}
    dtype, gradients = shared.pop("dtype", jnp.bfloat16), shared.pop("gradients", True)
    x, w = jnp.zeros((128, 64), dtype), jnp.zeros((64, 321) if "vocab_axis" in shared else (320, 64), dtype)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return linear_cross_entropy(x, w, jnp.zeros(128, jnp.int32), **shared)

    with kernels_of_zeros():
        jax.jit(jax.grad(loss, (0, 1)) if gradients else loss).lower(x, w)
    tile = explain(x, w, gradients=gradients, **shared).plan.tile
    assert tile is not None
    assert set(tiles) == {(tile.block_v, num_warps)}


def test_vocab_chunks_of_a_transposed_head_begin_where_tma_can_read() -> None:
    assert plan(stage="gradients", vocab_axis=1).vocab_chunks_in_place
    assert not plan(stage="gradients", vocab_axis=1, classes=151930).vocab_chunks_in_place
    assert plan(stage="gradients", classes=151930).vocab_chunks_in_place
    assert not plan(stage="gradients", head="float32").vocab_chunks_in_place


def test_every_plan_keeps_within_its_budget() -> None:
    shapes = ((1, 64, 320), (1000, 768, 50257), (8192, 4096, 128256), (65536, 896, 151936))
    stages = ("loss_and_gradients", "losses", "statistics", "gradients")
    for (n, d, v), stage, name, dtype in itertools.product(shapes, stages, launch.NAMES, ("bfloat16", "float16")):
        found = plan(n, d, v, dtype, stage=stage, implementation=name)
        assert 0 < found.chunks.bytes <= DEFAULT_MEMORY_BUDGET
        assert found.chunks.rows <= n
        if found.path == "scaled_exp" and stage == "loss_and_gradients":
            assert found.chunks.bytes >= 2 * found.chunks.rows * padded(v)


@pytest.mark.parametrize(
    ("budget", "classes"),
    [
        (2**29, 8960),  # 17 parts of 2**25 bytes of float32
        (2**27, 2304),  # 66 parts of a 16th of the budget
        (2**25, 512),
    ],
)
def test_d_weight_of_float16_by_xla_is_in_float32_a_few_classes_at_a_time(budget: int, classes: int) -> None:
    shared: dict[str, Any] = {"implementation": "pallas_triton", "device": AMPERE, "memory_budget": budget}
    found = plan(dtype="float16", **shared).scaled_exp_config
    assert found.head_rows == classes
    in_float32, of_e, of_x = 4 * classes * 896, 2 * found.rows * classes, 2 * found.rows * 896
    assert found.bytes >= 2 * found.rows * 151936 + in_float32 + of_e + of_x
    # The other matmuls take the whole head, and so does a call without d_weight.
    assert plan(**shared).scaled_exp_config.head_rows == 151936
    assert plan(dtype="float16", d_weight=False, **shared).scaled_exp_config.head_rows == 151936


def test_two_chunks_of_float16_count_no_second_d_weight() -> None:
    """XLA adds each part of d_weight in place."""
    shared: dict[str, Any] = {"implementation": "pallas_triton", "device": AMPERE, "n": 2048, "d": 4096, "v": 128256}
    assert plan(dtype="float16", **shared).scaled_exp_config.rows == 1024
    assert plan(**shared).scaled_exp_config.rows < 1024


def test_a_smaller_gpu_cuts_fewer_tiles_of_d_input() -> None:
    """The number of multiprocessors is part of the key, because the memory of d_input's partial tiles depends on it."""
    large, small = plan(), plan(device=DeviceInfo("cuda", 90, 66, "h100"))
    assert large.chunks.bytes != small.chunks.bytes


def test_a_budget_that_is_too_small_is_refused() -> None:
    stages = "loss_and_gradients", "entropy_loss_and_gradients", "gradients"
    for stage, name in itertools.product(stages, (*launch.NAMES, "chunked")):
        with pytest.raises(ValueError, match="memory_budget must be at least"):
            plan(stage=stage, implementation=name, memory_budget=2**10)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "stored_logits"),
        ({"stage": "losses"}, "stored_logits"),
        ({"stage": "gradients"}, "stored_logits"),
        ({"stage": "saved_rows"}, "stored_logits"),
        ({"vocab_axis": 1}, "stored_logits"),
        ({"grad_into": True}, "stored_logits"),
        ({"shards": 2}, "stored_logits"),
        ({"shards": 2, "pads_shards": True}, "chunked"),
        ({"classes": 151900}, "chunked"),  # XLA would copy the head
        ({"memory_budget": 2**26}, "chunked"),  # logits of fewer than 128 rows
        ({"n": 32, "memory_budget": 2**31}, "chunked"),  # one tile
        ({"dtype": "bfloat16"}, "chunked"),
        ({"dtype": "bfloat16", "head": "float32"}, "chunked"),
        ({"device": DeviceInfo("cpu", 0, 0, "h100")}, "chunked"),
    ],
)
def test_float32_logits_of_all_classes_are_stored_on_a_gpu(options: dict[str, Any], path: str) -> None:
    given: dict[str, Any] = {"dtype": "float32", "implementation": "chunked"} | options
    found = plan(**given)
    assert found.path == path
    if path == "stored_logits":
        assert found.chunk_config.vocab_chunk == 151936
        assert found.chunk_config.keeps_logits == (
            found.matmuls[-1] != "logits" and options.get("stage") != "gradients"
        )


def test_explain_says_that_float32_logits_are_stored() -> None:
    x, w = (jax.ShapeDtypeStruct((rows, 896), jnp.float32) for rows in (8192, 151936))
    for precision in (None, "highest"):
        with jax.default_matmul_precision(precision):
            text = str(explain(x, w, device="h200"))  # pyright: ignore[reportArgumentType]
        assert "path: stored_logits: float32 logits are stored, one chunk of rows at a time" in text
        assert "chunks: 16 of up to 512 rows" in text
        kernels, maker = ("Pallas' Triton backend's, for the matmuls", "our kernels")
        if precision == "highest":
            kernels, maker = "none", "XLA"
        assert f"kernels: {kernels}" in text
        assert f"matmuls: logits, d_input, d_weight by {maker}" in text


def test_shifts_of_float16_leave_memory_for_as_many_rows_as_bfloat16_has() -> None:
    """They are read before the partial tiles of d_input take memory, and repaired blocks have none."""

    def chunks(tokens: int, hidden: int, dtype: Any) -> Any:
        x, w = (jax.ShapeDtypeStruct((rows, hidden), dtype) for rows in (tokens, 151936))
        return explain(x, w, device="h200").plan.chunks  # pyright: ignore[reportArgumentType]

    of_float16, of_bfloat16 = chunks(8192, 896, jnp.float16), chunks(8192, 896, jnp.bfloat16)
    assert of_float16.rows == of_bfloat16.rows == 1664
    assert of_float16.bytes < of_bfloat16.bytes + 4 * 2**20
    # With few columns d_input takes little: two shifts for each of 792 blocks, and the sums of 1,187 repaired blocks.
    assert chunks(1024, 64, jnp.float16).bytes > 1024 * (2 * 151936 + 4 * (2 * 792 + 1187))


@pytest.mark.parametrize(("tokens", "programs"), [(127, 0), (128, 132)])
def test_few_tokens_leave_float32_matmuls_to_xla(tokens: int, programs: int) -> None:
    x, w = jax.ShapeDtypeStruct((tokens, 64), jnp.float32), jax.ShapeDtypeStruct((2_000_000, 64), jnp.float32)
    plan = explain(x, w, device="h200", memory_budget=2**30 + 2**29).plan  # pyright: ignore[reportArgumentType]
    assert plan.path == "stored_logits"
    assert plan.float32_programs == programs


def test_the_budget_that_an_error_names_is_enough() -> None:
    """XLA computes d_weight of float16 a few classes at a time, and more of them in a larger budget."""
    options: dict[str, Any] = {"dtype": "float16", "implementation": "pallas_triton", "device": AMPERE}
    options |= {"n": 131072, "d": 512, "v": 74816}
    with pytest.raises(ValueError, match="memory_budget must be at least") as refused:
        plan(**options, memory_budget=1)
    named = re.search(r"at least (\d+) bytes", str(refused.value))
    assert named is not None
    assert plan(**options, memory_budget=int(named[1])).path == "scaled_exp"


def test_a_float32_head_of_few_columns_has_no_larger_first_chunk() -> None:
    options: dict[str, Any] = {"n": 4096, "d": 64, "v": 128256, "head": "float32", "splits_head": True}
    config = plan(**options, memory_budget=2**24).scaled_exp_config
    assert config is not None
    assert config.rows < 128
    assert config.first_rows == 0


def test_explain_prints_the_plan() -> None:
    arrays = problem()
    x, w = arrays["input"], arrays["linear_weight"]
    explained = explain(x.astype(jnp.float16), w, memory_budget=2**20, reduction="none")
    assert explained.plan.path == "chunked"
    assert explained.plan.memory_budget == 2**20
    lines = dict(line.split(": ", 1) for line in str(explained).splitlines())
    assert lines["implementation"] == "chunked, no kernel for cpu devices"
    assert lines["chunks"] == f"1 of up to {len(x)} rows"
    assert lines["weight"] == "copied one vocabulary chunk at a time"
    assert lines["matmuls"] == "logits of the losses, logits, d_input, d_weight by XLA"
    assert lines["workspace"].endswith("of a budget of 1.0 MiB")
    assert "d_input" not in str(explain(x, w, gradients=False))
    with pytest.raises(ValueError, match="memory_budget must be at least"):
        explain(x, w, memory_budget=100)
    with pytest.raises(ValueError, match="linear_weight must have shape"):
        explain(x, w.T)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("dtype", "options", "path", "matmuls"),
    [
        (jnp.bfloat16, {"device": "h100"}, "recompute", 4),
        (jnp.bfloat16, {"device": "a100"}, "recompute", 4),
        (jnp.float16, {"device": "h100"}, "recompute", 4),
        (jnp.float32, {"device": "h100"}, "chunked", 3),
        (jnp.bfloat16, {}, "chunked", 3),
    ],
)
def test_the_matmuls_of_a_loss_of_the_entropy(
    dtype: Any, options: dict[str, Any], path: str, matmuls: int, reduction: Any
) -> None:
    x, w = (jnp.empty((rows, 896), dtype) for rows in (256, 1536))
    explained = explain(x, w, reduction=reduction, with_entropy=True, **options)
    assert explained.plan.path == path
    assert len(explained.plan.matmuls) == (4 if reduction == "none" else matmuls)
    assert ("logits of the losses" in str(explained)) == (reduction == "none" or matmuls == 4)
    with pytest.raises(ValueError, match="saved_budget must be 0 with with_entropy"):
        explain(x, w, reduction="none", saved_budget=2**20, with_entropy=True)
    with pytest.raises(TypeError, match="with_entropy must be a bool, got float"):
        explain(x, w, with_entropy=0.1)  # pyright: ignore[reportArgumentType]


def test_explain_names_logits_that_are_computed_again() -> None:
    arrays = problem(70, 24, 300)
    x, w = arrays["input"], arrays["linear_weight"]
    least = least_budget(lambda budget: explain(x, w, memory_budget=budget, with_entropy=True))
    for memory_budget, matmuls in ((2**20, 3), (least, 4)):
        loss = partial(linear_cross_entropy, target=arrays["target"], memory_budget=memory_budget)
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).as_text()
        for with_entropy in (False, True):
            explained = explain(x, w, memory_budget=memory_budget, with_entropy=with_entropy)
            assert ("logits again" in explained.plan.matmuls) == (matmuls == 4)
            assert len(explained.plan.matmuls) == matmuls
        assert program.count("stablehlo.dot_general") == matmuls  # several chunks are iterations of a loop
    again = explain(shape(70, 24), shape(1536, 24), label_smoothing=0.1, softcap=30.0, device="h200").plan
    assert (again.path, again.matmuls[:2], len(again.matmuls)) == ("recompute", ("logits", "logits again"), 4)


def test_explain_of_calls_without_gradients() -> None:
    x, w = shape(4, 2048, 896), shape(151936, 896)
    into: Any = jax.ShapeDtypeStruct(w.shape, jnp.float32)
    arguments: dict[str, Any] = {"gradients": False, "device": "h200"}
    assert explain(x, w, **arguments).plan.matmuls == ("logits",)
    # The sum that the call returns takes the gradient of the head.
    found = explain(x, w, grad_into=into, **arguments).plan
    assert found.matmuls == ("logits", "d_weight")
    assert found == plan(d_input=False, grad_into=True)
    # A loss of the entropies runs what `linear_log_probs` runs, and not what the loss alone runs.
    x, w = (jax.ShapeDtypeStruct(one.shape, "float16") for one in (x, w))
    found = explain(x, w, with_entropy=True, **arguments).plan  # pyright: ignore[reportArgumentType]
    assert found == plan(stage="statistics", dtype="float16", entropy=True, statistics=1)
    assert found.fits_float16


def shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def test_explain_of_a_gpu_that_is_not_present() -> None:
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=1, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        explained = explain(shape(4, 2048, 896), shape(151936, 896))
    assert str(explained) == str(explain(shape(4, 2048, 896), shape(151936, 896), device="h200"))
    assert str(explained).splitlines()[:-1] == [
        "implementation: mosaic, its kernels serve compute capability 9.0",
        "path: scaled_exp: the gradients are matmuls of stored exponentials",
        "kernels: Hopper's, in Mosaic, tiles of 128 rows x 192 classes",
        "chunks: 5 of up to 1664 rows",
        "weight: read where it is",
        "matmuls: logits, d_input, d_weight by our kernels",
    ]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("a100", "pallas_triton"),
        ("l40s", "pallas_triton"),
        ("rtx4090", "pallas_triton"),
        ("rtx5090", "pallas_triton"),
        ("h100", "mosaic"),
    ],
)
def test_explain_of_a_gpu_by_name(device: str, name: str) -> None:
    explained = explain(shape(4, 2048, 896), shape(151936, 896), device=device)
    assert explained.name == name
    assert explained.plan.hopper == (name == "mosaic")


def test_explain_of_a_gpu_that_cannot_run_the_call() -> None:
    known = "'a100', 'b200', 'h100', 'h200', 'l40s', 'rtx4090', 'rtx5090'"
    with pytest.raises(ValueError, match=f"^device must be one of {known}, got 'v100'$"):
        explain(shape(4, 8), shape(10, 8), device="v100")
    with pytest.raises(ValueError, match=r"compute capability 9\.0, the device has 8\.0"):
        explain(shape(4, 8), shape(10, 8), device="a100", implementation="mosaic")
