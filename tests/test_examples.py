"""The examples, in reduced form."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flax_models import generate
from flax_models.model.decoder import ModelConfig

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_pretrain_text_learns_writes_a_model_and_says_what_next(place, monkeypatch, capsys):
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "pretrain_text.py")))
    monkeypatch.setitem(example.main.__globals__, "MODEL", ModelConfig(280, 16, 1, 2, 1, 8, 24, 16))
    example.main(["--data", str(place / "data"), "--steps=30", "--prompt=the fox", "--out", str(place / "out")])
    out = capsys.readouterr().out
    loss, guessing = (float(out.split(words)[1].split()[0]) for words in ("held-out loss ", "guessing would be "))
    assert loss < guessing - 0.1
    assert "sample:\nthe fox" in out
    assert "python -m flax_models.train --weights FOLDER" in out
    assert json.loads((place / "out" / "config.json").read_text())["model_type"] == "llama"
    assert generate.main(["--weights", str(place / "out"), "--prompt", "the fox", "--length", "2"]) == 0


def test_what_a_person_can_mend_is_one_line(place, monkeypatch):
    for options, message in [
        (["--data", str(place / "absent")], f"error: --data: no such file or folder: {place / 'absent'}"),
        (["--steps", "0"], 2),
    ]:
        monkeypatch.setattr(sys, "argv", ["pretrain_text.py", *options])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(EXAMPLES / "pretrain_text.py"), run_name="__main__")
        assert stopped.value.code == message


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
    options = ["--weights", str(place / "full"), "--lora", "--steps=2", "--out", str(place / "adapter")]
    example.main(options)
    assert "of them to train" in capsys.readouterr().out
    assert (place / "adapter" / "adapter_model.safetensors").is_file()
    asked = ["--chat", "--weights", str(place / "full"), "--prompt", "Sort this word: horse", "--length", "2"]
    assert generate.main(asked) == 0
