"""Tests jax_pallas.recompute and jax_pallas.scaled_exp through the public functions, with kernels in Pallas'
interpreter: chunks, options, gradients, and the path that a call takes."""

import itertools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from assertions import check
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax_problem import planned, problem

from jax_pallas import launch, recompute
from jax_pallas.arguments import IMPLEMENTATIONS
from jax_pallas.linear_ce import explain, linear_cross_entropy
from jax_pallas.problem import Problem
from jax_pallas.slicing import Slice
from jax_pallas.tile_config import choose_recomputed, choose_scaled_exp
from linear_ce.spec import LossSpec
from parity.cases import FP16_LOSS_SCALE, Case, cases

BF16: dict[str, Any] = {"dtype": "bfloat16"}
FP16: dict[str, Any] = {"dtype": "float16", "spec": LossSpec("sum"), "loss_scale": FP16_LOSS_SCALE["sum"]}
SHARED: dict[str, Any] = {"lead": (150,), "hidden": 64, "vocab": 320, "has_bias": True}
EVERY_DAY = [
    Case(name="exponentials-chunks", tight_memory=True, ignored="some", poison=("ignored_rows",), **SHARED, **BF16),
    Case(name="exponentials-cap-dv", spec=LossSpec(softcap=3.0, logit_scale=0.7), vocab_axis=1, **SHARED, **BF16),
    Case(name="exponentials-smoothing", spec=LossSpec(label_smoothing=0.1), **SHARED, **BF16),
    Case(
        name="exponentials-smoothing-dv",
        spec=LossSpec(label_smoothing=0.2, logit_scale=0.7, z_loss_weight=0.01, vocab_size=300),
        vocab_axis=1,
        has_class_weight=True,
        ignored="some",
        poison=("ignored_rows", "padding"),
        tight_memory=True,
        **SHARED,
        **BF16,
    ),
    Case(name="recomputed-smoothing", spec=LossSpec(label_smoothing=0.1, softcap=5.0), **SHARED, **BF16),
    Case(name="recomputed-fp16", dtype="float16", **{**SHARED, "vocab": 300}),
    Case(  # most of a row's probability may be outside of the sample of its classes, so that it is shifted
        name="exponentials-fp16",
        logit_std=12.0,
        vocab_axis=1,
        tight_memory=True,
        ignored="some",
        poison=("ignored_rows",),
        **{**SHARED, "lead": (60,)},
        **FP16,
    ),
    Case(
        name="exponentials-fp16-cap",
        logit_std=12.0,
        tight_memory=True,
        **{**SHARED, "lead": (60,)},
        **{**FP16, "spec": LossSpec("sum", softcap=60.0, logit_scale=0.7, z_loss_weight=0.001)},
    ),
    Case(
        name="exponentials-fp16-repaired",
        dtype="float16",
        logit_std=60.0,
        token_weight="mask",
        loss_scale=FP16_LOSS_SCALE["mean"],
        **{**SHARED, "lead": (60,)},
    ),
    Case(name="exponentials-fp16-frozen", logit_std=3.5, frozen=("linear_weight",), **SHARED, **FP16),
    Case(name="exponentials-fp16-sharp", logit_std=3.5, target="one_class", upstream="random", **SHARED, **FP16),
    Case(
        name="exponentials-fp16-sharp-none",
        logit_std=3.5,
        target="one_class",
        upstream="random",
        **SHARED,
        **{**FP16, "spec": LossSpec("none"), "loss_scale": FP16_LOSS_SCALE["none"]},
    ),
    Case(
        name="exponentials-fp16-smoothing",
        logit_std=3.5,
        vocab_axis=1,
        tight_memory=True,
        ignored="some",
        poison=("ignored_rows",),
        **{**SHARED, "lead": (60,)},
        **{**FP16, "spec": LossSpec("sum", label_smoothing=0.2)},
    ),
    Case(name="none", spec=LossSpec("none"), **SHARED, **BF16),
]


@pytest.mark.parametrize("case", EVERY_DAY, ids=lambda case: case.name)
def test_every_plan_by_triton_kernels(case: Case) -> None:
    check("jax-pallas_triton", case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    check("jax-pallas_triton", case)


def grown(tokens: int, budget: int, **changes: Any) -> Any:
    numbers: dict[str, Any] = {
        "hidden": 4096,
        "classes": 128256,
        "itemsize": 2,
        "d_bias": False,
        "statistics": False,
        "block_v": 192,
        "hopper": True,
        "scratch": lambda rows, most: 0,
        "second_d_weight": 0,
    }
    return choose_scaled_exp(**numbers | {"stores": True, "holds": True, "tokens": tokens, "budget": budget} | changes)


def test_chunks_of_exponentials_fill_the_budget_and_no_more() -> None:
    default = grown(8192, 2**29)
    assert default.rows == 2048
    assert default.bytes <= 2**29
    assert grown(8192, 2**31).rows == 8192
    assert grown(8192, 2**29, holds=False).rows < 2048
    assert grown(65536, 2**29).rows == 2048
    assert grown(8192, 2**29, stores=False, holds=False).bytes <= 2**26
    assert grown(8192, 2**29, scratch=lambda rows, most: 2**25).rows < 2048
    left = grown(8192, 2**29, scratch=lambda rows, most: most)  # the adaptive buffer gets the rest of the budget
    assert left.rows == 2048
    assert left.bytes <= 2**29


def test_two_chunks_count_a_second_d_weight() -> None:
    second = {"second_d_weight": 2 * 4096 * 128256, "hopper": False}
    assert grown(4096, 2**29, hopper=False).rows == 2048
    assert grown(4096, 2**29, **second).rows < 2048
    assert grown(4096, 2**31, **second).rows == 4096
    assert grown(1024, 2**29, **second).rows == 1024
    for tokens in (17, 32):  # two chunks of 16 rows would take more than one chunk
        least = grown(tokens, 2**30, **second).bytes
        assert grown(tokens, least, **second).rows == tokens
        with pytest.raises(ValueError, match=f"at least {least} bytes"):
            grown(tokens, least - 1, **second)
    for tokens in (33, 100):
        assert grown(tokens, 2**30, **second).rows == tokens
        assert grown(tokens, 2**23, **second).rows == 16


def test_a_last_chunk_uses_the_kernels_of_the_others_if_that_costs_little() -> None:
    for tokens, last_rows in ((8192, 1664), (8064, 1408)):  # 128 more rows of 8192, and 256 of 8064, more than a 50th
        config = grown(tokens, 2**29, classes=151936)
        assert config.rows == 1664
        assert config.kernel_rows((tokens - 1) % 1664 + 1) == last_rows
        assert config.kernel_rows(1664) == 1664
    assert grown(8192, 2**29, classes=151936, hopper=False).kernel_rows(1536) == 1536


def test_a_budget_too_small_for_exponentials_names_the_least() -> None:
    with pytest.raises(ValueError, match="at least"):
        grown(8192, 2**20)
    least = grown(16, 2**30).bytes
    assert grown(16, least).rows == 16
    with pytest.raises(ValueError, match=f"at least {least} bytes for 16 tokens and 128256 classes, got {least - 1}"):
        grown(16, least - 1)


def test_vocab_chunks_of_recomputed_logits_fit() -> None:
    numbers: dict[str, Any] = {
        "hidden": 4096,
        "classes": 128256,
        "itemsize": 2,
        "statistics": 2,
        "float16": False,
        "needs_cast": False,
    }
    for tokens, in_place in itertools.product((1, 100, 8192, 65536), (False, True)):
        numbers |= {"tokens": tokens, "d_input": True, "d_weight": True, "in_place": in_place}
        config = choose_recomputed(**numbers, budget=2**29)
        assert 0 < config.rows <= tokens
        assert config.vocab_chunk % 192 == 0
        assert -(-128256 // config.vocab_chunk) * config.vocab_chunk - 128256 < 2048  # classes that are computed twice
        assert config.first_vocab_chunk == 128256
        sums = 4 * (2 - in_place) * config.rows + 4 * (not in_place) * config.vocab_chunk
        operands = 2 * (config.rows + config.vocab_chunk)
        assert 2 * config.rows * config.vocab_chunk + 4096 * (sums + operands) <= 2**29 - in_place * 2**25
        if in_place:
            assert config.rows == min(tokens, 8192)
            assert config.vocab_chunk == 11712  # 11 chunks


def test_a_budget_too_small_for_recomputed_logits_names_the_least() -> None:
    flags = {"float16": False, "needs_cast": False, "in_place": True, "d_input": True, "d_weight": True}
    numbers: dict[str, Any] = {"tokens": 1000, "hidden": 4096, "classes": 128256, "itemsize": 2, "statistics": 2}
    with pytest.raises(ValueError, match="at least") as refused:
        choose_recomputed(**numbers, **flags, budget=2**20)
    found = re.search(r"at least (\d+) bytes", str(refused.value))
    assert found is not None
    config = choose_recomputed(**numbers, **flags, budget=int(found[1]))
    assert (config.rows, config.vocab_chunk) == (16, 64)


def test_kernels_are_requested_by_name() -> None:
    arrays = problem(dtype=jnp.bfloat16)
    assert explain(arrays["input"], arrays["linear_weight"]).name == "chunked"
    assert explain(arrays["input"], arrays["linear_weight"], implementation="pallas_triton").name == "pallas_triton"


@pytest.mark.parametrize(("classes", "copied"), [(320, False), (300, True)])
def test_vocab_chunks_that_tma_cannot_read_are_copied(classes: int, copied: bool) -> None:
    bias = jnp.arange(320.0) % 128  # exact in bfloat16
    w = jnp.tile(bias, (8, 1)).astype(jnp.bfloat16)
    problem = Problem(
        input=jnp.zeros((3, 8), jnp.bfloat16),
        linear_weight=w,
        target=jnp.zeros(3, jnp.int32),
        row_weight=jnp.ones(3),
        linear_bias=bias,
        class_weight=bias[:classes],
        spec=LossSpec("sum"),
        classes=classes,
        vocab_axis=1,
    )
    problem = planned(problem, "gradients", "pallas_triton")
    vocab_chunk = Slice(classes - 256, 256, jnp.ones(256, bool))
    head, chunk_bias, class_weight, first, _ = recompute._vocab_chunk(problem, vocab_chunk)
    start = 0 if copied else classes - 256
    assert first == start
    assert head.shape == ((8, 256) if copied else (8, 320))
    for found in (head[0], chunk_bias, class_weight):
        assert found is not None
        assert (found[start : start + 256] == bias[classes - 256 : classes]).all()


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
CAPABILITIES = (None, (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
DTYPES = ("float16", "bfloat16", "float32")
HIDDEN = (1, 8, 60, 64, 100, 4096)
VOCAB = (1, 50, 64, 50257, 128256)


def names_of(capability: Any, dtype: str, hidden: int, vocab: int, vocab_axis: int) -> str:
    """Returns the name of the implementation for an NVIDIA GPU, from the table in the documentation."""
    if capability is None or capability < (8, 0) or dtype == "float32":
        return "chunked"
    aligned = hidden % 8 == 0 and (vocab_axis == 0 or vocab % 64 == 0)
    return "mosaic" if capability == (9, 0) and aligned else "pallas_triton"


def test_choice_without_a_name() -> None:
    names = set()
    every: Any = itertools.product(PLATFORMS, CAPABILITIES, DTYPES, HIDDEN, VOCAB, (0, 1))
    for platform, *shape in every:
        name, reason = launch.choose(platform, *shape)
        names.add(name)
        assert name == ("chunked" if platform != "cuda" else names_of(*shape)), (platform, *shape)
        assert reason
        if name != "chunked":  # a default can also be requested by name
            assert launch.limits(name, *shape[1:]) is None
            assert launch.resolve(name, None, *shape[1:]) == name
            assert launch.device_limits(name, platform, shape[0]) is None
    assert names == {"chunked", *launch.NAMES}


@pytest.mark.parametrize(
    ("device", "shape", "reason"),
    [
        (("tpu", None), ("bfloat16", 64, 128, 0), "no kernel for tpu devices"),
        (("cuda", None), ("bfloat16", 64, 128, 0), "compute capability is not known .* name an implementation"),
        (("cuda", (9, 0)), ("bfloat16", 64, 128, 0), r"its kernels serve compute capability 9\.0"),
        (("cuda", (9, 0)), ("float32", 64, 128, 0), "it has the fastest float32 matmuls"),
        (("cuda", (9, 0)), ("float16", 60, 128, 0), "the Hopper kernels need a hidden size .* got 60"),
        (("cuda", (8, 0)), ("float16", 64, 128, 0), r"the Hopper kernels need compute capability 9\.0, .* has 8\.0"),
        (("cuda", (7, 5)), ("float16", 64, 128, 0), r"pallas_triton needs compute capability 8\.0, .* has 7\.5"),
    ],
)
def test_choice_says_why(device: Any, shape: Any, reason: str) -> None:
    assert re.search(reason, launch.choose(*device, *shape)[1])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_named_implementation_that_the_device_lacks_says_so(reduction: Any) -> None:
    arrays = problem(40, 64, 128, dtype=jnp.bfloat16)

    def loss(arrays: dict[str, Any]) -> Any:
        return linear_cross_entropy(**arrays, reduction=reduction, implementation="mosaic")

    message = "implementation 'mosaic' cannot serve this call: the Hopper kernels need an NVIDIA GPU, not a cpu device"
    with pytest.raises(ValueError, match=message):
        loss(arrays)
    with pytest.raises(ValueError, match=message):
        jax.jit(loss).lower(arrays)
    assert jax.eval_shape(loss, arrays).dtype == jnp.float32  # tracing alone does not raise
    with pytest.raises(ValueError, match=message):
        explain(arrays["input"], arrays["linear_weight"], reduction=reduction, implementation="mosaic")
    of_gpu = explain(arrays["input"], arrays["linear_weight"], implementation="mosaic", device="h200")
    assert of_gpu.name == "mosaic"


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_a_named_implementation_that_the_gpu_lacks_says_so(kind: str) -> None:
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    arrays = problem(40, 64, 128, dtype=jnp.bfloat16)
    call = jax.jit(lambda arrays: linear_cross_entropy(**arrays, implementation="mosaic"))
    message = r"the Hopper kernels need compute capability 9\.0, the device has (8|10)\.0"
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        with pytest.raises(ValueError, match=message):
            call.trace(arrays).lower(lowering_platforms=("cuda",))
        like = (jax.ShapeDtypeStruct(arrays[name].shape, jnp.bfloat16) for name in ("input", "linear_weight"))
        with pytest.raises(ValueError, match=message):
            explain(*like, implementation="mosaic")  # pyright: ignore[reportArgumentType]


def test_a_named_implementation_that_cannot_serve_says_why() -> None:
    arrays = problem(dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"implementation .mosaic. cannot serve this call: .*float32"):
        linear_cross_entropy(**arrays, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation must be one of"):
        linear_cross_entropy(**arrays, implementation="cuda")
    assert set(launch.NAMES) < set(IMPLEMENTATIONS)


def test_cases_reach_both_forms_of_plan_a() -> None:
    spread = [replace(case, hidden=64) for case in cases() if case.dtype == "bfloat16"]
    assert any(case.spec.label_smoothing for case in spread)
    assert any(not case.spec.label_smoothing for case in spread)
