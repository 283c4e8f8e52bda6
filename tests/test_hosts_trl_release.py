"""Trainers of the released trl, patched and unpatched, in runs of 20 steps. `make test-hosts` installs trl."""

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_trainers
from page_code import programs_of
from trl_stand_ins import calls_of, named, trl

from benchmarks.hosts_process import answer
from benchmarks.hosts_rows import HOSTS, Request, Row
from core_triton.hosts.trl_losses import OF_IMAGES

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed (`make test-hosts` installs it)"
)


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("SFT", {}),
    ("SFT", {"loss_type": "dft", "gradient_checkpointing": True}),
    ("SFT", {"model": "Gemma2", "bf16": True, "learning_rate": 1e-3}),
    ("SFT", {"eval": True, "packing": True, "max_length": 32}),
    ("GRPO", {}),
    ("GRPO", {"loss_type": "grpo", "beta": 0.1, "cast_lm_head_to_fp32": True}),
    ("GRPO", {"loss_type": "bnpo", "beta": 0.1, "use_bias_correction_kl": False, "mask_truncated_completions": True}),
    ("GRPO", {"loss_type": "cispo", "epsilon_high": 5.0}),
    ("GRPO", {"loss_type": "sapo", "num_iterations": 1, "temperature": 0.7}),
    ("GRPO", {"loss_type": "luspo", "delta": 1.5}),
    ("GRPO", {"loss_type": "vespo"}),
    ("GRPO", {"entropy_coef": 0.01}),
    ("GRPO", {"importance_sampling_level": "sequence", "saved_budget": 2**24}),
    ("GRPO", {"model": "Granite", "lora": True}),
    ("DPO", {"use_weighting": True}),
    ("DPO", {"model": "Gemma2", "loss_type": ["sigmoid", "hinge"]}),
    ("DPO", {"lora": True}),
    ("KTO", {}),
    ("KTO", {"loss_type": "apo_zero_unpaired"}),
    ("RLOO", {}),
    ("RLOO", {"saved_budget": 2**24, "beta": 0.0}),
]
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2": {"final_logit_softcapping": 4.0, "head_dim": 8},
    "Granite": {"logits_scaling": 4.0},
}


def run(name: str, folder: Path, patched: bool, options: dict[str, Any]) -> list[dict[str, float]]:
    options = dict(options)
    adapter = importlib.import_module("core_triton.hosts.trl")
    model, budget = options.pop("model", "Llama"), options.pop("saved_budget", 0)
    if options.pop("eval", False):
        options |= {"eval_strategy": "steps", "eval_steps": 10, "eval_dataset": trl_trainers.examples(name)}
    if options.pop("lora", False):
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made = trl_trainers.make_model(name=model, **MODELS.get(model, {}))
    trainer = trl_trainers.make(name, folder, made, **options)
    if not patched:
        return trl_trainers.train(trainer)
    with adapter.patch(trainer, implementation="chunked", saved_budget=budget), calls_of(adapter) as calls:
        found = trl_trainers.train(trainer)
    assert len(calls) >= 20  # with gradients
    return found


@needs_trl
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options"), RUNS, ids=[named({"": name} | options, ()) for name, options in RUNS])
def test_twenty_steps_of_trl_are_the_same(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected, found = (run(name, tmp_path / str(patched), patched, options) for patched in (False, True))
    assert len(expected) >= 20
    tolerance = 5e-4
    if options.get("bf16"):  # trl rounds the logits to bfloat16, so the largest one may be another
        tolerance = 2e-2
        for one in (*found, *expected):
            one.pop("mean_token_accuracy", None)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@needs_trl
def test_the_interface_is_that_of_the_installed_release() -> None:
    stand_in = trl()
    assert trl_version().split(".")[:2] == ["1", "16"]
    utils = importlib.import_module("trl.trainer.utils")
    for of_release, ours in (
        (utils._ChunkedLogProbFunction.forward, vars(stand_in[2])["_ChunkedLogProbFunction"].apply),
        (utils._use_triton, vars(stand_in[2])["_use_triton"]),
    ):
        names = [name for name in inspect.signature(of_release).parameters if name != "ctx"]
        assert names == list(inspect.signature(ours).parameters)
    trainer = importlib.import_module("trl").GRPOTrainer
    parameters = list(inspect.signature(trainer._get_per_token_logps_and_entropies).parameters)
    of_stand_in = inspect.signature(vars(stand_in[0])["GRPOTrainer"]._get_per_token_logps_and_entropies)
    assert parameters == [*list(of_stand_in.parameters)[:-1], *OF_IMAGES]
    passed = re.findall(r'(\w+)=inputs.get\("(\w+)"\)', inspect.getsource(trainer._compute_loss))
    assert passed[: len(OF_IMAGES)] == [(name, name) for name in OF_IMAGES]


@needs_trl
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("trainer", "part"), HOSTS["trl"].parts)
def test_a_row_of_the_benchmark(trainer: str, part: str) -> None:
    row = Row(host="trl", config="smoke", variant="ours", seq=16, batch=4, trainer=trainer, part=part)
    found = answer(row, Request(rows=[], file="", seconds=0.0))
    assert found["status"] == "ok", found["note"]
    assert found["loss_error"] <= 1e-3
    assert 0 < found["gradient_error"] <= 1e-2


def trl_version() -> str:
    return importlib.import_module("trl").__version__


@needs_trl
@pytest.mark.slow
def test_two_ranks_of_trl_compute_the_same(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("trl_ranks.py")), str(tmp_path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 7
    for name, (expected, found) in results.items():
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SFT", "GRPO"])
def test_the_snippet_of_the_page_runs_with_the_installed_trl(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the trainers write there
    trl_trainers.make_model().save_pretrained("model")
    trl_trainers.tokenizer().save_pretrained("model")
    page = Path(__file__).parents[1] / "docs" / "hosts.md"
    (code,) = [code for code in programs_of(page) if f"import {name}Config" in code]
    for old, new in (
        ('"Qwen/Qwen3-0.6B"', '"model"'),
        ("= None  # your datasets.Dataset", f"= trl_trainers.examples({name!r})"),
        ("max_steps=20", "max_steps=2, use_cpu=True, bf16=False, report_to=[], max_completion_length=8"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new.replace(", max_completion_length=8", "") if name == "SFT" else new)
    names: dict[str, Any] = {"trl_trainers": trl_trainers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, str(page), "exec"), names)
    assert names["trainer"].state.global_step == 2
