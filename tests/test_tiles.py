"""The choice of chunks, for both frameworks: pure functions, so what they promise is tested over drawn shapes and the
shapes of models."""

import itertools
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import core_triton.tiles
import jax_pallas.tiles
from parity.spec import DEFAULT_MEMORY_BUDGET

TILES = (core_triton.tiles, jax_pallas.tiles)
MODELS = {"Llama-3 8B": (4096, 128256), "Qwen2.5-0.5B": (896, 151936), "Gemma-2 2B": (2304, 256000)}  # D, V


def workspace_model(tiles: ModuleType, **options: Any) -> Any:
    if tiles is not core_triton.tiles:
        del options["upcasts"]  # JAX has products of 16-bit operands on every device
    return tiles.workspace_model(**options)


class Drawn(NamedTuple):
    """A choice to be made: `keeping` and `recomputing` are the two forms of plan A."""

    tiles: ModuleType
    keeping: Any
    recomputing: Any
    tokens: int
    classes: int
    budget: int  # at least the least of `recomputing`

    @property
    def least(self) -> int:
        rows, slab = min(max(self.tokens, 1), self.tiles.MIN_ROWS), min(self.classes, self.tiles.MIN_SLAB)
        return self.recomputing.bytes(rows, slab)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    tiles = draw(st.sampled_from(TILES))
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
    keeping, recomputing = (workspace_model(tiles, **options, keeps_logits=keeps) for keeps in (True, False))
    problem = Drawn(tiles, keeping, recomputing, tokens, classes, 0)
    return problem._replace(budget=problem.least + draw(st.integers(0, 40)) * draw(st.integers(1, 2**26)))


@given(drawn())
def test_choice_covers_and_fits(p: Drawn) -> None:
    chosen = p.tiles.choose_chunks(p.recomputing, p.tokens, p.classes, p.budget)
    plan_a = p.tiles.choose_plan_a(p.keeping, p.recomputing, p.tokens, p.classes, p.budget)
    assert not chosen.keeps_logits
    for config, model in ((chosen, p.recomputing), (plan_a, p.keeping if plan_a.keeps_logits else p.recomputing)):
        assert min(max(p.tokens, 1), p.tiles.MIN_ROWS) <= config.rows <= max(p.tokens, 1)
        assert 1 <= config.slab <= p.classes
        assert model.bytes(config.rows, config.slab) + config.float32_sum * model.float32_sum <= p.budget
        assert not config.float32_sum or 0 < model.float32_sum <= p.budget // 2


@given(drawn())
def test_less_than_the_least_is_refused(p: Drawn) -> None:
    p.tiles.choose_chunks(p.recomputing, p.tokens, p.classes, p.least)
    p.tiles.choose_plan_a(p.keeping, p.recomputing, p.tokens, p.classes, p.least)
    message = f"memory_budget must be at least {p.least} bytes .* got {p.least - 1}"
    with pytest.raises(ValueError, match=message):
        p.tiles.choose_chunks(p.recomputing, p.tokens, p.classes, p.least - 1)
    with pytest.raises(ValueError, match=message):
        p.tiles.choose_plan_a(p.keeping, p.recomputing, p.tokens, p.classes, p.least - 1)


@given(drawn(), st.integers(1, 2**30))
def test_more_budget_holds_no_fewer_rows(p: Drawn, more: int) -> None:
    slab = min(p.classes, p.tiles.MIN_SLAB)
    assert p.recomputing.rows_within(p.budget + more, slab) >= p.recomputing.rows_within(p.budget, slab)


@given(drawn())
def test_a_wider_slab_leaves_no_more_rows(p: Drawn) -> None:
    rows = [p.recomputing.rows_within(p.budget, slab) for slab in range(1, min(p.classes, 50))]
    assert rows == sorted(rows, reverse=True)


@given(drawn())
def test_rows_within_are_the_most_that_fit(p: Drawn) -> None:
    slab = min(p.classes, p.tiles.MIN_SLAB)
    rows = p.recomputing.rows_within(p.budget, slab)
    assert p.recomputing.bytes(rows, slab) <= p.budget < p.recomputing.bytes(rows + 1, slab)


@given(drawn())
def test_what_fits_whole_is_not_cut(p: Drawn) -> None:
    tokens = max(p.tokens, 1)
    budget = p.keeping.bytes(tokens, p.classes)
    config = p.tiles.choose_plan_a(p.keeping, p.recomputing, tokens, p.classes, budget)
    assert config == p.tiles.ChunkConfig(tokens, p.classes, float32_sum=False, keeps_logits=True)


@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: tiles.__name__)
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_models_fit_the_default_budget(tiles: ModuleType, shape: tuple[int, int], itemsize: int) -> None:
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
        keeping, recomputing = (workspace_model(tiles, **options, keeps_logits=keeps) for keeps in (True, False))
        sizes = (tokens, classes, DEFAULT_MEMORY_BUDGET)
        for config in (tiles.choose_chunks(recomputing, *sizes), tiles.choose_plan_a(keeping, recomputing, *sizes)):
            model = keeping if config.keeps_logits else recomputing
            assert model.bytes(config.rows, config.slab) <= DEFAULT_MEMORY_BUDGET
            # Products of fewer rows or classes would leave a GPU idle.
            assert config.rows >= min(tokens, 256)
            assert config.slab >= 512
