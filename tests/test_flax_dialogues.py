"""Tests runs of `python -m flax_models.train` on dialogues and on packed texts: output, training and resuming."""

import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_runs import SMALL, WORDS, before_step, learned, train, write_texts
from rich.console import Console

import flax_models.train.main as program
from flax_models.data.corpus import Corpus
from flax_models.data.dialogue import Document
from flax_models.data.tokenizer import END, END_ID, load_or_train
from flax_models.data.vocabulary import made_from_text
from flax_models.display import Display
from flax_models.train.config import RunConfig, TrainConfig
from flax_models.train.sample import make_prompt
from flax_models.train.task_data import Text, make_data, read_text

pytestmark = pytest.mark.usefixtures("compiled")

# If an option is repeated, the last value counts.
OPTIONS = [*SMALL, "--max-seq-len=96", "--held-out-windows=3", "--checkpoint-every=2"]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with 60 instructions in data.jsonl, a cache, and a path for runs/."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    with (tmp_path / "data.jsonl").open("w") as file:
        for _ in range(60):
            words = generator.choice(WORDS, size=generator.integers(1, 6)).tolist()
            record = {"instruction": "say it twice", "input": " ".join(words), "output": " ".join(words * 2)}
            file.write(json.dumps(record) + "\n")
    return tmp_path


def start(place: Path, *options: str) -> int:
    return train(place, "--data", str(place / "data.jsonl"), *OPTIONS, *options)


def test_a_run_learns_answers_reports_packing_and_resumes_bit_for_bit(place, capsys, monkeypatch):
    assert start(place, "--name", "whole") == 0
    out = capsys.readouterr().out
    assert re.search(r"^corpus     .*: 5\d dialogues and \d held out, ", out, re.M)
    assert re.search(r"^packing    best fit, at most 4 examples per row: \d+\.\d\d% padding$", out, re.M)
    assert re.search(r"^training   8 steps of 2 x 96 = 192 tokens, 0\.\d\d passes over the data$", out, re.M)
    assert "\nsample:\n### Instruction:\nsay it twice\n" in out
    result = json.loads((place / "runs" / "whole" / "result.json").read_text())
    assert 0 < result["held_out_tokens"] < 3 * 96
    assert result["held_out_loss"] < result["uniform"]

    class Interrupted(BaseException):
        pass

    def interrupt(state):
        raise Interrupted

    with monkeypatch.context() as patch:
        before_step(patch, 6, interrupt)
        with pytest.raises(Interrupted):
            start(place, "--name", "cut")
    assert start(place, "--name", "cut", "--resume") == 0
    capsys.readouterr()
    assert learned(place / "runs" / "cut") == learned(place / "runs" / "whole")


def test_non_finite_loss_reports_the_examples_of_its_batch(place, capsys, monkeypatch):
    def spoil(state):
        return state._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))

    before_step(monkeypatch, 5, spoil)
    assert start(place, "--name", "bad") == 1
    named = r"data\.jsonl:\d+"
    expected = rf"at step 5; the checkpoint of step 4 is kept. Batch: {named}(, {named})*(, and \d more)?\. "
    assert re.search(rf"^error: the loss is nan {expected}", capsys.readouterr().err)


def facts(place: Path, length: int, **options: Any) -> tuple[TrainConfig, dict[str, str]]:
    """Returns the training config and the facts that a run prints at its start."""
    config = RunConfig(data=(place / "data.jsonl",), train=TrainConfig(**options))
    text = read_text(config, None, Display(Console(file=io.StringIO())))
    train_config = config.train.with_rows(length)
    data = make_data(text, train_config, length, 0, 280)
    data.sampler.close()
    return train_config, dict(data.facts)


def test_rows_are_filled_as_requested(place):
    config, reported = facts(place, 96, batch_tokens=400, packing="none")
    assert config.batch_size == 4
    assert re.fullmatch(r"none, one example per row: \d\d\.\d\d% padding", reported["packing"])
    assert "warning" not in reported
    _, reported = facts(place, 26)
    assert re.match(r"--max-seq-len 26: of 5\d examples, \d+ \(.*%\) truncated, ", reported["warning"])


@pytest.mark.parametrize(
    ("options", "status", "error"),
    [
        (["--packing", "windows"], 1, "--packing must be best_fit or none for dialogues, got windows"),
        (["--batch-tokens", "40"], 2, "--batch-tokens must be at least --max-seq-len 96, got 40"),
        (
            ["--batch-tokens", "300", "--accumulate", "2"],
            2,
            "--accumulate must divide the 3 rows of 96 tokens of --batch-tokens, got 2",
        ),
    ],
)
def test_incompatible_options_are_one_line(place, capsys, options, status, error):
    assert start(place, *options) == status
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.slow
def test_texts_can_be_packed_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    assert train(tmp_path, "--data", str(tmp_path / "data"), *SMALL, "--steps=1", "--packing=best_fit") == 0
    assert re.search(
        r"^packing    best fit, at most 4 examples per row: \d+\.\d\d% padding$", capsys.readouterr().out, re.M
    )


def test_pieces_of_texts_have_every_target_once():
    documents = tuple(Document(name, text) for name, text in (("a", "the quick brown fox " * 9), ("b", "a dog")))
    tokenizer, _ = load_or_train(documents, 280, Path("/nowhere"))
    vocabulary = made_from_text(tokenizer)
    stream = vocabulary.encode(documents)
    text = Text(Corpus(documents, documents, "", "", 0, ()), vocabulary, stream, stream)
    data = make_data(text, TrainConfig(batch_size=1, packing="best_fit"), 8, 0, 280)
    found = data.held_out
    data.sampler.close()
    ends = np.flatnonzero(stream == vocabulary.needed_end())
    assert found.counted == len(stream) - len(ends) == data.size
    expected = np.delete(stream, [0, *(ends[:-1] + 1)])  # no position predicts the first token of a document
    targets = found.targets[found.targets >= 0]
    assert sorted(targets.tolist()) == sorted(expected.tolist())
    assert data.describe(np.array([0, 1])) == "a, from its token 0, a, from its token 8"


def write_hub(folder: Path, **fields: str) -> Path:
    """Writes a folder whose tokenizer adds no token to a text, with these fields of tokenizer_config.json."""
    folder.mkdir()
    tokenizer, _ = load_or_train([Document("a", " ".join(WORDS))], 280, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, **fields}))
    return folder


def test_a_sample_without_a_prompt_starts_with_the_end_token(place):
    records = (json.dumps({"prompt": "", "completion": word}) + "\n" for word in WORDS)
    (place / "data.jsonl").write_text("".join(records))
    config = RunConfig(data=(place / "data.jsonl",), tokenizer=write_hub(place / "hub"))
    text = read_text(config, None, Display(Console(file=io.StringIO())))
    assert isinstance(text.held_out, list)
    assert text.held_out[0].counted.all()
    prompt = make_prompt(text, "")
    assert (prompt.tokens, prompt.shown, set(prompt.ends)) == ([END_ID], "", {END_ID})


def test_a_prompt_has_the_format_of_the_data(place):
    display = Display(Console(file=io.StringIO()))
    text = read_text(RunConfig(data=(place / "data.jsonl",)), None, display)
    assert make_prompt(text, "ink").tokens == text.vocabulary.chat_prompt("ink")
    records = (json.dumps({"prompt": word, "completion": word}) + "\n" for word in WORDS)
    (place / "data.jsonl").write_text("".join(records))
    text = read_text(RunConfig(data=(place / "data.jsonl",)), None, display)
    prompt = make_prompt(text, "ink")
    assert prompt.tokens == text.vocabulary.prompt("ink") != text.vocabulary.chat_prompt("ink")
    assert prompt.shown == "ink"


def test_a_prompt_that_the_template_rejects_ends_a_run_before_training(place, capsys, monkeypatch):
    compared: list[str] = []
    monkeypatch.setattr(program, "check_agreement", lambda what, text: compared.append(what))
    hub = write_hub(place / "hub", chat_template="{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    assert start(place, "--tokenizer", str(hub), "--prompt", f"a{END}") == 1
    assert capsys.readouterr().err == f"error: --prompt contains '{END}', which is a token of the chat template\n"
    assert not (place / "runs").exists()
    assert compared[-1] == "the chat template and its date", "processes must not format other texts"
