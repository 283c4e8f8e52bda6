"""Tests the comparison of backends: budgets accept rounding errors and catch wrong results, and the command reports
both."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from assertions import expected_of
from quick_cases import QUICK_SHARP, common_names, pairwise_names, quick_parameters, token_loss_names
from token_loss_problem import counted_chunks
from torch import Tensor

import jax_pallas
from core_triton import chunked
from linear_ce.spec import LossSpec
from parity import __main__ as command
from parity import tolerances
from parity.arrays import make_arrays
from parity.backends import BACKENDS, expected_default, obstacle, run_case
from parity.cases import Case, cases, select, sharp_cases
from parity.expected import compare, compare_pair, evaluate_unfused, expected
from parity.report import ROW_FIGURES
from parity.token_losses import FORMS

ROOT = Path(__file__).parents[1]


def used(comparisons: Any) -> str:
    return ", ".join(f"{name} {comparison.percent:.0f}%" for name, comparison in comparisons.items())


# Tolerances.


def test_error_is_relative_to_the_norm() -> None:
    assert tolerances.error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert tolerances.error(np.array([0.0, 0.25]), np.zeros(2)) == 0.25
    assert tolerances.error(np.zeros(0), np.zeros(0)) == 0


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([1.0, np.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, np.nan]),
        ([1.0, np.inf], [1.0, -np.inf]),
        ([1.0, np.inf], [1.0, np.nan]),
    ],
)
def test_nan_or_infinity_out_of_place_is_an_infinite_error(got: list[float], want: list[float]) -> None:
    assert tolerances.error(np.array(got), np.array(want)) == np.inf


def test_nan_and_infinity_in_place_are_no_error() -> None:
    want = np.array([np.nan, np.inf, -np.inf, 4.0])
    assert tolerances.error(want + np.array([0, 0, 0, 1.0]), want) == 0.25


def test_error_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"array must have shape \(2,\), got \(2, 1\)"):
        tolerances.error(np.zeros((2, 1)), np.zeros(2))


def test_row_errors_are_relative_to_the_norm_of_each_row() -> None:
    want = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 1e-3], [6.0, 8.0]])
    got = want + np.array([[0.0, 0.5], [0.0, 7.0], [1e-3, 0.0], [0.0, 0.0]])
    errors = [0.1, 1.0, 0.0]
    assert tolerances.row_errors(got, want) == pytest.approx((np.median(errors), np.percentile(errors, 95)))
    whole = tolerances.row_errors(got.reshape(2, 2, 2), want.reshape(2, 2, 2))
    assert whole == tolerances.row_errors(got, want)
    assert tolerances.row_errors(got, np.zeros((4, 2))) == (0, 0)
    assert np.isnan(tolerances.row_errors(np.full((4, 2), np.nan), want)).all()
    with pytest.raises(ValueError, match=r"array must have shape \(4, 2\), got \(2, 4\)"):
        tolerances.row_errors(got.reshape(2, 4), want)


# Comparison.


# Every pair of options of the tables, every value of those of token losses, sharp and large logits, split heads, and
# every third of the common cases.
HARD = frozenset(name for name in common_names() if "head_split" in name or "logits80" in name)
REORDERED = pairwise_names() | token_loss_names() | QUICK_SHARP | HARD | frozenset(sorted(common_names())[::3])


@pytest.mark.parametrize("case", quick_parameters(REORDERED))
def test_another_order_of_summation_is_within_budget(case: Case) -> None:
    arrays = make_arrays(case)
    rng = np.random.default_rng(0)
    tokens, hidden, classes = rng.permutation(case.n), rng.permutation(case.hidden), np.arange(case.vocab)
    rng.shuffle(classes[: case.classes])
    rank = np.argsort(classes)
    target = arrays["target"].reshape(-1)[tokens].astype(np.int64)
    in_range = (target >= 0) & (target < case.classes) & (target != case.spec.ignore_index)
    # Far from every class, so that no permuted target equals it.
    ignore_index = -(2**40)
    permuted_class = np.where(in_range, rank[target % case.vocab], target)
    permuted = {
        "target": np.where(target == case.spec.ignore_index, ignore_index, permuted_class),
        "input": arrays["input"].reshape(case.n, case.hidden)[tokens][:, hidden],
    }
    permuted["linear_weight"] = arrays["linear_weight"][classes][:, hidden]
    for name in ("linear_bias", "weight"):
        if name in arrays:
            permuted[name] = arrays[name][classes]
    per_token = ("token_weight", "d_loss", "d_log_prob", "d_entropy", "d_lse", *case.per_token)
    for name in per_token:
        if name in arrays:
            whole = name == "d_loss" and case.spec.reduction != "none"
            permuted[name] = arrays[name] if whole else arrays[name].reshape(-1)[tokens]
    if "normalizer" in arrays:
        permuted["normalizer"] = arrays["normalizer"]
    flat = replace(case, lead=(case.n,), spec=replace(case.spec, ignore_index=ignore_index))
    outputs = evaluate_unfused(flat, permuted)
    if "argmax" in outputs:  # a class, and 0 in rows that do not contribute
        counted = (target != case.spec.ignore_index) & (permuted.get("token_weight", np.ones(case.n)) != 0)
        found = outputs["argmax"]
        outputs["argmax"] = np.where(counted & (found >= 0), classes[found], found)
    back = np.argsort(tokens)
    for name, value in outputs.items():
        if name == "d_weight":
            outputs[name] = value[rank][:, np.argsort(hidden)]
        elif name == "d_bias":
            outputs[name] = value[rank]
        elif name == "d_input":
            outputs[name] = value[back][:, np.argsort(hidden)].reshape(arrays["input"].shape)
        elif value.shape == (case.n,):
            outputs[name] = value[back].reshape(case.lead)
    comparisons = compare(case, expected_of(case), outputs)
    assert all(comparison.percent <= 100 for comparison in comparisons.values()), used(comparisons)


# Options to omit, with the values that omit them. Gradients of zero would not show the difference, so edge cases are
# not used.
LEFT_OUT: dict[str, Any] = {
    "label_smoothing": 0.0,
    "z_loss_weight": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
    "vocab_size": None,
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["pairwise", "all"])
@pytest.mark.parametrize("option", [*LEFT_OUT, "linear_bias", "weight", "token_weight", "normalizer", "d_loss"])
def test_an_omitted_option_exceeds_the_budget(option: str, every: bool) -> None:
    seen = 0
    for case in cases():
        if case.name.startswith("edge") or not (every or case.name in pairwise_names()):
            continue
        arrays = make_arrays(case)
        if option in LEFT_OUT:
            if getattr(case.spec, option) == LEFT_OUT[option]:
                continue
            broken, given = replace(case, spec=replace(case.spec, **{option: LEFT_OUT[option]})), arrays
        else:
            if option not in arrays or (option == "d_loss" and case.upstream == "one"):
                continue
            broken, given = case, {name: array for name, array in arrays.items() if name != option}
        outputs = evaluate_unfused(broken, given)
        if option == "linear_bias":
            outputs["d_bias"] = np.zeros(case.vocab)
        comparisons = compare(case, expected_of(case), outputs)
        assert max(comparison.percent for comparison in comparisons.values()) > 200, f"{case.name}: {used(comparisons)}"
        seen += 1
    assert seen > (15 if every else 4)


# Another value of each parameter, where the difference shows.
OTHER_PARAMETERS: dict[str, dict[str, Any]] = {
    "reinforce-k1": {"beta": 0.2, "kl": "k2"},
    "ppo_clip": {"epsilon_low": 0.1, "epsilon_high": 0.2},
    "grpo-k1": {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.1, "kl": "k3"},
    "grpo-k2-entropy": {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.1, "kl": "k1", "entropy_weight": 0.1},
    "grpo-k3": {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.1, "kl": "k2"},
    "cispo": {"epsilon_low": 0.2, "epsilon_high": 0.2},
}


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, parameter) for name, others in OTHER_PARAMETERS.items() for parameter in others]
)
def test_a_wrong_parameter_of_a_token_loss_exceeds_the_budget(
    name: str, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, seen = FORMS[name], 0
    for case in (case for case in cases() if case.name.startswith("token_loss") and case.token_loss == name):
        arrays, want = make_arrays(case), expected_of(case)
        with monkeypatch.context() as scope:
            parameters = {**form.parameters, parameter: OTHER_PARAMETERS[name][parameter]}
            scope.setitem(FORMS, name, form._replace(parameters=parameters))
            comparisons = compare(case, want, evaluate_unfused(case, arrays))
        assert max(comparison.percent for comparison in comparisons.values()) > 200, f"{case.name}: {used(comparisons)}"
        seen += 1
    assert seen >= 3


@pytest.mark.parametrize("name", [f"edge-token_loss-tight-mean-{dtype}" for dtype in ("fp32", "bf16", "fp16")])
def test_token_losses_with_a_tight_budget_run_in_three_chunks(name: str) -> None:
    (case,) = select(name)
    arrays = make_arrays(case)
    with counted_chunks() as chunks:
        run_case("torch-chunked", case, arrays)
    assert chunks.call_count >= 3
    assert chunks_in_jax(case, "chunked") >= 3


@pytest.mark.parametrize("implementation", ["mosaic", "pallas_triton"])
def test_a_token_loss_runs_in_three_chunks_of_scaled_exponentials(implementation: str) -> None:
    (case,) = select("edge-token_loss-hidden64-tight")
    assert chunks_in_jax(case, implementation, path="scaled_exp") >= 3


def chunks_in_jax(case: Case, implementation: str, path: str = "chunked") -> int:
    """Returns the number of chunks of a case in the plan for an H100."""
    x, w = (jnp.zeros(shape, case.dtype) for shape in ((case.n, case.hidden), (case.vocab, case.hidden)))
    options: dict[str, Any] = {"memory_budget": case.memory_budget, "implementation": implementation}
    plan = jax_pallas.explain(x, w, **options, device="h100").plan
    assert plan.path == path
    return math.ceil(case.n / plan.chunks.rows)


def two_bits(exponentials: Tensor) -> Tensor:
    """Rounds numbers to two bits of mantissa after the leading bit."""
    mantissa, exponent = torch.frexp(exponentials)
    return torch.ldexp(torch.round(8 * mantissa) / 8, exponent)


def round_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes "chunked" round the exponentials of d_logits to two bits. lse remains exact, as in the kernels."""
    right = chunked.tile_d_logits

    def d_logits(*arguments: Any) -> Tensor:
        with monkeypatch.context() as scope:
            scope.setattr(Tensor, "exp_", lambda tensor: tensor.copy_(two_bits(tensor.exp())))
            return right(*arguments)

    monkeypatch.setattr(chunked, "tile_d_logits", d_logits)


def round_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes "chunked" round logits to bfloat16, like a loss on materialized bfloat16 logits."""
    right = chunked.logits_tile
    monkeypatch.setattr(chunked, "logits_tile", lambda *arguments: right(*arguments).bfloat16().float())


SHARP = [case for case in sharp_cases() if case.dtype == "bfloat16"]


@pytest.mark.parametrize("case", SHARP, ids=lambda case: case.name)
@pytest.mark.parametrize("broken", [None, round_exponentials, round_logits])
def test_sharp_logits_show_errors_of_the_softmax_part(
    case: Case, broken: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is not None:
        broken(monkeypatch)
    arrays = make_arrays(case)
    comparisons = compare(case, expected(case, arrays), run_case("torch-chunked", case, arrays).outputs)
    rows = {name: comparisons[name].percent for name in ROW_FIGURES}
    if broken is None:
        assert max(rows.values()) <= 100, used(comparisons)
    else:
        assert rows["d_weight_class_median"] > 150, used(comparisons)
        assert rows["d_weight_class_p95"] > 150, used(comparisons)


def test_missing_and_unexpected_outputs_are_refused() -> None:
    case = next(select("edge-frozen_weight-fp32"))
    arrays = make_arrays(case)
    outputs = evaluate_unfused(case, arrays)
    assert "d_weight" not in outputs
    for wrong in (outputs | {"d_weight": arrays["linear_weight"]}, {"loss": outputs["loss"]}):
        with pytest.raises(ValueError, match=r"outputs of edge-frozen_weight-fp32 must be loss, d_input, .*, got loss"):
            compare(case, expected(case, arrays), wrong)


def test_two_backends_within_budget_are_within_twice_of_each_other() -> None:
    case = next(select("edge-target_range-none-fp32"))
    arrays = make_arrays(case)
    want, outputs = expected(case, arrays), evaluate_unfused(case, arrays)
    assert all(comparison.error == 0 for comparison in compare_pair(want, outputs, outputs).values())
    other = outputs | {"loss": np.nan_to_num(outputs["loss"])}
    assert compare_pair(want, outputs, other)["loss"].percent == np.inf


def test_budget_counts_roundings_and_condition() -> None:
    floor = tolerances.GRADIENT_FLOOR["bfloat16"]
    plain = tolerances.budget("d_weight", "bfloat16", 1e-3)
    assert plain == pytest.approx(tolerances.FACTOR * 1e-3 + floor)
    assert tolerances.budget("d_weight", "bfloat16", 1e-3, 3) == pytest.approx(2 * (plain - floor) + floor)
    assert tolerances.budget("loss", "bfloat16", 0.0, 0, 7.0) == 7 * tolerances.FLOAT32_FLOOR


def test_a_sum_that_cancels_is_compared_by_its_terms() -> None:
    case = Case(name="cancels", token_weight="signed", spec=LossSpec("sum"), lead=(2,), hidden=3, vocab=5)
    arrays = make_arrays(case) | {"token_weight": np.array([1, 1], np.float32)}
    arrays["input"][1], arrays["target"][1] = arrays["input"][0], arrays["target"][0]
    plain = expected(case, arrays)["loss"].budget
    arrays["token_weight"] = np.array([1, -0.75], np.float32)
    assert expected(case, arrays)["loss"].budget == pytest.approx(7 * plain, rel=0.5)


# Backends.


def test_unknown_backend_is_refused() -> None:
    case = cases()[0]
    with pytest.raises(ValueError, match=r"backend must be one of 'torch-default', .*, got 'numpy'"):
        run_case("numpy", case, make_arrays(case))


def test_importing_the_contract_imports_no_framework() -> None:
    code = (
        "import sys, parity.__main__, parity.backends, parity.expected\n"
        "found = {'torch', 'jax', 'triton', 'core_triton', 'jax_pallas'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("backend", ["torch-default", "jax-default"])
def test_wrong_dtype_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from parity import backends

    framework = BACKENDS[backend].framework
    case = next(select("edge-one_token-bf16"))
    arrays = make_arrays(case)
    run = backends._RUNNERS[framework](None, case, arrays)
    results = run.results | {"d_input": (run.results["d_input"][0], "float32")}
    monkeypatch.setitem(backends._RUNNERS, framework, lambda *_: run._replace(results=results))
    with pytest.raises(TypeError, match="d_input must be bfloat16, got float32"):
        run_case(backend, case, arrays)


def test_a_default_without_its_kernel_fails_on_a_gpu() -> None:
    case = next(select("edge-one_token-fp32"))
    want = expected(case, make_arrays(case))
    outputs = evaluate_unfused(case, make_arrays(case))
    outcome = {"implementation": "chunked", "platform": "cuda", "outputs": outputs}
    row = command._row(case, "torch-default", want, outcome)
    assert row.failures == [
        "torch-default on edge-one_token-fp32: the default ran 'chunked' on cuda, where 'triton' should run"
    ]
    assert not command._row(case, "torch-default", want, outcome | {"implementation": "triton"}).failures
    assert not command._row(case, "torch-chunked", want, outcome).failures
    assert command._row(case, "torch-chunked", want, outcome | {"implementation": "triton"}).failures
    assert expected_default("jax", "gpu", "bfloat16") == ("mosaic", "pallas_triton")
    assert expected_default("jax", "gpu", "float32") == ("chunked",)
    assert expected_default("jax", "cpu", "bfloat16") == ("chunked",)


# The command.


def run_command(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "parity", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_command_compares_both_frameworks(tmp_path: Path) -> None:
    document = tmp_path / "parity.json"
    done = run_command("--only", "one_token", "--jobs", "2", "--json", str(document))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all within budget" in done.stdout
    assert "PyTorch against JAX" in done.stdout
    written = json.loads(document.read_text())
    names = {case.name for case in select("one_token")}
    assert {row["case"] for row in written["backends"]} == {row["case"] for row in written["pairs"]} == names
    assert {row["backend"] for row in written["backends"]} >= {"torch-default", "jax-default"}
    for row in written["backends"]:
        assert not row["failures"]
        assert all(0 <= output["error"] <= output["budget"] for output in row["outputs"].values())


def test_json_has_a_line_for_each_row() -> None:
    document = {
        "versions": {"numpy": "2.3"},
        "devices": ["cpu"],
        "rows": [{"case": "a", "outputs": {"loss": {"error": None}}}, {"case": "b", "losses": [1.0, 2.0]}],
        "pairs": [],
    }
    text = command.report.to_json(document)
    assert json.loads(text) == document
    assert len(text.splitlines()) == 9
    assert [json.loads(line.strip().rstrip(",")) for line in text.splitlines()[4:6]] == document["rows"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        command.report.to_json({"rows": [{"ms": float("nan")}]}, allow_nan=False)


BROKEN = """
import torch as _torch
from core_triton import linear_ce as _right


class _ReverseGradient(_torch.autograd.Function):
    @staticmethod
    def forward(context, input):
        return input.view_as(input)

    @staticmethod
    def backward(context, gradient):
        return -gradient


def linear_cross_entropy_with_stats(input, *arguments, **options):
    if input.dtype == _torch.float16:
        raise RuntimeError("no such kernel")
    return _right.linear_cross_entropy_with_stats(_ReverseGradient.apply(input), *arguments, **options)
"""


def test_a_broken_copy_fails(tmp_path: Path) -> None:
    for package in ("parity", "core_triton", "linear_ce"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "core_triton" / "__init__.py").open("a") as file:
        file.write(BROKEN)
    done = run_command("--backend", "torch-chunked", "--only", "edge-one_token-fp", folder=tmp_path)
    assert done.returncode == 1
    assert "FAIL torch-chunked on edge-one_token-fp32: d_input has error 2, over its budget of" in done.stdout
    assert "FAIL torch-chunked on edge-one_token-fp16: RuntimeError: no such kernel" in done.stdout
    assert done.stdout.count("<-- FAILS") == 2
    assert done.stdout.count("1 cases, 1 failed") == 2
    assert "all within budget" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "no such case"], "--only must be part of a case's name, got 'no such case'"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--json", "/no/such/x.json"], "--json must be a file in a folder that exists, got /no/such/x.json"),
        (["--json", "/"], "--json must be a file in a folder that exists, got /"),
        (["--commit", "abc"], "--commit goes into the file of --json, which is not given; got 'abc'"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 1
    assert capsys.readouterr().err == message + "\n"


def test_a_missing_framework_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "installed", lambda framework: framework == "torch")
    assert command._available(None) == ["torch-default", "torch-chunked"]
    assert "JAX is not installed: its backends are left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--backend jax-chunked needs JAX, which is not installed"):
        command._available(["jax-chunked"])
    monkeypatch.setattr(command, "installed", lambda framework: False)
    assert command.main([]) == 1
    assert "nothing to run: neither PyTorch nor JAX is installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch-triton", "implementation 'triton' cannot serve this call: no kernel for cpu devices"),
        ("torch-triton_sm80", "implementation 'triton_sm80' cannot serve this call: no kernel for cpu devices"),
        ("jax-mosaic", "the Hopper kernels need an NVIDIA GPU, not a cpu device"),
        ("jax-pallas_triton", ""),  # runs on a CPU in interpret mode
        ("torch-chunked", ""),
        ("jax-default", ""),
    ],
)
def test_a_backend_that_the_machine_does_not_support_is_reported(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert obstacle(name).endswith(reason)
    assert bool(obstacle(name)) == bool(reason)


def test_a_backend_that_the_machine_does_not_support_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = json.dumps({"backend": "torch-triton", "obstacle": "no GPU"})
    process = subprocess.Popen([sys.executable, "-c", f"print({line!r})"], stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(command.subprocess, "Popen", lambda *_, **__: process)
    worker = command._Worker(["torch-triton"], tmp_path, 0, command._parse(["--backend", "torch-triton"]))
    with pytest.raises(SystemExit, match="--backend torch-triton: no GPU"):
        worker.outcome(cases()[0], "torch-triton")
    worker.stop()


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupted)
    monkeypatch.setattr(command.training, "main", interrupted)
    assert command.main([]) == 130
    assert command.main(["train"]) == 130


def test_an_unknown_backend_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--backend", "numpy"])
    message = capsys.readouterr().err
    assert "invalid choice: 'numpy'" in message
    assert all(name in message for name in BACKENDS)


def test_one_row_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(name="tiny", lead=(4,), hidden=3, vocab=5, spec=LossSpec("sum"))
    arrays = make_arrays(case)
    outcome = {"implementation": "chunked", "platform": "cpu", "outputs": evaluate_unfused(case, arrays)}
    row = command._row(case, "torch-default", expected(case, arrays), outcome)
    line = command.report.line(row)
    assert line.startswith("torch-default  fp32  chunked")
    assert line.endswith("  tiny")
    assert len(command.report.header()) == len(line)
    assert line.count("%") == 5  # loss, lse, d_input, d_weight, and the worst of the others
