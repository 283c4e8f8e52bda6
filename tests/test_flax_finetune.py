"""Tests runs that start from a Hugging Face folder: the first loss against transformers, resumption, export and
errors."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import WORDS, before_step, learned, train, write_texts
from hub_models import SIZES, import_transformers, load_transformers, make, their_loss, write_folder, write_tokenizer
from rich.console import Console
from safetensors.numpy import load_file, save_file
from tokenizers.processors import TemplateProcessing

import flax_models.train.main as program
from flax_models import export, generate
from flax_models.data.batches import BatchSampler
from flax_models.data.corpus import load_corpus
from flax_models.data.dialogue import Document
from flax_models.data.vocabulary import read_hub_vocabulary, read_run_vocabulary
from flax_models.display import Display
from flax_models.errors import RunError
from flax_models.hub.config import differing, read_config, values_of
from flax_models.model.decoder import ModelConfig
from flax_models.model.families import published
from flax_models.train.arguments import parse
from flax_models.train.config import CONFIGS, RunConfig
from flax_models.train.metrics import read_rows
from flax_models.train.run_folder import folder_to_resume, new_folder, read_record
from flax_models.train.trained import read_run

pytestmark = pytest.mark.usefixtures("compiled")

OPTIONS = [
    "--dtype=float32",
    "--remat=none",
    "--max-seq-len=16",
    "--steps=6",
    "--batch-size=2",
    "--warmup-steps=2",
    "--learning-rate=1e-3",
    "--eval-every=0",
    "--checkpoint-every=2",
    "--log-every=3",
    "--held-out-windows=4",
    "--sample-tokens=4",
    "--prompt=the fox",
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> tuple[Any, Path]:
    """A transformers model that uses every option of the loss, and the folder that it was saved to."""
    model, folder = make("gemma2"), tmp_path_factory.mktemp("hub") / "small-gemma2"
    write_folder(model, folder)
    write_tokenizer(folder, [*WORDS, *(f"word{i}" for i in range(SIZES["vocab_size"] - 4 - len(WORDS)))])
    return model, folder


def start(place: Path, name: str, weights: Path, *options: str) -> int:
    return train(place, "--name", name, "--weights", str(weights), "--data", str(place / "data"), *OPTIONS, *options)


@pytest.fixture(scope="module")
def tuned(hub, tmp_path_factory) -> tuple[Path, str]:
    """A folder with the finished run `whole`, which started from the saved model, and the run's output."""
    place = tmp_path_factory.mktemp("tuned")
    write_texts(place / "data")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert start(place, "whole", hub[1]) == 0
    return place, out.getvalue()


def test_the_first_steps_loss_is_that_of_transformers_on_its_batch(hub, tuned):
    theirs, folder = hub
    place, out = tuned
    stream = read_hub_vocabulary(folder).encode(load_corpus([place / "data"]).train)
    batch = BatchSampler(stream, 2, 16, seed=0).next()
    rows = np.concatenate((batch.tokens, batch.targets[:, -1:]), axis=1).astype(np.int64)
    first = read_rows(place / "runs" / "whole")[0]
    assert first["step"] == 1
    assert first["loss"] == pytest.approx(their_loss(theirs, rows), rel=2e-6)
    assert re.search(r"^model +[\d,]+ parameters, 100% trainable", out, re.MULTILINE)
    assert re.search(rf"^tokenizer +61 entries, from {folder}$", out, re.MULTILINE)
    assert "sample:\nthe fox" in out


def test_an_exported_run_has_the_folders_files_and_is_the_same_model_in_transformers(hub, tuned, tmp_path, capsys):
    theirs, folder = hub
    run, out = tuned[0] / "runs" / "whole", tmp_path / "out"
    assert export.main(["--run", str(run), "--out", str(out)]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    before, after = (json.loads((where / "config.json").read_text()) for where in (folder, out))
    for name in ("max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "architectures"):
        assert after[name] == before[name], name
    assert not differing(read_config(out), read_config(folder))

    trained = load_transformers(out)
    ids = np.random.default_rng(0).integers(61, size=(2, 40))
    expected = nnx.jit(lambda model, tokens: model.logits(model(tokens)))(read_run(run).model, jnp.asarray(ids))
    import torch

    with torch.no_grad():
        got = trained(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5)
    assert their_loss(trained, ids) != their_loss(theirs, ids), "training must change the model"
    text = "the quick fox </s>"
    tokenizers = [import_transformers().AutoTokenizer.from_pretrained(where) for where in (out, folder)]
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]

    texts = []
    capsys.readouterr()
    for source in (["--run", str(run)], ["--weights", str(out)]):
        # Longer than the run's sequences: the exported max_seq_len is still that of the folder.
        assert generate.main([*source, "--prompt", "the fox", "--length", "30", "--min-tokens=20"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("the fox ")


def test_resuming_does_not_need_the_folder_and_gives_the_uninterrupted_runs_results(
    hub, tuned, place, monkeypatch, capsys
):
    moved = shutil.copytree(hub[1], place / "hub")
    with monkeypatch.context() as patch:
        before_step(patch, 6, interrupt)
        assert start(place, "broken", moved) == 130
    shutil.rmtree(moved)
    capsys.readouterr()
    for option, message in [
        (["--weights", str(hub[1])], "--weights must be .*/hub, as in .*config.json, got .*small-gemma2"),
        (["--config", "micro"], "--config must be None, as in .*, got micro"),
        (["--freeze", "head"], r"--freeze must be \[\], as in .*, got \['head'\]"),
    ]:
        assert train(place, "--name", "broken", "--resume", *option) == 1
        assert re.match(
            f"error: --resume continues a run with its original options: {message}", capsys.readouterr().err
        )
    assert train(place, "--name", "broken", "--resume", "--weights", str(moved)) == 0
    assert "from step 4" in capsys.readouterr().out
    whole, broken = tuned[0] / "runs" / "whole", place / "runs" / "broken"
    assert learned(broken) == learned(whole)
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, broken)]
    assert results[0]["held_out_loss"] == results[1]["held_out_loss"]


def interrupt(state: Any) -> None:
    raise KeyboardInterrupt


def test_a_run_that_ended_before_its_first_checkpoint_restarts_from_the_folders_weights(
    hub, tuned, place, monkeypatch, capsys
):
    moved = shutil.copytree(hub[1], place / "hub")
    with monkeypatch.context() as patch:
        before_step(patch, 1, interrupt)
        assert start(place, "broken", moved) == 130
    shutil.rmtree(moved)
    capsys.readouterr()
    assert train(place, "--name", "broken", "--resume") == 1
    assert re.match(r"error: --weights: cannot read .*hub/config.json", capsys.readouterr().err)
    shutil.copytree(hub[1], moved)
    assert train(place, "--name", "broken", "--resume") == 0
    assert "from the beginning" in capsys.readouterr().out
    assert learned(place / "runs" / "broken") == learned(tuned[0] / "runs" / "whole")


def test_invalid_weights_folder_is_one_line_and_leaves_no_files(hub, place, capsys):
    def without(name: str, **changes: Any) -> Path:
        folder = shutil.copytree(hub[1], place / f"without-{name}")
        if changes:
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**values, **changes}))
        else:
            (folder / name).unlink()
        return folder

    no_end = without("config.json", eos_token_id=None)
    for name, field in (("tokenizer_config.json", "eos_token"), ("generation_config.json", "eos_token_id")):
        values = json.loads((no_end / name).read_text())
        (no_end / name).write_text(json.dumps({**values, field: None}))
    broken = shutil.copytree(hub[1], place / "broken")
    (broken / "tokenizer.json").write_text("{")
    damaged = [shutil.copytree(hub[1], place / name) for name in ("with-nan", "cut-short")]
    shard = max(damaged[0].glob("*.safetensors"))
    tensors = load_file(shard)
    name = max(tensors)
    tensors[name].flat[0] = np.nan
    save_file(tensors, shard)
    huge = shutil.copytree(hub[1], place / "huge")
    values = json.loads((huge / "config.json").read_text())
    (huge / "config.json").write_text(json.dumps({**values, "vocab_size": 10**9}))
    cut = damaged[1] / shard.name
    cut.write_bytes(cut.read_bytes()[:-4])
    for folder, options, message in [
        (damaged[0], [], f"{re.escape(name)} holds NaN or inf"),
        (damaged[1], [], f"cannot read .*{shard.name}: the file is truncated in "),
        (huge, [], r"model.embed_tokens.weight must have shape \(1000000000, 32\), got"),
        (place / "absent", [], "--weights: cannot read .*absent/config.json"),
        (without("tokenizer.json"), [], "without-tokenizer.json has no tokenizer.json; create it from"),
        (broken, [], "--weights: cannot read the tokenizer .*broken/tokenizer.json"),
        (no_end, [], "defines no end-of-text token: none of its files has eos_token_id"),
        (without("tokenizer_config.json", eos_token="<eos>"), [], "eos_token must be an entry of .*, got '<eos>'"),
        (
            hub[1],
            ["--config", "gemma2-2b"],
            "the options do not match the model in .*: vocab_size 61 in the folder, got 256000",
        ),
        (hub[1], ["--hidden-size=48", "--num-layers=2"], "hidden_size 32 in the folder, got 48, num_layers 3 in"),
        (hub[1], ["--max-seq-len", "65"], "--max-seq-len must be at most 64 .*small-gemma2.*, got 65"),
        (
            hub[1],
            ["--freeze", "head"],
            "--freeze: no parameter matches head; the parameters are .*embedding, final_norm.scale",
        ),
    ]:
        assert start(place, "a", folder, *options) == 1, message
        out, err = capsys.readouterr()
        assert re.match(f"error: .*{message}", err), err
        assert folder not in damaged or "\ntokens " not in out, "the error must come before the data is encoded"
        assert err.count("\n") == 1
        assert not (place / "runs").exists()
    with pytest.raises(SystemExit):
        start(place, "a", hub[1], "--tokenizer", str(hub[1]))
    assert "--tokenizer cannot be used with --weights" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama3.2-1b", "gemma2-2b"])
def test_a_config_that_matches_the_folder_equals_the_folders(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values_of(published(name))))
    named, _ = parse(["--config", name, "--weights", str(tmp_path)])
    unnamed, _ = parse(["--weights", str(tmp_path)])
    assert (named.config, unnamed.config) == (name, None)
    assert not differing(named.model, unnamed.model)
    for config in (named, unnamed):
        assert (config.model.dtype, config.model.param_dtype, config.model.max_seq_len) == ("bfloat16", "float32", 4096)
        assert config.train.learning_rate < CONFIGS[name].train.learning_rate / 10, (
            "fine-tuning must use a small learning rate"
        )
    assert parse(["--weights", str(tmp_path), "--learning-rate", "0.5"])[0].train.learning_rate == 0.5


def test_run_is_named_after_its_folder_and_the_latest_is_resumed(hub, tmp_path):
    config = RunConfig(None, hub[1], runs=tmp_path)
    assert new_folder(config) == tmp_path / "small-gemma2"
    (tmp_path / "small-gemma2").mkdir()
    (tmp_path / "small-gemma2" / "config.json").write_text("{}")
    assert new_folder(config) == tmp_path / "small-gemma2-2"
    assert folder_to_resume(tmp_path, None, "small-gemma2") == tmp_path / "small-gemma2"
    with pytest.raises(ValueError, match="--config is required without --weights"):
        RunConfig(None)


# The tokenizer of a folder


@pytest.mark.slow
def test_random_weights_with_the_tokenizer_of_a_folder(hub, tuned, place, capsys):
    like = read_record(tuned[0] / "runs" / "whole").config  # the same shape avoids recompilation
    config = dataclasses.replace(like, config="tiny", weights=None, tokenizer=hub[1], name="a", runs=place / "runs")
    program.run(config, None, Display(Console()))
    run = read_run(place / "runs" / "a")
    assert (run.step, run.vocabulary.ends) == (6, (2,))
    rows = read_rows(place / "runs" / "a")
    assert rows[0]["loss"] != read_rows(tuned[0] / "runs" / "whole")[0]["loss"]
    assert train(place, "--name", "a", "--resume") == 0
    assert read_rows(place / "runs" / "a") == rows
    capsys.readouterr()
    assert export.main(["--run", str(place / "runs" / "a"), "--out", str(place / "out")]) == 0
    assert json.loads((place / "out" / "config.json").read_text())["eos_token_id"] == 2
    assert (place / "out" / "tokenizer.json").read_bytes() == (hub[1] / "tokenizer.json").read_bytes()
    assert read_hub_vocabulary(place / "out").ends == (2,)


def test_a_missing_folder_of_a_tokenizer_names_the_option(place, capsys):
    options = ["--config", "micro", "--name", "a", "--data", str(place / "data"), "--tokenizer", str(place / "absent")]
    assert train(place, *options) == 1
    message = f"error: --tokenizer: cannot read a tokenizer: no such folder: {place / 'absent'}\n"
    assert capsys.readouterr().err == message


def test_vocab_size_covers_every_token_and_keeps_unused_rows(hub):
    vocabulary = read_hub_vocabulary(hub[1])
    for rows in (61, 70):
        assert vocabulary.fit(ModelConfig(vocab_size=rows)).vocab_size == rows
    with pytest.raises(RunError, match=r"the tokenizer of .* has 61 entries, and --vocab-size is 60"):
        vocabulary.fit(ModelConfig(vocab_size=60))


def test_texts_have_the_templates_tokens_and_one_end_token(hub):
    vocabulary = read_hub_vocabulary(hub[1])
    documents = [Document("a", "the fox"), Document("b", "lazy</s>dog")]
    word = vocabulary.tokenizer.token_to_id
    stream = vocabulary.encode(documents).tolist()
    assert stream == [1, word("the"), word("fox"), 2, 1, word("<unk>"), 2]
    with pytest.raises(RunError, match="--data: c contains </s>, which is the end token of texts"):
        vocabulary.encode([Document("c", "lazy </s> dog")])
    assert vocabulary.prompt("the</s>") == [1, word("the"), 2], "</s> in a prompt must be the token"
    for template in ("</s> $A", "$A </s>", "</s> $A </s>"):
        vocabulary.tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("</s>", 2)])
        assert vocabulary.encode([*documents[:1], Document("b", "")]).tolist() == [word("the"), word("fox"), 2, 2]
        before = [2] if template.startswith("<") else []
        assert vocabulary.prompt("the fox") == [*before, word("the"), word("fox")], "a prompt must not be ended"
        assert vocabulary.prompt("the </s>") == [*before, word("the"), 2]
    vocabulary.tokenizer.enable_truncation(2)
    vocabulary.tokenizer.save(str(hub[1].parent / "tokenizer.json"))
    again = read_hub_vocabulary(hub[1].parent)
    assert len(again.tokenizer.encode("the fox the fox").ids) == 6, "texts must not be truncated"
    assert (again.end, again.ends) == (None, ())
    with pytest.raises(RunError, match="defines no end-of-text token"):
        again.encode(documents)


@pytest.mark.parametrize(
    ("files", "end", "ends"),
    [
        ({"config.json": {"eos_token_id": 4}}, 4, (4,)),
        ({"config.json": {"eos_token_id": [5, 4]}}, 5, (5, 4)),
        ({"config.json": {"eos_token_id": [5, 4]}, "generation_config.json": {"eos_token_id": [4, 6]}}, 5, (4, 6)),
        ({"config.json": {}, "generation_config.json": {"eos_token_id": 6}}, 6, (6,)),
        ({"config.json": {"eos_token_id": 4}, "tokenizer_config.json": {"eos_token": "</s>"}}, 2, (4, 2)),
        ({"tokenizer_config.json": {"eos_token": {"content": "the", "lstrip": False}}}, 4, (4,)),
    ],
)
def test_end_token_is_the_tokenizers_or_else_the_models(hub, tmp_path, files, end, ends):
    (tmp_path / "tokenizer.json").write_bytes((hub[1] / "tokenizer.json").read_bytes())
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    vocabulary = read_hub_vocabulary(tmp_path)
    assert (vocabulary.end, vocabulary.ends) == (end, ends)
    (tmp_path / "run").mkdir()
    vocabulary.write(tmp_path / "run", weights=False)
    again = read_run_vocabulary(tmp_path / "run")
    assert (again.end, set(again.ends)) == (end, set(ends)), "a continued run must have the same end tokens"
