"""Tests how both frameworks choose chunks. The choices are pure functions, which are tested with random shapes and with
the shapes of models."""

import itertools
import re
from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import core_triton.chunk_config
import core_triton.tile_config
import jax_pallas.chunk_config
from core_triton.tile_config import DInputTiling, choose_ampere_tile, choose_d_input_tiling, choose_tile
from linear_ce import chunking, float32_tiles
from linear_ce.spec import DEFAULT_MEMORY_BUDGET

FRAMEWORKS = (core_triton.chunk_config, jax_pallas.chunk_config)
MODELS = {"Llama-3 8B": (4096, 128256), "Qwen2.5-0.5B": (896, 151936), "Gemma-2 2B": (2304, 256000)}  # D, V


def workspace_model(chunked: ModuleType, **options: Any) -> Any:
    if chunked is not core_triton.chunk_config:
        del options["upcasts"]  # JAX has 16-bit matmuls on every device
    return chunked.workspace_model(**options)


class Drawn(NamedTuple):
    """The inputs of a choice. `keeping` and `recomputing` are the two forms of plan A."""

    keeping: Any
    recomputing: Any
    tokens: int
    classes: int
    budget: int  # at least the smallest budget of `recomputing`
    float32: bool

    def plan_a(self, budget: int) -> chunking.ChunkConfig:
        sizes = max(self.tokens, 1), self.classes, budget
        return chunking.choose_plan_a(self.keeping, self.recomputing, *sizes, float32=self.float32)

    @property
    def least(self) -> int:
        rows, vocab_chunk = min(max(self.tokens, 1), chunking.MIN_ROWS), min(self.classes, chunking.MIN_VOCAB_CHUNK)
        return self.recomputing.bytes(rows, vocab_chunk)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    chunked = draw(st.sampled_from(FRAMEWORKS))
    tokens, classes = draw(st.integers(0, 70000)), draw(st.integers(1, 260000))
    itemsize = draw(st.sampled_from((2, 4)))
    flags = ("float16", "softcap", "entropy", "d_input", "d_weight", "upcasts")
    options: dict[str, Any] = {
        "tokens": tokens,
        "hidden": draw(st.integers(1, 8192)),
        "classes": classes,
        "itemsize": itemsize,
        "weight_itemsize": draw(st.sampled_from((itemsize, 4))),
        **{flag: draw(st.booleans()) for flag in flags},
    }
    keeping, recomputing = (workspace_model(chunked, **options, keeps_logits=keeps) for keeps in (True, False))
    problem = Drawn(keeping, recomputing, tokens, classes, 0, itemsize == 4)
    return problem._replace(budget=problem.least + draw(st.integers(0, 40)) * draw(st.integers(1, 2**26)))


@given(drawn())
def test_choice_covers_and_fits(p: Drawn) -> None:
    chosen = chunking.choose_chunks(p.recomputing, p.tokens, p.classes, p.budget)
    plan_a = p.plan_a(p.budget)
    assert not chosen.keeps_logits
    for config, model in ((chosen, p.recomputing), (plan_a, p.keeping if plan_a.keeps_logits else p.recomputing)):
        assert min(max(p.tokens, 1), chunking.MIN_ROWS) <= config.rows <= max(p.tokens, 1)
        assert 1 <= config.vocab_chunk <= p.classes
        assert model.bytes(config.rows, config.vocab_chunk) + config.float32_sum * model.float32_sum <= p.budget
        assert not config.float32_sum or 0 < model.float32_sum <= p.budget // 2


@given(drawn())
def test_a_budget_below_the_smallest_is_refused(p: Drawn) -> None:
    chunking.choose_chunks(p.recomputing, p.tokens, p.classes, p.least)
    p.plan_a(p.least)
    message = f"memory_budget must be at least {p.least} bytes .* got {p.least - 1}"
    with pytest.raises(ValueError, match=message):
        chunking.choose_chunks(p.recomputing, p.tokens, p.classes, p.least - 1)
    with pytest.raises(ValueError, match=message):
        p.plan_a(p.least - 1)


@given(drawn(), st.integers(1, 2**30))
def test_more_budget_holds_no_fewer_rows(p: Drawn, more: int) -> None:
    vocab_chunk = min(p.classes, chunking.MIN_VOCAB_CHUNK)
    assert p.recomputing.rows_within(p.budget + more, vocab_chunk) >= p.recomputing.rows_within(p.budget, vocab_chunk)


@given(drawn())
def test_a_wider_vocab_chunk_leaves_no_more_rows(p: Drawn) -> None:
    rows = [p.recomputing.rows_within(p.budget, vocab_chunk) for vocab_chunk in range(1, min(p.classes, 50))]
    assert rows == sorted(rows, reverse=True)


@given(drawn())
def test_rows_within_are_the_most_that_fit(p: Drawn) -> None:
    vocab_chunk = min(p.classes, chunking.MIN_VOCAB_CHUNK)
    rows = p.recomputing.rows_within(p.budget, vocab_chunk)
    assert p.recomputing.bytes(rows, vocab_chunk) <= p.budget < p.recomputing.bytes(rows + 1, vocab_chunk)


@given(drawn())
def test_a_problem_that_fits_is_not_split(p: Drawn) -> None:
    tokens = max(p.tokens, 1)
    budget = p.keeping.bytes(tokens, p.classes)
    config = p.plan_a(budget)
    assert config == chunking.ChunkConfig(tokens, p.classes, float32_sum=False, keeps_logits=True)


@given(drawn(), st.integers(1, 1000))
def test_logits_are_kept_where_that_pays(p: Drawn, rows: int) -> None:
    """16-bit logits only if those of all rows fit, float32 logits if those of enough rows fit."""
    tokens, vocab_chunk = max(p.tokens, 1), min(p.classes, chunking.MIN_VOCAB_CHUNK)
    p = p._replace(budget=max(p.least, p.keeping.bytes(min(rows, tokens), vocab_chunk)))
    config = p.plan_a(p.budget)
    least = min(tokens, chunking.LEAST_FLOAT32_ROWS) if p.float32 else tokens
    assert not config.keeps_logits or config.rows >= least
    # A wide vocabulary chunk can cost half of the rows, and equal chunks a few more.
    enough = p.keeping.bytes(min(tokens, 3 * least), vocab_chunk)
    assert config.keeps_logits or not p.float32 or tokens < 8 * least or enough > p.budget


@pytest.mark.parametrize("chunked", FRAMEWORKS, ids=lambda chunked: chunked.__name__)
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_models_fit_the_default_budget(chunked: ModuleType, shape: tuple[int, int], itemsize: int) -> None:
    hidden, classes = shape
    for tokens, entropy, gradients in itertools.product((1, 2, 1000, 8192, 65536), (False, True), (False, True)):
        options: dict[str, Any] = {
            "tokens": tokens,
            "hidden": hidden,
            "classes": classes,
            "itemsize": itemsize,
            "weight_itemsize": itemsize,
            "float16": False,
            "softcap": True,
            "entropy": entropy,
            "d_input": gradients,
            "d_weight": gradients,
            "upcasts": False,
        }
        keeping, recomputing = (workspace_model(chunked, **options, keeps_logits=keeps) for keeps in (True, False))
        sizes = (tokens, classes, DEFAULT_MEMORY_BUDGET)
        for config in (
            chunking.choose_chunks(recomputing, *sizes),
            chunking.choose_plan_a(keeping, recomputing, *sizes, float32=itemsize == 4),
        ):
            model = keeping if config.keeps_logits else recomputing
            assert model.bytes(config.rows, config.vocab_chunk) <= DEFAULT_MEMORY_BUDGET
            # Matmuls of fewer rows or classes would leave a GPU idle.
            assert config.rows >= min(tokens, 256)
            assert config.vocab_chunk >= 512


# Choices for the Triton kernels.


def refusal(choose: Callable[..., Any], options: dict[str, Any]) -> int:
    """Returns the smallest budget, from the error message for a budget of one byte."""
    tokens, classes = max(options["tokens"], 1), options["classes"]
    with pytest.raises(ValueError, match=rf"at least \d+ bytes for {tokens} tokens and {classes} classes") as refused:
        choose(**options, budget=1)
    named = re.search(r"at least (\d+) bytes", str(refused.value))
    assert named is not None
    return int(named[1])


def flags(choose: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the bool arguments."""
    return tuple(name for name, parameter in signature(choose).parameters.items() if parameter.annotation is bool)


@given(
    st.integers(0, 70000), st.integers(1, 8192), st.integers(1, 260000), st.sampled_from((2, 4)), st.booleans(),
    st.booleans(), st.integers(0, 2**34),
)  # fmt: skip
def test_saved_rows_fit_their_budget(
    tokens: int, hidden: int, classes: int, itemsize: int, d_input: bool, d_head: bool, budget: int
) -> None:
    sizes: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "classes": classes, "itemsize": itemsize}
    found = chunking.choose_saved_rows(**sizes, d_input=d_input, d_head=d_head, budget=budget)
    assert found.tokens == tokens
    assert found.bytes <= budget
    assert found.rows in (0, tokens) or (
        chunking.LEAST_SAVED_ROWS <= found.rows < tokens and found.rows % chunking.SAVED_ROWS_MULTIPLE == 0
    )
    assert found.bytes >= found.rows * itemsize * (hidden * d_input + classes * d_head)
    more = chunking.choose_saved_rows(**sizes, d_input=d_input, d_head=d_head, budget=2 * budget)
    assert more.rows >= found.rows
    if found.rows < tokens:  # the budget does not hold another tile of rows
        rows = min(max(found.rows + chunking.SAVED_ROWS_MULTIPLE, chunking.LEAST_SAVED_ROWS), tokens)
        whole = chunking.choose_saved_rows(**sizes | {"tokens": rows}, d_input=d_input, d_head=d_head, budget=2**50)
        assert whole.bytes > budget


@pytest.mark.parametrize(("gibibytes", "rows"), [(0, 0), (0.1, 0), (1, 3968), (2.1, 8192), (64, 8192)])
def test_saved_rows_of_a_model(gibibytes: float, rows: int) -> None:
    sizes: dict[str, Any] = {"tokens": 8192, "hidden": 4096, "classes": 128256, "itemsize": 2}
    assert chunking.choose_saved_rows(**sizes, d_input=True, d_head=True, budget=int(gibibytes * 2**30)).rows == rows


# Of cuBLAS, an H100, an A100 and an L40S.
AMPERE_TILES = [choose_ampere_tile(choose_tile(capability, 4096), capability) for capability in (80, 89)]
TILINGS = [
    None,
    choose_d_input_tiling(132, None),
    *(choose_d_input_tiling(many, tile) for many, tile in zip((108, 142), AMPERE_TILES, strict=True)),
]


@st.composite
def scaled_exp_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the arguments of `choose_scaled_exp` except the budget."""
    options = {flag: draw(st.booleans()) for flag in flags(core_triton.tile_config.choose_scaled_exp)}
    options["d_input"] &= options["stores"]
    options["saves"] &= options["stores"]
    return options | {
        "tokens": draw(st.integers(0, 70000)),
        "hidden": 8 * draw(st.integers(1, 1024)),
        "classes": draw(st.integers(1, 260000)),
        "itemsize": 2 if options["stores"] else draw(st.sampled_from((2, 4))),
        "block_v": draw(st.sampled_from((128, 256))),
        "statistics": draw(st.integers(0, 5)),
        "holds": options["holds"] and options["d_input"],
        "tiling": draw(st.sampled_from(TILINGS)),
    }


@st.composite
def recomputed(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the arguments of `choose_recomputed` except the budget."""
    options = {flag: draw(st.booleans()) for flag in flags(core_triton.tile_config.choose_recomputed)}
    itemsize = draw(st.sampled_from((2, 4)))
    return options | {
        "tokens": draw(st.integers(0, 70000)),
        "hidden": 8 * draw(st.integers(1, 1024)),
        "classes": draw(st.integers(1, 260000)),
        "itemsize": itemsize,
        "block_v": draw(st.sampled_from((64, 128, 256))),
        "statistics": draw(st.integers(1, 4)),
        "head_copies": draw(st.integers(0, 2)),
        "float16": options["float16"] and itemsize == 2,
    }


MORE = st.integers(0, 40), st.integers(0, 2**26)  # their product is the number of bytes above the smallest budget


@settings(max_examples=200)
@given(scaled_exp_arguments(), *MORE)
def test_scaled_exp_chunks_cover_and_fit(options: dict[str, Any], times: int, more: int) -> None:
    budget = refusal(core_triton.tile_config.choose_scaled_exp, options) + times * more
    config = core_triton.tile_config.choose_scaled_exp(**options, budget=budget)
    tokens, hidden, classes = max(options["tokens"], 1), options["hidden"], options["classes"]
    assert min(tokens, chunking.MIN_ROWS) <= config.rows <= tokens
    assert config.d_input_rows >= 1
    assert 1 <= config.head_rows <= classes
    assert options["needs_cast"] or config.head_rows == classes
    tails = [min(config.head_rows, classes - start) for start in range(0, classes, config.head_rows)]
    assert config.blocks == sum(-(-tail // options["block_v"]) for tail in tails)
    assert config.scratch >= (1 + options["statistics"]) * config.blocks * config.rows
    held = 0 if options["holds"] and not options["saves"] else options["itemsize"] * hidden * config.rows
    converted = options["itemsize"] * hidden * config.head_rows if options["needs_cast"] else 0
    stored = options["stores"] and not options["saves"]
    exponentials = 2 * config.rows * core_triton.tile_config.padded(classes) if stored else 0
    assert exponentials + held + converted + 4 * config.scratch <= config.bytes <= budget


@settings(max_examples=200)
@given(recomputed(), *MORE)
def test_recomputed_chunks_cover_and_fit(options: dict[str, Any], times: int, more: int) -> None:
    budget = refusal(core_triton.tile_config.choose_recomputed, options) + times * more
    config = core_triton.tile_config.choose_recomputed(**options, budget=budget)
    tokens, classes = max(options["tokens"], 1), options["classes"]
    assert min(tokens, chunking.MIN_ROWS) <= config.rows <= tokens
    assert 1 <= config.vocab_chunk <= classes
    assert config.vocab_chunk <= config.first_vocab_chunk <= classes
    assert not config.float32_sum
    partials = 4 * options["statistics"] * -(-config.first_vocab_chunk // options["block_v"]) * config.rows
    d_logits = (
        options["itemsize"] * config.rows * config.vocab_chunk if options["d_input"] or options["d_weight"] else 0
    )
    d_input = 4 * options["hidden"] * config.rows if options["d_input"] else 0
    copies = options["itemsize"] * options["hidden"] * config.vocab_chunk * options["head_copies"]
    assert partials + d_logits + d_input + copies <= budget


@st.composite
def stored(draw: st.DrawFn, chunked: ModuleType) -> dict[str, Any]:
    """Draws the arguments of `choose_stored` except the budget."""
    choose = chunked.choose_stored
    sizes = {"tokens": (0, 70000), "hidden": (1, 8192), "classes": (1, 260000)}
    return {flag: draw(st.booleans()) for flag in flags(choose)} | {
        name: draw(st.integers(*bounds)) for name, bounds in sizes.items()
    }


@settings(max_examples=200)
@given(stored(core_triton.chunk_config), st.sampled_from((0, 132)), *MORE)
def test_stored_chunks_cover_and_fit(options: dict[str, Any], programs: int, times: int, more: int) -> None:
    least = refusal(core_triton.chunk_config.choose_stored, options | {"programs": programs})
    assert least == refusal(core_triton.chunk_config.choose_stored, options)
    budget = least + times * more
    config, used, waves = core_triton.chunk_config.choose_stored(**options, programs=programs, budget=budget)
    sums = waves * programs * 4 * float32_tiles.BLOCK**2
    assert 0 <= waves <= 3 * (programs > 0)
    alone, *_ = core_triton.chunk_config.choose_stored(**options, budget=budget)
    assert config.keeps_logits == alone.keeps_logits  # sums take no memory that saves a matmul
    if alone.rows < float32_tiles.BLOCK:
        assert (config, used, waves) == (alone, 0, 0)
    else:
        assert used == programs
    assert sums <= budget // 16
    tokens, hidden, classes = max(options["tokens"], 1), options["hidden"], options["classes"]
    assert min(tokens, chunking.MIN_ROWS) <= config.rows <= tokens
    assert 1 <= config.vocab_chunk <= classes
    assert options["stores"] or not config.keeps_logits
    columns = core_triton.tile_config.padded(config.vocab_chunk)
    if config.keeps_logits:
        vocab_chunks, tail = divmod(classes, config.vocab_chunk)
        columns = vocab_chunks * columns + core_triton.tile_config.padded(tail)
    rows = options["second"] + options["copies_rows"] + options["d_input"]
    copies = hidden * (rows * config.rows + options["copies_head"] * config.vocab_chunk)
    assert 4 * (config.rows * columns + copies) + sums <= config.bytes <= budget


@settings(max_examples=200)
@given(stored(jax_pallas.chunk_config), st.integers(0, 2**33))
def test_stored_chunks_of_jax_have_all_classes_and_fit(options: dict[str, Any], budget: int) -> None:
    config = jax_pallas.chunk_config.choose_stored(**options, budget=budget)
    tokens, classes = max(options["tokens"], 1), options["classes"]
    logits = 4 * classes
    if config is None:
        per_row = logits + 4 * options["hidden"] * (1 + 2 * options["d_input"]) + 128
        fixed = jax_pallas.chunk_config.GEMM_WORKSPACE + 64 * tokens + 8 * classes + 4096
        assert fixed + min(tokens, chunking.LEAST_FLOAT32_ROWS) * per_row > budget
        return
    assert (config.vocab_chunk, config.keeps_logits) == (classes, options["stores"])
    assert config.rows == tokens or config.rows % chunking.LEAST_FLOAT32_ROWS == 0
    assert config.rows * logits < config.bytes <= budget


@pytest.mark.parametrize(
    ("tokens", "most", "rows"),
    [
        (8192, 8192, 8192),  # one chunk
        (8192, 1100, 1024),  # 8 chunks
        (8192, 900, 512),  # 10 of 896 rows compute 768 of them twice, 16 of 512 none
        (8192, 400, 256),
        (8192, 128, 128),
        (8192, 127, None),
        (100, 127, 100),
        (100, 99, None),
    ],
)
def test_rows_of_stored_logits_of_jax(tokens: int, most: int, rows: int | None) -> None:
    sizes: dict[str, Any] = {"tokens": tokens, "hidden": 4, "classes": 10, "stores": True, "d_input": False}
    fixed = jax_pallas.chunk_config.GEMM_WORKSPACE + 64 * tokens + 80 + 4096
    config = jax_pallas.chunk_config.choose_stored(**sizes, budget=fixed + (16 + 128 + 40) * most)
    assert (None if config is None else config.rows) == rows


@settings(max_examples=200)
@given(st.data(), st.sampled_from(("choose_scaled_exp", "choose_recomputed")))
def test_a_budget_below_the_smallest_of_the_kernels_is_refused(data: st.DataObject, name: str) -> None:
    choose = getattr(core_triton.tile_config, name)
    options = data.draw(scaled_exp_arguments() if name == "choose_scaled_exp" else recomputed())
    least = refusal(choose, options)
    choose(**options, budget=least)
    with pytest.raises(ValueError, match=f"memory_budget must be at least {least} bytes .* got {least - 1}"):
        choose(**options, budget=least - 1)


@settings(max_examples=200)
@given(st.data(), st.sampled_from(("choose_scaled_exp", "choose_recomputed")), *MORE, st.integers(0, 2**30))
def test_more_budget_gives_the_kernels_no_more_chunks(
    data: st.DataObject, name: str, times: int, more: int, yet_more: int
) -> None:
    choose = getattr(core_triton.tile_config, name)
    options = data.draw(scaled_exp_arguments() if name == "choose_scaled_exp" else recomputed())
    if name == "choose_scaled_exp":
        options |= {"tiling": None, "needs_cast": False}  # split tiles and wide chunks of the head can cost rows
    else:
        options |= dict.fromkeys(flags(choose), False) | {"head_copies": 0}  # wide vocabulary chunks can cost rows too
    budget = refusal(choose, options) + times * more
    tokens = max(options["tokens"], 1)
    chunks = [-(-tokens // choose(**options, budget=size).rows) for size in (budget, budget + yet_more)]
    assert chunks[1] <= chunks[0]


@given(st.integers(1, 3000), st.integers(1, 4000), st.sampled_from((108, 132, 148)), st.booleans())
def test_schedules_divide_all_tiles(tiles: int, iters: int, programs: int, splits_tiles: bool) -> None:
    schedule = core_triton.tile_config.choose_schedule(tiles, iters, programs, splits_tiles=splits_tiles)
    assert schedule.full_waves * programs + schedule.split_tiles == tiles
    assert schedule.split_factor * schedule.split_tiles + schedule.tail_programs <= programs
    assert schedule.split_tiles == 0 or 1 <= schedule.split_factor <= schedule.split_iters <= iters
    if not splits_tiles:
        assert schedule.partial_tiles == 0
    else:  # within 15% of an even division, but for idle programs that are too few, and a part of an iteration
        few = core_triton.tile_config.MIN_TAIL_PROGRAMS
        assert schedule.longest <= 1.15 * tiles * iters / (programs - few) + 2


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("mebibytes", "rows"), [(128, 256), (512, 768), (2048, 3072)])
@pytest.mark.parametrize("tiling", TILINGS[:3])  # an L40S has more programs, whose partial tiles take more memory
def test_models_fit_the_budgets_of_the_kernels(
    shape: tuple[int, int], mebibytes: int, rows: int, tiling: DInputTiling | None
) -> None:
    hidden, classes = shape
    budget = mebibytes * 2**20
    for tokens, statistics in itertools.product((1, 1000, 8192, 65536), (False, True)):
        common: dict[str, Any] = {
            "tokens": tokens,
            "hidden": hidden,
            "classes": classes,
            "itemsize": 2,
            "block_v": 256,
        }
        # Matmuls of fewer rows would leave a GPU idle.
        scaled_exp_options: dict[str, Any] = dict.fromkeys(flags(core_triton.tile_config.choose_scaled_exp), False)
        scaled_exp_options |= common | {"statistics": statistics, "tiling": tiling}
        scaled_exp_options |= dict.fromkeys(("stores", "d_input", "holds"), True)
        plan_a = core_triton.tile_config.choose_scaled_exp(**scaled_exp_options, budget=budget)
        assert plan_a.bytes <= budget
        assert plan_a.rows >= min(tokens, rows) * 0.75
        for gradients in (False, True):
            options: dict[str, Any] = dict.fromkeys(flags(core_triton.tile_config.choose_recomputed), False)
            options |= common | {"statistics": 2 + statistics, "head_copies": 0}
            options |= {"d_input": gradients, "d_weight": gradients}
            plan_c = core_triton.tile_config.choose_recomputed(**options, budget=budget)
            assert plan_c.rows >= min(tokens, 1024)
            assert plan_c.vocab_chunk >= 1024


def test_programs_that_share_tiles_of_float32_matmuls_are_about_whole_waves() -> None:
    sizes = {(768, 896, 151936): 3, (384, 2304, 256000): 7, (768, 4096, 128256): 2, (896, 4096, 128256): 1}
    assert {size: float32_tiles.parts_of(*size, 132, 3) for size in sizes} == sizes
    assert float32_tiles.parts_of(768, 151936, 896, 132, 3) == 1
    assert float32_tiles.parts_of(128, 896, 151936, 132, 0) == 0, "seven programs: a library's GEMM is faster"
