"""Tests the estimate of a call's time, and the chunks that both frameworks choose by it. No GPU is needed."""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import core_triton
import jax_pallas
from benchmarks.chunk_rows import Choice, considered, estimating, fewest_rows, preferring
from benchmarks.shapes import HEADS, Head
from core_triton.plan import DeviceInfo as TorchDevice
from core_triton.plan import MatrixLayout as TorchLayout
from core_triton.plan import PlanKey as TorchKey
from core_triton.plan import make_plan as make_torch_plan
from core_triton.tile_config import CLASS_BLOCK, padded
from jax_pallas.launch import DeviceInfo as JaxDevice
from jax_pallas.plan import MatrixLayout as JaxLayout
from jax_pallas.plan import PlanKey as JaxKey
from jax_pallas.plan import make_plan as make_jax_plan
from jax_pallas.tile_config import CLASS_BLOCK as JAX_CLASS_BLOCK
from jax_pallas.tile_config import FIRST_CHUNK_PIECES, cdiv, first_chunk_pieces, first_chunk_room
from linear_ce import chunk_cost
from linear_ce.chunk_cost import ROW_BLOCK, Call, Chunk, DInput, call_ms, least_ms
from linear_ce.collectives import AT_ONCE, LateStart, late_start
from linear_ce.cost_coefficients import COEFFICIENTS, CostCoefficients
from linear_ce.gpus import GPUS, gpu_named, known_gpu

MIB = 2**20
FRAMEWORKS = ("torch", "jax")
LLAMA, QWEN, GEMMA = (4096, 128256), (896, 151936), (2304, 256000)  # D, V


def plan(framework: str, n: int, d: int, v: int, budget: int, gpu: str = "h200", **options: Any) -> Any:
    """Returns the plan of a training call in bfloat16."""
    capability, multiprocessors, *_ = gpu_named(gpu)
    shared: dict[str, Any] = {
        "stage": "loss_and_gradients",
        "classes": v,
        "memory_budget": budget,
        **dict.fromkeys(("label_smoothing", "softcap", "entropy", "d_bias", "statistics"), False),
        **dict.fromkeys(("d_input", "d_weight"), True),
    }
    if framework == "torch":
        shared |= {
            "input": TorchLayout((n, d), (d, 1), 2, "bfloat16", True),
            "linear_weight": TorchLayout((v, d), (d, 1), 2, "bfloat16", True),
            "copied_bytes": 0,
            "implementation": "triton",
            "device": TorchDevice("cuda", capability, multiprocessors, gpu),
        }
        return make_torch_plan(TorchKey(**shared | options))
    shared |= {
        "input": JaxLayout((n, d), 2, "bfloat16"),
        "linear_weight": JaxLayout((v, d), 2, "bfloat16"),
        "vocab_axis": 0,
        "implementation": "mosaic" if capability == 90 else "pallas_triton",
        "device": JaxDevice("cuda", capability, multiprocessors, gpu),
    }
    return make_jax_plan(JaxKey(**shared | options))


def chosen(framework: str, *sizes: int, **options: Any) -> tuple[Any, Choice, list[Choice]]:
    """Returns the plan, what was estimated of it, and all that was considered."""
    make = partial(plan, framework, *sizes, **options)
    choices, made = considered(make), make()
    return made, next(choice for choice in choices if choice.rows == made.chunks.rows), choices


def call(tokens: int = 8192, shape: tuple[int, int] = GEMMA, **changes: Any) -> Call:
    hidden, classes = shape
    usual = Call(
        tokens, hidden, classes, d_input=True, d_weight=True, d_weight_kernel=True, adds_in_l2=True, block_v=256,
        class_block=256, row_step=32, programs=132, cast_bytes=0, gpu="h200",
        coefficients=COEFFICIENTS["h200", "torch"],
    )  # fmt: skip
    return usual._replace(**changes)


def split(of: Call, rows: int) -> Chunk:
    """Returns a chunk whose d_input is divided evenly among all programs."""
    return Chunk(rows, rows, chunk_cost.library_d_input(of, rows))


# The estimate.


@pytest.mark.parametrize("rows", [384 + 16, 464, 496, 512])
def test_padded_rows_cost_what_full_ones_do(rows: int) -> None:
    of = call(adds_in_l2=False)
    assert chunk_cost.logits_ns(of, rows) == chunk_cost.logits_ns(of, 512)
    assert chunk_cost.logits_ns(of, 384) < 0.8 * chunk_cost.logits_ns(of, 512)
    padded = -(-rows // 32) * 32
    assert chunk_cost.d_weight_ns(of, rows, adds=True) == pytest.approx(chunk_cost.d_weight_ns(of, padded, adds=True))


def test_waves_count() -> None:
    """A GPU whose programs do not divide the tiles is idle in the last wave."""
    whole, more = call(shape=(4096, 66 * 256)), call(shape=(4096, 66 * 256 + 1))
    assert chunk_cost.logits_ns(more, 256) == pytest.approx(2 * chunk_cost.logits_ns(whole, 256))
    more = call(shape=(4 * 128, 33 * 256 + 1))
    by_kernel, by_library = (
        chunk_cost.d_weight_ns(more._replace(d_weight_kernel=ours), 4096, adds=False) for ours in (True, False)
    )
    assert by_kernel > 1.9 * by_library


def test_at_the_power_limit_idle_programs_and_padded_rows_cost_less() -> None:
    """A long call pays for shares of them, up to 1 - `idle` and 1 - `padded`; a short one for all."""
    usual = COEFFICIENTS["h200", "torch"]
    shape = 4096, 66 * 256 + 1  # 67 class blocks: two waves of 132 programs for two row blocks
    paid = call(shape=shape, adds_in_l2=False)
    limit = chunk_cost.least_ms(paid, 1) / 4  # of such a call 3/4 is at the limit
    free = paid._replace(coefficients=usual._replace(idle=0.8, padded=0.4, unlimited=limit))
    assert free.counted == (pytest.approx(1 - 0.75 * 0.8), pytest.approx(1 - 0.75 * 0.4))
    tiles, one_wave = 2 * 67, chunk_cost.logits_ns(paid, 256) / 2
    waves = 2 - 0.6 * (2 - tiles / 132)
    assert chunk_cost.logits_ns(free, 256) == pytest.approx(waves * one_wave)
    assert chunk_cost.logits_ns(free, 192) == pytest.approx(waves * one_wave * (256 - 0.3 * 64) / 256)

    of_memory = usual.exposed * paid.memory_ns(paid.d_weight_bytes)
    times = (chunk_cost.d_weight_ns(of, 272, adds=False) - of_memory for of in (paid, free))
    most, mean = -(-67 * 32 // 132), 67 * 32 / 132  # tiles of d_weight, whose steps have 32 rows
    tile, shorter = (usual.multiply * rows + usual.d_weight_tile for rows in (288, 272 + 0.7 * 16))
    assert [*times] == pytest.approx([most * tile, (most - 0.6 * (most - mean)) * shorter])

    found = chunk_cost.DInput(256, 2.0 * paid.classes, 0.0, 0)  # two tiles of a program, and 64 in all
    ratio = chunk_cost.d_input_ns(free, 448, found) / chunk_cost.d_input_ns(paid, 448, found)
    assert ratio == pytest.approx((2 - 0.6 * (2 - 64 / 132)) / 2 * (512 - 0.3 * 64) / 512)
    short = free._replace(coefficients=free.coefficients._replace(unlimited=5 * limit))
    for of in (chunk_cost.logits_ns, lambda of, rows: chunk_cost.d_weight_ns(of, rows, adds=True)):
        assert of(short, 272) == of(paid, 272)


def test_tiles_of_half_the_classes_take_half_the_time() -> None:
    """The kernel of compute capability 8.x has tiles of 128 classes, and two programs share a multiprocessor."""
    slow = COEFFICIENTS["a100", "torch"]._replace(multiply=1000.0, exposed=0.0)
    wide = call(shape=(128, 108 * 256), programs=108, gpu="a100", coefficients=slow, adds_in_l2=False)
    for classes, ratio in (108 * 256, 1.0), (108 * 128, 0.5), (108 * 256 + 128, 0.75):
        of = wide._replace(classes=classes)
        halves = of._replace(class_block=128)
        found = [chunk_cost.d_weight_ns(each, 1024, adds=True) for each in (of, halves)]
        assert found[1] == pytest.approx(ratio * found[0])


def test_the_bytes_of_d_weight_and_of_the_head_count() -> None:
    of = call(shape=LLAMA)
    first, added = (chunk_cost.d_weight_ns(of, 2048, adds=adds) for adds in (False, True))
    read = 2 * math.prod(LLAMA) / 4.8e12 * 1e9
    assert added - first == pytest.approx(of.coefficients.exposed * read)
    loads = of._replace(adds_in_l2=False)
    slow, fast = (chunk_cost.d_weight_ns(loads._replace(gpu=gpu), 2048, adds=True) for gpu in ("h100", "h200"))
    assert slow > fast
    # 16 rows take as long as reading the head.
    assert chunk_cost.logits_ns(call(shape=(4096, 2**20), programs=10**6), 16) > 2 * 4096 * 2**20 / 4.8e12 * 1e9
    casts = of._replace(cast_bytes=2**30)
    chunk = split(of, 2048)
    assert call_ms(casts, chunk, chunk) - call_ms(of, chunk, chunk) == pytest.approx(4 * 2**30 / 4.8e12 * 1e3)


def test_what_does_not_stay_in_l2_is_read_again() -> None:
    missing = COEFFICIENTS["h200", "torch"]._replace(missed=1.0)
    for rows, missed in ((2048, False), (16384, True)):
        without, with_misses = (
            chunk_cost.d_weight_ns(call(shape=LLAMA, coefficients=found), rows, adds=False)
            for found in (missing._replace(missed=0.0), missing)
        )
        assert (with_misses > without) == missed


def test_chunks_add_up() -> None:
    of = call(tokens=1000, shape=LLAMA)
    chunk, last = split(of, 512), split(of, 488)
    parts = chunk_cost.chunk_ns(of, last, adds=False) + chunk_cost.chunk_ns(of, chunk, adds=True)
    assert call_ms(of, chunk, last) == pytest.approx(parts / 1e6 + of.coefficients.call / 1e3)
    one = of._replace(tokens=512)
    assert call_ms(one, chunk, chunk) == pytest.approx(
        chunk_cost.chunk_ns(of, chunk, adds=False) / 1e6 + of.coefficients.call / 1e3
    )
    frozen = of._replace(d_weight=False)
    assert call_ms(frozen, chunk._replace(d_input=None), last._replace(d_input=None)) < 0.4 * call_ms(of, chunk, last)


def test_narrow_tiles_tails_and_partial_tiles_cost_more() -> None:
    of = call(coefficients=COEFFICIENTS["h200", "torch"]._replace(tail=0.1))
    usual = chunk_cost.d_input_ns(of, 512, DInput(256, 256000, 0.0, 0))
    assert chunk_cost.d_input_ns(of, 512, DInput(128, 512000, 0.0, 0)) > usual
    assert chunk_cost.d_input_ns(of, 512, DInput(256, 256000, 0.4, 0)) == pytest.approx(1.04 * usual)
    partial_tiles = chunk_cost.d_input_ns(of, 512, DInput(256, 256000, 0.0, 2**24))
    assert partial_tiles == pytest.approx(usual + 2 * 2**24 / 4.8e12 * 1e9)


@pytest.mark.parametrize("key", COEFFICIENTS)
def test_every_gpu_has_coefficients(key: tuple[str, str]) -> None:
    assert {gpu for gpu, _ in COEFFICIENTS} == set(GPUS)
    assert {framework for _, framework in COEFFICIENTS} == set(FRAMEWORKS)
    assert all(value >= 0 for value in COEFFICIENTS[key])


@pytest.mark.parametrize(
    ("reported", "capability", "name"),
    [
        ("NVIDIA H200", 90, "h200"),
        ("NVIDIA H100 80GB HBM3", 90, "h100"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100"),
        ("NVIDIA L40S", 89, "l40s"),
        ("NVIDIA GeForce RTX 4090", 89, "rtx4090"),
        ("NVIDIA H20", 90, "h100"),
        ("NVIDIA B200", 100, "b200"),
        ("NVIDIA B300 SXM6 AC", 103, "b200"),
        ("NVIDIA Thor", 110, "b200"),
        ("NVIDIA GeForce RTX 5090", 120, "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, "rtx5090"),
        ("NVIDIA GB10", 121, "rtx5090"),
        ("NVIDIA RTX A6000", 86, "l40s"),
        ("NVIDIA A30", 80, "a100"),
        ("", 0, "a100"),
    ],
)
def test_a_device_is_a_known_gpu(reported: str, capability: int, name: str) -> None:
    assert known_gpu(reported, capability) == name


# The choice.


SIZES = st.integers(1, 70000), st.integers(1, 128), st.integers(1, 260000)  # N, D / 64, V


@cache
def least(framework: str, n: int, d: int, v: int) -> int:
    with pytest.raises(ValueError, match=r"at least \d+ bytes") as refused:
        plan(framework, n, d, v, 1)
    return int(str(refused.value).split("at least ")[1].split(" bytes", maxsplit=1)[0])


@settings(max_examples=60)
@given(st.sampled_from(FRAMEWORKS), *SIZES, st.integers(0, 2**30))
def test_any_budget_that_holds_the_least_rows_has_a_plan(framework: str, n: int, d: int, v: int, more: int) -> None:
    sizes = (n, 64 * d, v)
    budget = least(framework, *sizes) + more
    made, choice, choices = chosen(framework, *sizes, budget)
    assert made.chunks.bytes <= budget
    assert 1 <= made.chunks.rows <= n
    assert made.chunks.rows >= min(n, 16)
    cheapest = choices[0].ms()
    assert choice.ms() <= (1 + chunk_cost.TIE) * cheapest
    fewer = [other for other in choices if other.chunks < choice.chunks]
    assert all(other.ms() > (1 + chunk_cost.TIE) * cheapest for other in fewer)


@settings(max_examples=40)
@given(st.sampled_from(FRAMEWORKS), *SIZES, st.integers(0, 2**29), st.integers(0, 2**29))
def test_a_larger_budget_never_estimates_slower(
    framework: str, n: int, d: int, v: int, more: int, yet_more: int
) -> None:
    sizes = (n, 64 * d, v)
    # Below, the memory of split tiles decides, of which a larger budget may leave less.
    budget = least(framework, *sizes) + 2 * min(n, 128) * v + more
    small, large = (chosen(framework, *sizes, size)[2][0].ms() for size in (budget, budget + yet_more))
    assert large <= small * (1 + 1e-9)


@settings(max_examples=60)
@given(st.sampled_from(["h100", "h200"]), *SIZES, st.integers(1, 600), st.integers(1, 4))
@example("h200", 1023, 36, 151936, 2, 4)  # two chunks, of 512 and 511 rows
@example("h100", 1536, 36, 151936, 2, 4)  # two chunks of 768 rows
def test_no_estimate_falls_below_the_bound_of_its_chunks(
    gpu: str, n: int, d: int, v: int, chunks: int, tile: int
) -> None:
    of = call(n, (64 * d, v), gpu=gpu, coefficients=COEFFICIENTS[gpu, "torch"])
    rows = -(-n // chunks)
    chunk, last = (
        Chunk(size, size, DInput(64 * tile, _longest(of, size, 64 * tile), 0.0, 0))
        for size in (rows, (n - 1) % rows + 1)
    )
    found = call_ms(of, chunk, last)
    count = -(-n // rows)
    assert least_ms(of, count) <= found * (1 + 1e-9)
    assert least_ms(of, count) <= least_ms(of, count + 1)


def _longest(of: Call, rows: int, tile_rows: int) -> float:
    return -(-rows // tile_rows) * -(-of.hidden // 128) * of.classes / of.programs


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("mebibytes", [256, 512])
def test_named_models_have_whole_tiles(framework: str, gpu: str, mebibytes: int) -> None:
    for shape in (LLAMA, QWEN, GEMMA):
        made, choice, choices = chosen(framework, 8192, *shape, mebibytes * MIB, gpu=gpu)
        assert made.chunks.bytes <= mebibytes * MIB
        assert choice.ms() <= 1.005 * min(other.ms() for other in choices)
        # Tiles of 256 rows for d_input, which 464 rows leave memory for, are worth the padding on an H100.
        padded = (gpu, mebibytes, shape) == ("h100", 256, GEMMA)
        assert made.chunks.rows == 464 if padded else made.chunks.rows % 128 == 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_chunk_of_gemma_in_256_mib_does_not_pad_464_rows_to_512(framework: str) -> None:
    sizes = (8192, *GEMMA, 256 * MIB)
    fewest = fewest_rows(partial(plan, framework, *sizes))
    made, choice, choices = chosen(framework, *sizes)
    assert fewest in (464, 512)
    assert made.chunks.rows == 384
    assert choice.ms() < 0.99 * next(other.ms() for other in choices if other.rows == fewest)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_llama_keeps_the_largest_chunks_where_they_are_whole_tiles(framework: str) -> None:
    for mebibytes, rows in ((256, 1024), (512, 2048), (2048, 8192)):
        assert plan(framework, 8192, *LLAMA, mebibytes * MIB).chunks.rows == rows


def test_the_frameworks_agree_where_their_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same coefficients, tiles and schedules the estimate is the same, so the choice is."""
    same = COEFFICIENTS["h200", "jax"]
    monkeypatch.setitem(COEFFICIENTS, ("h200", "torch"), same)
    for shape, mebibytes in ((LLAMA, 256), (LLAMA, 512), (LLAMA, 2048), (QWEN, 256), (GEMMA, 256), (GEMMA, 512)):
        found = [chosen(framework, 8192, *shape, mebibytes * MIB) for framework in FRAMEWORKS]
        assert found[0][0].chunks.rows == found[1][0].chunks.rows, (shape, mebibytes)
        assert found[0][1].ms() == pytest.approx(found[1][1].ms(), rel=0.03)
    make_torch_plan.cache_clear()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frozen_arrays_and_gpus_without_the_kernels_of_hopper_have_an_estimate(framework: str) -> None:
    for frozen in ({"d_weight": False}, {"d_input": False}):
        made, choice, _ = chosen(framework, 8192, *LLAMA, 512 * MIB, **frozen)
        assert (choice.call.d_input, choice.call.d_weight) == ("d_input" not in frozen, "d_weight" not in frozen)
        assert (choice.chunk.d_input is None) == ("d_input" in frozen)
        assert made.chunks.rows >= 1536
        assert made.chunks.rows % 128 == 0
    for gpu in ("a100", "l40s", "rtx4090", "rtx5090"):
        made, choice, _ = chosen(framework, 8192, *LLAMA, 512 * MIB, gpu=gpu)
        assert made.path == "scaled_exp"
        assert choice.call.d_weight_kernel == (framework == "torch")
        if framework == "torch":
            assert (choice.call.class_block, choice.call.row_step) == (128, 64 if gpu == "a100" else 32)
        # Our kernel of PyTorch has tiles of 128 rows. The matmul of XLA counts as one with tiles of 256.
        assert choice.chunk.d_input is not None
        assert choice.chunk.d_input.tile_rows == (128 if framework == "torch" else 256)
        assert made.chunks.rows >= 1024


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scoring_is_not_estimated(framework: str) -> None:
    options = {"stage": "losses", "d_input": False, "d_weight": False}
    assert considered(partial(plan, framework, 8192, *LLAMA, 512 * MIB, **options)) == []


@pytest.mark.parametrize(("framework", "mean", "most"), [("torch", 29.2, 58), ("jax", 25.6, 51)])
def test_a_plan_makes_few_estimates(framework: str, mean: float, most: int) -> None:
    """An estimate takes about 20 us. For each row count there are four kinds of tiles of d_input in PyTorch, and some
    three sizes of its partial tiles in JAX."""
    usual, counts = chunk_cost.call_ms, []

    def counter(*arguments: Any) -> float:
        counts[-1] += 1
        return usual(*arguments)

    for head in HEADS:
        for mebibytes in (256, 512):
            counts.append(0)
            with estimating(counter):
                plan(framework, 8192, head.d, head.v, mebibytes * MIB)
    assert min(counts) > 0
    assert sum(counts) / len(counts) < 1.2 * mean
    assert max(counts) < 1.2 * most


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_measurement_can_prefer_rows(framework: str) -> None:
    make = partial(plan, framework, 8192, *GEMMA, 512 * MIB)
    usual = make().chunks.rows
    for rows in (128, 384, 512, 768):
        with preferring(rows):
            assert make().chunks.rows == rows
    with preferring(700):  # no equal chunks have 700 rows
        assert abs(make().chunks.rows - 700) < 64
    assert make().chunks.rows == usual
    assert fewest_rows(make) == 1024


def test_programs_begin_late_by_the_time_of_a_collective() -> None:
    coefficients = COEFFICIENTS["h200", "torch"]

    def late(sent: float, rows: int, tiles: int, programs: int = 132, classes: int = 256) -> LateStart:
        return late_start(sent, rows, tiles, classes=classes, programs=programs, coefficients=coefficients)

    # Llama-3 8B on two GPUs: 46 MB of 2,816 rows take 0.29 ms, and a tile 0.034.
    assert late(4 * 2816 * 4096, 2816, 8032) == LateStart(24, 8)
    assert late(4 * 2816 * 4096, 2816, 8032, classes=128) == LateStart(24, 16)
    assert late(4 * 2816 * 4096, 2816, 8032, programs=40) == LateStart(20, 8)
    assert late(0.0, 2816, 8032) == late(4 * 2816 * 4096, 2816, 107) == late(1.0, 8192, 8032) == AT_ONCE
    assert late(4 * 2816 * 4096, 2816, 500) == LateStart(24, 4), "as many rounds as there are tiles"
    assert late(1.0, 300, 12, programs=1) == AT_ONCE


EXPLAIN: dict[str, Callable[..., Any]] = {"torch": core_triton.explain, "jax": jax_pallas.explain}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_explain_shows_the_rows(framework: str) -> None:
    sizes = ((8192, GEMMA[0]), (GEMMA[1], GEMMA[0]))
    if framework == "torch":
        arrays: Any = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
    else:
        arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    explained = EXPLAIN[framework](*arrays, memory_budget=256 * MIB, device="h200")
    rows = plan(framework, 8192, *GEMMA, 256 * MIB).chunks.rows
    assert explained.plan.chunks.rows == rows == 384
    first = "1 of 2048 rows, whose exponentials are in the memory of d_weight until it is written"
    assert f"chunks: {first}, and 16 of 384 rows" in str(explained).splitlines()


@pytest.mark.parametrize("head", HEADS[:32], ids=lambda head: head.name)
@pytest.mark.parametrize("itemsize", [2, 4])  # 4: a float32 head that is split
def test_a_first_chunk_of_jax_fits_where_it_is_stored(itemsize: int, head: Head) -> None:
    room, options, columns = first_chunk_room(head.d, itemsize), {}, head.d * itemsize // 2
    v = head.v if itemsize == 2 else head.v // 8 * 8
    if itemsize == 4:
        options = {"linear_weight": JaxLayout((v, head.d), 4, "float32"), "splits_head": True}
    for n, mebibytes, gpu in product((300, 2048, 8192), (64, 256, 512), ("h100", "h200")):
        made = plan("jax", n, head.d, v, mebibytes * MIB, gpu=gpu, **options).chunks
        start, first_rows = made.last_start(n), made.first_rows
        assert start % made.rows == 0
        assert n - start == (first_rows or (n - 1) % made.rows + 1)
        if first_rows:
            assert made.rows < first_rows <= room or first_rows == n <= room
            assert made.last_rows == first_rows
            assert made.piece % JAX_CLASS_BLOCK == 0
            # The first piece, in the workspace, is wide enough for the others.
            rows = cdiv(first_rows, ROW_BLOCK) * ROW_BLOCK
            if itemsize == 2:
                assert 4 * rows <= made.piece
            group = columns // JAX_CLASS_BLOCK * JAX_CLASS_BLOCK
            assert 0 < len(first_chunk_pieces(made.piece, rows, group, v) or ()) <= FIRST_CHUNK_PIECES
            assert first_rows * made.piece <= made.rows * padded(v)
            assert made.bytes <= mebibytes * MIB


@pytest.mark.parametrize("head", HEADS[:32], ids=lambda head: head.name)
def test_the_pieces_of_a_first_chunk_fit_where_they_are_stored(head: Head) -> None:
    for n, mebibytes, gpu in product((300, 2048, 8192), (64, 256, 512), ("h100", "h200", "a100")):
        tile_classes = CLASS_BLOCK if gpu != "a100" else 128
        made = plan("torch", n, head.d, head.v, mebibytes * MIB, gpu=gpu).chunks
        chunks = made.chunks(n)
        assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(n))
        assert all(chunk.stop - chunk.start == made.rows for chunk in chunks[: -1 if made.first_rows else 0])
        if made.first_rows:
            pieces = -(-head.v // made.piece)
            assert made.rows < made.first_rows <= head.d or made.first_rows == n <= head.d
            assert made.piece % tile_classes == 0
            assert made.piece >= made.first_rows
            assert made.first_rows * made.piece <= made.rows * padded(head.v)  # the first piece, in the workspace
            assert (pieces - 1) * made.piece <= head.v  # the others, in the rows of d_weight of as many classes
            assert chunks[-1].stop - chunks[-1].start == made.first_rows
            assert made.bytes <= mebibytes * MIB


@pytest.mark.parametrize(
    ("framework", "n", "shape", "gpu", "mebibytes"),
    [
        ("torch", 4096, LLAMA, "h100", 512),
        ("torch", 8192, GEMMA, "h200", 256),
        ("jax", 8192, GEMMA, "h100", 512),
        ("jax", 2048, LLAMA, "h200", 256),
    ],
)
def test_a_first_chunk_of_float16_has_no_label_smoothing(
    framework: str, n: int, shape: tuple[int, int], gpu: str, mebibytes: int
) -> None:
    """Its terms are in d_weight before the exponentials would be: MATH.md (51)."""
    d, v = shape
    x = TorchLayout((n, d), (d, 1), 2, "float16", True) if framework == "torch" else JaxLayout((n, d), 2, "float16")
    of_float16 = {"input": x, "linear_weight": x._replace(shape=(v, d))}
    for smoothing, dtype in product((0.0, 0.1), ({}, of_float16)):
        made = plan(framework, n, d, v, mebibytes * MIB, gpu=gpu, label_smoothing=smoothing, **dtype).chunks
        assert (made.first_rows > made.rows) == (not smoothing or not dtype)
        assert made.bytes <= mebibytes * MIB


def test_whole_row_blocks_of_a_first_chunk_fit_rows_of_d_weight() -> None:
    """Kernels store whole row blocks, and the next rows may be those of another piece."""
    made = plan("torch", 2850, 2880, 201088, 256 * MIB, gpu="h100").chunks
    assert 2048 < made.first_rows <= 2816


def test_the_other_chunks_beside_a_first_one_may_have_any_of_the_best_rows() -> None:
    """Chunks of 1,024 and of 768 rows cost the same, but only beside the latter has a larger first chunk room."""
    made = plan("jax", 4096, *GEMMA, 512 * MIB, gpu="h100").chunks
    assert (made.rows, made.first_rows) == (768, 4096 - 3 * 768)
    made = plan("torch", 8192, 6144, 154880, 512 * MIB, gpu="h200").chunks
    assert (made.rows, made.first_rows) == (1024, 6144)
    made = plan("jax", 4096, *GEMMA, 256 * MIB, gpu="h100").chunks  # of equal choices the one with the fewest chunks
    assert (made.rows, made.first_rows) == (464, 4096 - 4 * 464)


def test_few_pieces_are_preferred_to_less_memory() -> None:
    for d, v in ((4096, 151936), (4096, 100278)):
        made = plan("torch", 4096, d, v, 256 * MIB, gpu="h100").chunks
        assert made.first_rows == 4096
        assert made.piece >= 4 * 4096


def test_the_logits_of_all_pieces_are_one_launch() -> None:
    of, piece = call()._replace(piece_ns=1e4), 100 * 256
    whole = split(of, 2048)
    of_pieces = [min(piece, of.classes - first) for first in range(0, of.classes, piece)]
    d_weights = sum(chunk_cost.d_weight_ns(of, 2048, adds=False, classes=classes) for classes in of_pieces)
    more = d_weights - chunk_cost.d_weight_ns(of, 2048, adds=False)
    assert more > 0
    more += of.piece_ns * (len(of_pieces) - 1)
    for d_weight in (False, True):
        one, pieces = (
            chunk_cost.chunk_ns(of._replace(d_weight=d_weight), chunk, adds=False)
            for chunk in (whole, whole._replace(pieces=tuple(of_pieces)))
        )
        assert pieces - one == pytest.approx(more if d_weight else 0.0)


def test_a_first_chunk_for_compute_capability_8_where_reading_d_weight_takes_long() -> None:
    """A newer GPU with these kernels has the chunks that an A100 with as many multiprocessors would have."""
    plans = {
        name: plan("torch", 8192, *head, mebibytes * MIB, "h100", implementation="triton_sm80")
        for name, head, mebibytes in (
            ("gemma", GEMMA, 512),
            ("gemma in 256 MiB", GEMMA, 256),
            ("llama", LLAMA, 512),
            ("qwen", QWEN, 512),
        )
    }
    assert {one.gpu for one in plans.values()} == {"a100"}
    chunks = {name: (one.chunks.rows, one.chunks.first_rows) for name, one in plans.items()}
    assert chunks == {
        "gemma": (896, 1920),
        "gemma in 256 MiB": (384, 2048),
        "llama": (2048, 0),
        "qwen": (1664, 0),
    }
    for options in ({"grad_into": True}, {"batch_invariant": True}):
        assert plan("torch", 8192, *GEMMA, 512 * MIB, "a100", **options).chunks.first_rows == 0


@pytest.mark.parametrize(("framework", "split"), [("torch", False), ("jax", False), ("jax", True)])
def test_the_estimate_counts_the_pieces_that_are_launched(framework: str, split: bool) -> None:
    asked = set[tuple[int, ...]]()

    def note(call: Call, chunk: Chunk, last: Chunk) -> float:
        asked.add(last.pieces)
        return call_ms(call, chunk, last)

    n, d, v = 2048, 4096, 151936
    options: dict[str, Any] = {}
    if split:
        options = {"linear_weight": JaxLayout((v, d), 4, "float32"), "splits_head": True}
    with estimating(note):
        made = plan(framework, n, d, v, 256 * MIB, **options).chunks
    launched = [min(made.piece, v - first) for first in range(0, v, made.piece)]
    if framework == "jax":
        columns = d * (1 + split)
        found = first_chunk_pieces(made.piece, n, columns // JAX_CLASS_BLOCK * JAX_CLASS_BLOCK, v)
        launched = [end - first for first, end in found or ()]
        assert len(launched) < v // made.piece
    assert tuple(launched) in asked


def test_a_first_chunk_of_all_rows_needs_no_other_logits() -> None:
    """The workspace holds fewer rows of exponentials than the chunk has, but its gradients are plan A again."""
    for n, mebibytes in ((1500, 256), (2048, 128), (2048, 512)):
        for stage in ("loss_and_gradients", "row_gradients"):
            made = plan("torch", n, 4096, 151936, mebibytes * MIB, gpu="h100", stage=stage)
            assert made.path == "scaled_exp"
            assert made.chunks.first_rows == made.chunks.usual_rows(n) == n
            assert made.chunks.rows < n


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_what_is_added_in_l2_is_not_loaded(gpu: str) -> None:
    """The bytes that a matmul does not hide: those of a d_weight that is written and read, half read, only written."""
    slow = CostCoefficients(100.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    of, loads = (call(coefficients=slow, gpu=gpu, adds_in_l2=adds) for adds in (True, False))
    written = of.memory_ns(of.head_bytes)
    of_h200 = [(64, 1.5), (511, 1.5), (512, 1.0), (1024, 1.0), (1025, 2.0), (8192, 2.0)]
    of_h100 = [(64, 2.0), (767, 2.0), (768, 1.0), (1025, 1.0), (8192, 1.0)]
    for rows, moves in of_h200 if gpu == "h200" else of_h100:
        saved = chunk_cost.d_weight_ns(loads, rows, adds=True) - chunk_cost.d_weight_ns(of, rows, adds=True)
        assert saved == pytest.approx((2 - moves) * written)
        assert chunk_cost.d_weight_ns(of, rows, adds=False) == chunk_cost.d_weight_ns(loads, rows, adds=False)
