"""benchmarks.hosts on a CPU: its rows, and the check before a row is timed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_models import import_transformers

from benchmarks import hosts, hosts_process
from benchmarks.hosts_process import CONFIGS, Row, answer, changed, make_model

transformers = import_transformers()


@pytest.mark.parametrize("variant", ["plain", "ours"])
def test_a_row(variant: str) -> None:
    found = answer(Row(host="transformers", config="smoke", variant=variant, seq=16, batch=2, seconds=0.0))
    assert found["status"] == "ok", found["note"]
    assert found["tokens_per_s"] == pytest.approx(32000 / found["step_ms"])
    assert found["loss_error"] <= 1e-3
    assert (found["gradient_error"] == 0) == (variant == "plain")


def test_a_loss_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model("smoke", "cpu"), torch.randint(512, (1, 16))
    loss_of = hosts_process.loss_of
    losses = iter([1.0, 1.02])
    monkeypatch.setattr(hosts_process, "loss_of", lambda *arguments: loss_of(*arguments) * next(losses))
    with pytest.raises(ValueError, match=r"^the loss of plain differs by 2\.0e-02 from the library's, at most 0\.01$"):
        changed(model, "plain", tokens)
    losses = iter([1.0, 1.0])
    gradient = hosts_process.loss_and_gradient
    factors = iter([1.0, 1.05])
    monkeypatch.setattr(
        hosts_process, "loss_and_gradient", lambda *given: (gradient(*given)[0], torch.ones(2) * next(factors))
    )
    with pytest.raises(ValueError, match=r"^the gradient of the head of plain differs by 5\.0e-02 "):
        changed(model, "plain", tokens)


def test_the_command_writes_a_row_for_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def measured(module: str, request: str, limit: float, environment: dict[str, str]) -> dict[str, Any]:
        row = json.loads(request)
        if row["variant"] == "ours":
            return {"status": "failed", "note": "no memory of the right kind"}
        return {"status": "ok", "note": None, "tokens_per_s": 1000.0, "peak_bytes": 2**30, "loss_error": 1e-4}

    monkeypatch.setattr(hosts, "answer_of", measured)
    path = tmp_path / "hosts.json"
    options = [
        "--configs",
        "smoke",
        "--variants",
        "plain",
        "ours",
        "--seq",
        "512",
        "--json",
        str(path),
        "--commit",
        "1",
    ]
    assert hosts.main(options) == 1  # a row of ours failed
    rows = json.loads(path.read_text())["rows"]
    keys = {"host", "config", "variant", "seq", "batch", "tokens_per_s", "peak_bytes"}
    assert [(row["variant"], row["batch"], row["status"]) for row in rows] == [
        ("plain", 16, "ok"),
        ("ours", 16, "failed"),
    ]
    assert all(keys <= set(row) for row in rows)
    out = capsys.readouterr().out
    assert "smoke, plain, 16 x 512" in out
    assert "1,000 tokens/s, 1.0 GiB, the loss differs by 1.0e-04" in out
    assert "failed: no memory of the right kind" in out


def test_configs_are_those_of_the_published_models() -> None:
    from flax_models.model.families import PUBLISHED

    for name in ("llama3.2-1b", "qwen2.5-0.5b"):
        values, ours = CONFIGS[name], PUBLISHED[name]
        found = [values[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")]
        assert found == [ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers]
        heads = values["num_attention_heads"], values["num_key_value_heads"]
        assert heads == (ours.num_heads, ours.num_kv_heads)
