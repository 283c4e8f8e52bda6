"""Tests `python -m parity train`: the four curves agree, and the command catches and reports a change in one
framework."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity import __main__ as parity_command
from parity.train import command, compare, jax_run, process, torch_run
from parity.train.problem import (
    IGNORED,
    Problem,
    Setup,
    is_decayed,
    learning_rate,
    load,
    make_problem,
    parameter_shapes,
    save,
)
from parity.train.run import CURVES, Run

ROOT = Path(__file__).parents[1]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "parity", "train", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
    )


def check_agreement(done: subprocess.CompletedProcess[str], document: Path, steps: int) -> dict[str, Any]:
    """Checks the output of a successful command. Returns the document that it wrote."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("all four curves agree within 1e-05 at each step; fused: torch by ")
    assert "FAIL" not in done.stdout
    start = lines.index(f"{'step':>5}{''.join(f'{name:>15}' for name in CURVES)}{'difference':>13}") + 1
    rows = np.array([line.split() for line in lines[start : start + steps]], float)
    assert np.array_equal(rows[:, 0], np.arange(1, steps + 1))
    assert rows[:, 5].max() <= 1e-5
    written = json.loads(document.read_text())
    losses = np.array([written["curves"][name]["losses"] for name in CURVES])  # (4, steps)
    np.testing.assert_allclose(losses.T, rows[:, 1:5], atol=1e-7)
    assert np.all(np.ptp(losses, axis=0) <= 1e-5 * losses.max(axis=0))
    assert len(written["pairs"]) == 6
    return written


# The command, end to end.


def test_the_command_trains_in_both_frameworks(tmp_path: Path) -> None:
    document, picture = tmp_path / "train.json", tmp_path / "train.png"
    done = run_command("--steps", "7", "--json", str(document), "--plot", str(picture))
    written = check_agreement(done, document, steps=7)
    losses = written["curves"]["torch-fused"]["losses"]
    assert losses[-1] < losses[0] - 1  # it learns
    ran = {name: (curve["implementation"], curve["platform"]) for name, curve in written["curves"].items()}
    assert ran["torch-unfused"][0] == ran["jax-unfused"][0] == "cross_entropy"
    assert ran["torch-fused"] in (("chunked", "cpu"), ("triton", "cuda"))
    assert ran["jax-fused"] in (("chunked", "cpu"), ("pallas_triton", "gpu"))
    assert f"fused: torch by {ran['torch-fused'][0]} on " in done.stdout
    assert f", jax by {ran['jax-fused'][0]} on " in done.stdout
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--tied", "--seed", "1")], ids=["untied", "tied"])
def test_fifty_steps_agree(options: tuple[str, ...], tmp_path: Path) -> None:
    document = tmp_path / "train.json"
    written = check_agreement(run_command(*options, "--json", str(document)), document, steps=50)
    losses = written["curves"]["jax-fused"]["losses"]
    assert np.mean(losses[-5:]) < 0.35 * losses[0]


# Changes in one framework.


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(Setup(steps=7))


@pytest.fixture(scope="module")
def trained(problem: Problem) -> Run:
    """A JAX run with the fused loss."""
    return jax_run.train(problem, fused=True)


def found(torch_problem: Problem, trained: Run) -> list[str]:
    return compare.failures({"torch-fused": torch_run.train(torch_problem, fused=True), "jax-fused": trained})


def test_the_same_problem_agrees(problem: Problem, trained: Run) -> None:
    assert not found(problem, trained)
    assert trained.losses[-1] < trained.losses[0] - 1


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.999 * Setup.learning_rate},
        {"warmup_steps": Setup.warmup_steps - 1},
        {"rms_norm_eps": 10 * Setup.rms_norm_eps},
        {"adam_eps": 2 * Setup.adam_eps},
        {"beta1": 0.89},
        {"beta2": 0.96},
        {"weight_decay": 0.0},
        {"clip_norm": 2 * Setup.clip_norm},
        {"rope_theta": 1.1 * Setup.rope_theta},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_different_setting_in_one_framework_is_caught(change: dict[str, Any], problem: Problem, trained: Run) -> None:
    (failure,) = found(problem._replace(setup=replace(problem.setup, **change)), trained)
    assert failure.startswith("torch-fused and jax-fused differ by ")
    assert "over 1e-05 from step " in failure


def test_a_gradient_of_the_wrong_sign_is_caught(
    problem: Problem, trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import core_triton

    right = core_triton.linear_cross_entropy

    def reversed_gradient(*arguments: Any, **options: Any) -> Any:
        loss = right(*arguments, **options)
        return 2 * loss.detach() - loss  # the value does not change

    monkeypatch.setattr(core_triton, "linear_cross_entropy", reversed_gradient)
    (failure,) = found(problem, trained)
    assert failure.endswith("over 1e-05 from step 2 on")  # the first loss does not depend on gradients


def test_another_rotation_is_caught(problem: Problem, trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_run._rotate
    monkeypatch.setattr(torch_run, "_rotate", lambda x, theta: right(x.flip(-1), theta).flip(-1))  # rotates backward
    (failure,) = found(problem, trained)
    assert failure.endswith("over 1e-05 from step 1 on")


def test_decay_of_the_norms_is_caught(problem: Problem, trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_run, "is_decayed", lambda name: True)
    assert len(found(problem, trained)) == 1


def test_a_decoder_with_other_parameters_is_refused(problem: Problem) -> None:
    weights = {name: weight for name, weight in problem.weights.items() if name != "head"}
    weights["final_norm.scale"] = weights["final_norm.scale"][1:]
    with pytest.raises(
        ValueError, match=r"must have the problem's parameters, but they differ in final_norm.scale, head"
    ):
        jax_run.train(problem._replace(weights=weights), fused=True)


# Failures.


def run_of(losses: list[float], implementation: str = "chunked", platform: str = "cpu") -> Run:
    return Run(losses, implementation, platform, platform, 1.0)


def test_differences_are_relative_and_catch_what_is_not_finite() -> None:
    runs = {"torch-fused": run_of([2.0, 4.0, np.nan]), "jax-fused": run_of([2.0, 5.0, np.nan])}
    (difference,) = compare.differences(runs)
    np.testing.assert_array_equal(difference.relative, [0.0, 0.2, np.inf])
    assert (difference.largest, difference.step) == (np.inf, 3)
    assert compare.failures(runs) == ["torch-fused and jax-fused differ by inf at step 3, over 1e-05 from step 2 on"]
    rows = compare.table(runs)
    assert [row.endswith("<-- FAILS") for row in rows] == [False, False, True, True]


def test_a_loss_without_its_kernel_fails_on_a_gpu() -> None:
    wrong = run_of([1.0], "chunked", "cuda")
    assert compare.failures({"torch-fused": wrong}) == ["torch-fused: ran 'chunked' on cuda instead of 'triton'"]
    assert compare.line("torch-fused", wrong).endswith("<-- FAILS")
    assert not compare.failures({"torch-fused": run_of([1.0], "triton", "cuda")})
    assert compare.failures({"jax-fused": run_of([1.0], "chunked", "gpu")})
    assert not compare.failures({"jax-fused": run_of([1.0], "pallas_triton", "gpu")})
    assert not compare.failures({"torch-unfused": run_of([1.0], "cross_entropy", "cuda")})


def test_failures_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outcomes: dict[str, Run | str] = {name: run_of([3.0, 2.0]) for name in CURVES}
    outcomes |= {"torch-fused": "RuntimeError: no such kernel", "jax-unfused": run_of([3.0, np.nan])}

    def fake(problem: Problem, folder: Path) -> Iterator[tuple[str, Run | str]]:
        yield from outcomes.items()

    monkeypatch.setattr(command, "run_all", fake)
    document, picture = tmp_path / "train.json", tmp_path / "train.png"
    assert command.main(["--steps", "2", "--json", str(document), "--plot", str(picture)]) == 1
    printed = capsys.readouterr().out
    assert "FAIL torch-fused: RuntimeError: no such kernel" in printed
    assert "FAIL jax-fused and jax-unfused differ by inf at step 2, over 1e-05 from step 2 on" in printed
    assert "agree" not in printed
    written = json.loads(document.read_text())
    assert written["curves"]["jax-unfused"]["losses"] == [3.0, None]
    assert written["pairs"][-1] == {"pair": ["jax-fused", "jax-unfused"], "largest": None, "step": 2}
    assert len(written["failures"]) == 3
    assert picture.exists()


def test_a_failing_run_leaves_the_other_curve(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import core_triton

    def no_kernel(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(core_triton, "linear_cross_entropy", no_kernel)
    save(problem, tmp_path / "problem.npz")
    process.main(["torch", "--folder", str(tmp_path)])
    fused, unfused = map(json.loads, capsys.readouterr().out.splitlines())
    assert fused == {"curve": "torch-fused", "failure": "RuntimeError: no such kernel"}
    assert (unfused["curve"], unfused["implementation"]) == ("torch-unfused", "cross_entropy")
    with np.load(tmp_path / "torch-unfused.npz") as file:
        assert file["losses"].shape == (7,)


def test_a_process_that_ends_early_fails_its_curves(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert dict(process.run_all(problem, tmp_path)) == dict.fromkeys(CURVES, "its process ended with status 1")


# Options.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps must be at least 2, got 1"),
        (["--seed", "-1"], "--seed must not be negative, got -1"),
        (["--json", "/no/such/x.json"], "--json must be a file in a folder that exists, got /no/such/x.json"),
        (["--plot", "losses.pdf"], "--plot must end in .png, got losses.pdf"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity_command.main(["train", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err == message + "\n"
    assert not captured.out


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "installed", lambda package: package not in ("flax", "matplotlib"))
    assert command.main([]) == 1
    assert capsys.readouterr().err == "training needs PyTorch, JAX, Flax, Optax; not installed: Flax\n"
    assert command.main(["--plot", "losses.png"]) == 1
    assert capsys.readouterr().err == "--plot needs Matplotlib, which is not installed\n"


# The problem.


def test_a_problem_repeats_and_survives_its_file(problem: Problem, tmp_path: Path) -> None:
    save(problem, tmp_path / "problem.npz")
    for other in (make_problem(problem.setup), load(tmp_path / "problem.npz")):
        assert other.setup == problem.setup
        assert other.weights.keys() == problem.weights.keys()
        for name, weight in other.weights.items():
            assert weight.dtype == np.float32
            np.testing.assert_array_equal(weight, problem.weights[name])
        np.testing.assert_array_equal(other.tokens, problem.tokens)
        np.testing.assert_array_equal(other.targets, problem.targets)
    assert not np.array_equal(make_problem(replace(problem.setup, seed=1)).tokens, problem.tokens)


def test_targets_follow_their_tokens_unless_ignored(problem: Problem) -> None:
    ignored = problem.targets == IGNORED
    assert 0.1 < ignored.mean() < 0.15
    following = problem.targets[..., :-1][~ignored[..., :-1]]
    np.testing.assert_array_equal(following, problem.tokens[..., 1:][~ignored[..., :-1]])
    assert problem.tokens.min() >= 0
    assert problem.tokens.max() < problem.setup.vocab_size
    successors: dict[int, set[int]] = {}
    for token, target in zip(problem.tokens[~ignored], problem.targets[~ignored], strict=True):
        successors.setdefault(int(token), set()).add(int(target))
    assert max(map(len, successors.values())) <= 4


def test_the_rate_rises_and_falls() -> None:
    setup = Setup(steps=50, warmup_steps=5, learning_rate=1.0)
    rates = [learning_rate(setup, step) for step in range(50)]
    np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.01


def test_only_matrices_decay() -> None:
    decayed = {name for name in parameter_shapes(Setup()) if is_decayed(name)}
    assert {"embedding", "head", "blocks.attention.query.kernel"} <= decayed
    assert parameter_shapes(Setup()).keys() - decayed == {
        "blocks.attention_norm.scale",
        "blocks.feed_forward_norm.scale",
        "final_norm.scale",
    }
    assert "head" not in parameter_shapes(Setup(tie_embeddings=True))
