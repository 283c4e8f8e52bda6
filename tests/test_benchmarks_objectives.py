"""The benchmark modes of objectives other than the mean cross-entropy, on a CPU."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import core_triton
from benchmarks import data, jax_bench, jax_methods, jax_programs, linear_ce, objectives_table, tables, torch_methods
from benchmarks.methods import Method
from benchmarks.page_tables import Place
from benchmarks.results import RECORDED
from benchmarks.shapes import MODES, OBJECTIVE_MODES, OBJECTIVE_SHAPES, SHAPES, Mode, Objective, plan
from linear_ce.reference import reference_loss, reference_token_loss
from linear_ce.spec import LossSpec
from parity.token_losses import Values, grpo


def run(framework: str, folder: Path, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs the command on the smoke shape. Returns the rows of its file by mode and method."""
    file = folder / f"{framework}.json"
    common = ["--framework", framework, "--device", "cpu", "--shapes", "smoke", "--seconds", "0", "--pairs", "2"]
    linear_ce.main([*common, "--json", str(file), *arguments])
    return {(row["mode"], row["method"]): row for row in json.loads(file.read_text())["rows"]}


@pytest.mark.parametrize(
    ("framework", "methods"),
    [
        ("torch", ("floor", "chunked", "eager", "eager-float32-logits")),
        ("jax", ("floor", "chunked", "bf16-logits", "gradient-scan")),
    ],
)
def test_every_objective_runs_end_to_end(framework: str, methods: tuple[str, ...], tmp_path: Path) -> None:
    modes = [name for name, mode in OBJECTIVE_MODES.items() if mode.memory_budget is None]
    rows = run(framework, tmp_path, "--modes", *modes, "--methods", *methods)
    assert len(rows) == len(modes) * len(methods) - 2  # two methods have no float32 head
    for (mode, method), row in rows.items():
        if method == "gradient-scan" and mode.startswith("log-probs"):
            assert row["status"] == "skipped"
            continue
        assert row["status"] == "ok", row["note"]
        if method == "floor":
            continue
        assert row["repeats"]
        assert row["err_loss"] < (1e-5 if mode == "float32-head" else 5e-3)
        # Logits that are rounded to bfloat16 change the factors of rows too.
        bound = 5e-3 if method == "chunked" else 2e-2
        assert all(5e-4 < row[name] < bound for name in ("err_d_input", "err_d_weight"))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_references_equal_those_in_float64(framework: str) -> None:
    problem: Any = linear_ce.open_bench(framework, "cpu").problem(SHAPES["smoke"], "float32", "peaked")
    x, y, upstream = (
        np.asarray(array, dtype)
        for array, dtype in zip((problem.input, problem.target, problem.upstream), "did", strict=True)
    )

    parameters: dict[str, Any] = {"epsilon_low": data.EPSILON_LOW, "epsilon_high": data.EPSILON_HIGH}
    token_loss = partial(grpo, **parameters, beta=data.BETA, kl="k3")

    def identity(p: np.ndarray) -> Values:
        return p, (np.ones_like(p),)

    for mode in OBJECTIVE_MODES.values():
        w = np.asarray(problem.head(mode), "d")
        objective, reduction = mode.objective, mode.reduction
        assert reduction in ("mean", "none")
        spec = LossSpec(reduction, label_smoothing=objective.label_smoothing, logit_scale=objective.logit_scale)
        per_token = [np.asarray(array, "d") for array in problem.per_token(objective)]
        d_loss = upstream if reduction == "none" else None
        if objective.name == "cross-entropy":
            expected = reference_loss(x, w, y, spec=spec)
        else:
            function = token_loss if objective.name == "token-loss" else identity
            expected = reference_token_loss(x, w, y, function, *per_token, spec=spec, d_loss=d_loss)
        found = problem.reference(mode)
        losses, d_input, d_weight = (found.losses, found.d_input, found.d_weight) if framework == "torch" else found
        loss = np.asarray(losses) if reduction == "none" else np.asarray(losses).mean()
        np.testing.assert_allclose(loss, expected.loss, rtol=1e-5, atol=1e-6)
        for gradient, exact in ((d_input, expected.d_input), (d_weight, expected.d_weight)):
            assert np.linalg.norm(np.asarray(gradient) - exact) < 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_float32_head_rounds_to_the_weight(framework: str) -> None:
    problem: Any = linear_ce.open_bench(framework, "cpu").problem(SHAPES["smoke"], "bfloat16", "peaked")
    head, weight = problem.head(OBJECTIVE_MODES["float32-head"]), problem.weight
    low = np.asarray(head, "d") - np.asarray(weight.float() if framework == "torch" else weight, "d")
    rounded = head.bfloat16() if framework == "torch" else head.astype(jnp.bfloat16)
    assert bool((rounded == weight).all())
    assert (low != 0).mean() > 0.99


def of_torch(name: str, change: Callable[[Mode], Mode]) -> Method:
    build = torch_methods.METHODS["eager"].build
    return replace(torch_methods.METHODS["eager"], name=name, build=lambda mode: build(change(mode)))


def of_jax(name: str, change: Callable[[Mode], Mode]) -> Method:
    build = jax_methods.METHODS["bf16-logits"].build
    return replace(jax_methods.METHODS["bf16-logits"], name=name, build=lambda mode: build(change(mode)))


@pytest.mark.parametrize(
    ("framework", "methods", "wrong"), [("torch", torch_methods, of_torch), ("jax", jax_methods, of_jax)]
)
def test_wrong_objectives_are_found(
    framework: str, methods: Any, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(**options: Any) -> Callable[[Mode], Mode]:
        return lambda mode: replace(mode, objective=replace(mode.objective, **options))

    changed = [wrong("temperature-1", without(temperature=1.0)), wrong("no-smoothing", without(label_smoothing=0.0))]
    monkeypatch.setattr(methods, "METHODS", {method.name: method for method in changed})
    rows = run(framework, tmp_path, "--modes", *OBJECTIVE_MODES)
    for mode in ("token-loss", "log-probs"):
        assert rows[mode, "temperature-1"]["status"] == "failed"
        assert rows[mode, "no-smoothing"]["status"] == "ok"
    assert rows["smoothing", "no-smoothing"]["status"] == "failed"
    assert rows["smoothing", "temperature-1"]["status"] == "ok"


@pytest.mark.parametrize(
    ("dtype", "epsilon_low", "epsilon_high", "beta"),
    [
        ("bfloat16", 0.9, data.EPSILON_HIGH, data.BETA),
        ("bfloat16", data.EPSILON_LOW, 9.0, data.BETA),
        ("float32", data.EPSILON_LOW, data.EPSILON_HIGH, 0.05),  # the divergence is 1% of the gradients
    ],
)
def test_wrong_parameters_of_the_token_loss_are_found(
    dtype: str,
    epsilon_low: float,
    epsilon_high: float,
    beta: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(mode: Mode) -> Any:
        token_loss = core_triton.token_losses.grpo(epsilon_low, epsilon_high, beta)
        scale = mode.objective.logit_scale
        return lambda x, w, y, *arrays: core_triton.linear_token_loss(x, w, y, token_loss, *arrays, logit_scale=scale)

    method = Method("other", "peer", build, objectives=("token-loss",))
    monkeypatch.setattr(torch_methods, "METHODS", {"other": method})
    row = run("torch", tmp_path, "--modes", "token-loss", "--dtype", dtype)["token-loss", "other"]
    assert row["status"] == "failed"
    assert "above the sanity bound" in row["note"]


def test_some_tokens_are_clipped_on_each_side_and_none_is_near_a_bound() -> None:
    log_prob = -np.random.default_rng(1).exponential(5, 8192).astype(np.float32)
    drawn = data.per_token(log_prob)
    for array, again in zip(drawn, data.per_token(log_prob), strict=True):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, again)
    log_ratio = log_prob - drawn.old_log_prob
    for sign, bound in ((1, math.log(1 + data.EPSILON_HIGH)), (-1, math.log(1 - data.EPSILON_LOW))):
        beyond = sign * (log_ratio - bound) > 0
        clipped = beyond & (sign * drawn.advantage > 0)
        assert beyond.mean() == pytest.approx(data.CLIP_SHARE, abs=0.02)
        assert clipped.mean() == pytest.approx(data.CLIP_SHARE / 2, abs=0.01)
        assert abs(log_ratio - bound).min() > data.CLIP_MARGIN - 1e-4
    assert (log_prob - drawn.ref_log_prob).std() == pytest.approx(data.REF_DEVIATION, rel=0.05)


class SimilarToLiger:
    """`LigerFusedLinearGRPOLoss` of liger-kernel 0.8.5: the same arguments, shapes and reduction ("dapo")."""

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
    ) -> None:
        self.formula = core_triton.token_losses.grpo(epsilon_low, epsilon_high, beta)
        self.temperature = temperature

    def __call__(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert ref_per_token_logps is not None
        assert old_per_token_logps is not None
        sequences, length, _ = _input.shape
        assert advantages.shape == (sequences,)
        of_tokens = selected_token_ids, attention_mask, ref_per_token_logps, old_per_token_logps
        assert all(array.shape == (sequences, length) for array in of_tokens)
        logits = (_input @ lin_weight.T).float() / self.temperature
        log_prob = logits.log_softmax(-1).gather(-1, selected_token_ids[..., None])[..., 0]
        loss = self.formula(log_prob, advantages[:, None], old_per_token_logps, ref_per_token_logps)
        return (loss * attention_mask).sum() / attention_mask.sum(), ()


class SimilarToTrl:
    """`ChunkedLogProbFunction` of trl 1.16."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy",),
    ) -> tuple[Tensor | None, ...]:
        assert (bias, chunk_size, final_logit_softcapping, logit_scale, outputs) == (None, 32768, None, 1.0, ())
        return log_probs(hidden, weight, targets, temperature), None, None, None, None


def similar_to_verl(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, reduction: str, /
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` of verl 0.9.1, which takes no keywords."""
    assert reduction == "none"
    found = log_probs(hidden, weight, labels, temperature)
    return found, torch.zeros_like(found)


def log_probs(x: Tensor, w: Tensor, y: Tensor, temperature: float) -> Tensor:
    return ((x @ w.T).float() / temperature).log_softmax(-1).gather(-1, y[:, None])[:, 0]


def test_other_libraries_are_called_with_their_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "liger_kernel.chunked_loss": SimpleNamespace(LigerFusedLinearGRPOLoss=SimilarToLiger),
        "trl.trainer.utils": SimpleNamespace(_CHUNKED_LOGPROB_CHUNK_SIZE=32768),
        "trl.kernels": SimpleNamespace(ChunkedLogProbFunction=SimilarToTrl),
        "verl.utils.kernel.linear_cross_entropy": SimpleNamespace(linear_cross_entropy=similar_to_verl),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    names = "trl", "verl", "liger-grpo"
    rows = run("torch", tmp_path, "--modes", "token-loss", "log-probs", "--methods", *names)
    expected = {("token-loss", name) for name in names} | {("log-probs", name) for name in names[:2]}
    assert {key: row["note"] for key, row in rows.items() if row["status"] == "ok"} == dict.fromkeys(expected)
    assert set(rows) == expected


def test_methods_are_left_out_of_the_modes_of_other_objectives() -> None:
    methods = torch_methods.METHODS
    assert not methods["trl"].applies(MODES["train"])
    assert not methods["cut-cross-entropy"].applies(OBJECTIVE_MODES["token-loss"])
    for name in ("floor", "triton"):
        assert all(methods[name].applies(mode) for mode in OBJECTIVE_MODES.values())
    without_eager = [name for name, mode in OBJECTIVE_MODES.items() if not methods["eager"].applies(mode)]
    assert without_eager == ["token-loss-200", "log-probs-200", "float32-head"]
    items = plan(modes=list(OBJECTIVE_MODES))
    assert {shape.name for shape, _, _ in items} == set(OBJECTIVE_SHAPES)
    assert len(items) == len(OBJECTIVE_MODES) * len(OBJECTIVE_SHAPES)
    assert [Objective("token-loss").per_token, Objective().per_token] == [data.PerToken._fields, ()]


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", False)])
def test_matmuls_of_float32_arrays_are_not_in_tf32(dtype: str, exact: bool) -> None:
    x, w, d_logits = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((8, 4), (16, 4), (8, 16)))
    floor = jax_bench._matmuls.lower(x, w, d_logits, d_input=True, d_weight=True).as_text()
    method, y = jax_methods.METHODS["bf16-logits"], jax.ShapeDtypeStruct((8,), jnp.int32)
    call = jax_programs.jitted_call(method, MODES["train"]).lower(x, w, y, None).as_text()
    for text in (floor, call):
        assert text.count("dot_general") == 3
        assert text.count("HIGHEST") == (6 if exact else 0)  # of both operands


def test_tables_mark_the_ratios_above_their_bar(tmp_path: Path) -> None:
    kept = {"dtype": "bfloat16", "status": "ok", "ratio_p20": 1.0, "ratio_p80": 2.0, "ms": 10.0, "pairs": 12}

    def row(mode: str, method: str, shape: str, ratio: float, **others: Any) -> dict[str, Any]:
        return {
            **kept,
            "mode": mode,
            "method": method,
            "shape": shape,
            "ratio": ratio,
            "commit": "0123456789",
            **others,
        }

    rows = {
        ("h200", "torch"): [
            row("log-probs", "triton", "llama3-8b", 1.38),
            row("log-probs", "triton", "qwen2.5-0.5b", 1.4504),  # above its bar before it is rounded
            row("log-probs", "trl", "llama3-8b", 1.5),
            row("log-probs", "triton", "qwen3-8b", 3.0, status="failed"),
            row("log-probs-saved", "trl", "llama3-8b", 1.5),
            row("train", "eager", "llama3-8b", 1.5, dtype="float16", commit=f"{objectives_table.OLD_FLOOR}01"),
        ],
        ("h100", "jax"): [
            row("log-probs", "mosaic", "gemma2-2b", 1.4),
            row("log-probs-200", "mosaic", "qwen3-8b", 2.0),
        ],
    }
    for gpu, framework in product(objectives_table.GPUS, ("torch", "jax")):
        file = tmp_path / gpu / f"{framework}-objectives.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"rows": rows.get((gpu, framework), [])}))
    found = objectives_table.objective_tables(tmp_path)
    bars = "1.38; Qwen2.5-0.5B: 1.45"
    assert found[objectives_table.PLACE][2:] == [
        f"| log-probabilities, core_triton | {bars} | 1.380 / - | **1.450** / - | - | - |",
        f"| log-probabilities, jax_pallas | {bars} | - | - | - / **1.400** | - |",
        "| log-probabilities, trl |  | 1.50 / - | - | - | - |",
        "| log-probabilities in 200 MiB, jax_pallas | - | - | - | - | - / 2.000 |",
        "| float16, eager |  | 1.50 (*) / - | - | - | - |",
    ]
    assert [found[place][2:] for place in objectives_table.MISSED.values()] == [
        ["| log-probabilities | core_triton | Qwen2.5-0.5B | 1.45 | 1.450 (1.000 to 2.000) | 10.00 | 12 | 0123456 |"],
        ["| log-probabilities | jax_pallas | Gemma 2 2B | 1.38 | 1.400 (1.000 to 2.000) | 10.00 | 12 | 0123456 |"],
    ]


def test_the_pages_have_the_tables_of_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    for place, lines in objectives_table.objective_tables(RECORDED.parent).items():
        text = place.page.read_text()
        assert place.filled(text, lines) == text
    with pytest.raises(SystemExit):
        tables.main(["--objectives", "--json", "rows.json"])
    assert "--json must be absent, got rows.json" in capsys.readouterr().err
    for options in ([], ["--hosts"], ["--mesh"]):
        with pytest.raises(SystemExit):
            tables.main([*options, "--json", "absent.json"])
        assert "error: --json must name files of results, got absent.json\n" in capsys.readouterr().err


def test_the_command_writes_the_tables_of_objectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    place = Place(page, "objectives")
    page.write_text(f"{place.begin}\nold\n{place.end}\n")
    monkeypatch.setattr(objectives_table, "objective_tables", lambda results: {place: [str(results.name)]})
    tables.main(["--objectives"])
    assert page.read_text() == f"{place.begin}\n\nresults\n\n{place.end}\n"
    assert capsys.readouterr().out == "results\n\n"
