"""Tests text generation: the cache against recomputation, batches against single prompts, the sampler and the
command."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_decoder import SMALL, random_decoder

from flax_models import generate as program
from flax_models.data.dialogue import Document
from flax_models.data.tokenizer import load_or_train, write
from flax_models.hub.weights import save
from flax_models.model.decoder import Decoder
from flax_models.model.rope import RopeScaling
from flax_models.model.sampling import Sampling, continue_prompts, draw
from flax_models.train.config import CONFIGS, RunConfig, TrainConfig, to_json
from flax_models.train.step import Trainer

CAPPED = {  # like Gemma 2: every option that affects attention with a cache
    "sliding_window": 4,
    "window_pattern": (True, False),
    "attention_softcap": 2.0,
    "logit_softcap": 3.0,
    "post_norms": True,
    "norm_plus_one": True,
    "embedding_scale": True,
    "query_key_norm": True,
    "attention_bias": True,
    "rotary_pattern": (False, True),
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
LONGROPE = RopeScaling("longrope", 4.0, 8, rope_short_factor=(1.0,) * 4, rope_long_factor=(1.0, 2.0, 3.0, 4.0))
VARIANTS = {"capped": CAPPED, "windowed": {"sliding_window": 5}, "longrope": {"rope": LONGROPE}}
PROMPTS = [[5, 9, 1, 30, 7, 7, 2], [11], [3, 4, 5, 6]]
GREEDY = Sampling(temperature=0)
KEY = jax.random.key(0)


def make(**changes: Any) -> Decoder:
    # The weights are larger than initial weights, so that the context determines the most likely token.
    return random_decoder(dataclasses.replace(SMALL, **changes), spread=1.5)


@pytest.mark.parametrize("variant", ["capped", "longrope", pytest.param("windowed", marks=pytest.mark.slow)])
def test_the_cache_changes_no_token(variant):
    model = make(**VARIANTS[variant])
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.9) if variant == "capped" else GREEDY
    whole, cached = (
        continue_prompts(model, PROMPTS, length=12, key=KEY, sampling=sampling, use_cache=use_cache)
        for use_cache in (False, True)
    )
    assert cached == whole
    assert len({token for row in whole for token in row}) > 3, "the texts must not repeat a single token"


def test_rows_are_independent():
    model = make()
    together = continue_prompts(model, PROMPTS, length=12, key=KEY, sampling=GREEDY)
    for i, use_cache in ((1, True), (2, False)):
        alone = continue_prompts(model, PROMPTS[i : i + 1], length=12, key=KEY, sampling=GREEDY, use_cache=use_cache)
        assert alone == [together[i]]


def test_extending_in_pieces_gives_the_hidden_states_of_the_whole():
    model = make(**CAPPED)
    extend = nnx.jit(Decoder.extend)
    tokens = jnp.asarray(np.random.default_rng(0).integers(97, size=(2, 10)), jnp.int32)
    cache, pieces = model.make_cache(2, 10), []
    for first, last in ((0, 7), (7, 8), (8, 9), (9, 10)):
        positions = jnp.asarray(np.broadcast_to(np.arange(first, last), (2, last - first)))
        hidden, cache = extend(model, tokens[:, first:last], positions, cache)
        pieces.append(np.asarray(hidden))
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), nnx.jit(Decoder.__call__)(model, tokens), atol=2e-5)


def test_extend_raises_for_mismatched_positions_and_caches():
    model, tokens = make(), jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"positions must have shape \(2, 3\) \(tokens' shape\), got \(3,\)"):
        model.extend(tokens, jnp.arange(3), model.make_cache(2, 4))
    with pytest.raises(ValueError, match=r"cache must have 2 rows \(tokens' first axis\), got 1"):
        model.extend(tokens, jnp.zeros((2, 3), jnp.int32), model.make_cache(1, 4))


def test_row_ends_at_an_end_token_after_min_tokens():
    model = make()
    free = continue_prompts(model, PROMPTS, length=12, key=KEY, sampling=GREEDY)
    ends = (free[0][2], free[2][4])
    expected = [row[: min((row.index(end) for end in ends if end in row), default=12)] for row in free]
    got = continue_prompts(model, PROMPTS, length=12, key=KEY, sampling=GREEDY, ends=ends)
    assert got == expected
    assert len(got[0]) <= 2
    at_least = dataclasses.replace(GREEDY, min_tokens=6)
    late = continue_prompts(model, PROMPTS, length=12, key=KEY, sampling=at_least, ends=ends)
    assert all(len(row) >= 6 for row in late)
    never = dataclasses.replace(GREEDY, min_tokens=10**20)  # more than an int32 holds
    unended = continue_prompts(model, PROMPTS, length=3, key=KEY, sampling=never, ends=ends)
    assert [len(row) for row in unended] == [3, 3, 3]
    assert not {token for row in late for token in row} & set(ends)
    assert continue_prompts(model, PROMPTS, length=0, key=KEY) == [[], [], []]


def test_draws_repeat_with_their_key_and_rows_draw_independently():
    model, sampling = make(), Sampling(temperature=3.0)
    first, again, other = (
        continue_prompts(model, [[1], [1]], length=12, key=jax.random.key(seed), sampling=sampling)
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first[0] != first[1]


def test_padding_of_the_vocabulary_is_never_sampled():
    padded, model, sampling = make(), make(vocab_size=40), Sampling(temperature=3.0)
    params = jax.tree.map(lambda leaf: leaf[:40] if leaf.shape[0] == 97 else leaf, nnx.state(padded))
    nnx.update(model, params)
    want = continue_prompts(model, PROMPTS, length=12, key=KEY, sampling=sampling)
    assert continue_prompts(padded, PROMPTS, length=12, key=KEY, sampling=sampling, vocab_size=40) == want
    free = continue_prompts(padded, PROMPTS, length=12, key=KEY, sampling=sampling)
    assert max(token for row in free for token in row) >= 40


def test_draws_have_the_expected_probabilities():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probabilities, jnp.float32)), (4000, 4))[:, ::-1]
    keys = jax.random.split(KEY, 4000)
    for sampling, expected in [
        (Sampling(temperature=1.0), probabilities),
        (Sampling(temperature=0.5), probabilities**2),
        (Sampling(temperature=1.0, top_k=2), [0.5, 0.3, 0, 0]),
        (
            Sampling(temperature=1.0, top_p=0.7),
            [0.5, 0.3, 0, 0],
        ),  # 0.5 is less than 0.7, so the second token is included
        (Sampling(temperature=1.0, top_p=0.4), [1, 0, 0, 0]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
    ]:
        drawn = np.bincount(np.asarray(draw(logits, keys, sampling)), minlength=4)[::-1] / 4000
        expected = np.asarray(expected) / np.sum(expected)
        np.testing.assert_allclose(drawn, expected, atol=0.03, err_msg=str(sampling))  # four standard deviations
        assert (drawn[expected == 0] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts must have at least one prompt, got none"),
        ({"prompts": [[1], []]}, r"prompts\[1\] must have at least one token, got none"),
        ({"prompts": [[97]]}, r"prompts\[0\] must have tokens in \[0, 97\), got 97"),
        ({"prompts": [[1], [50]], "vocab_size": 40}, r"prompts\[1\] must have tokens in \[0, 40\), got 50"),
        ({"vocab_size": 98}, r"vocab_size must be in \[1, 97\] \(the rows of the head\), got 98"),
        ({"vocab_size": 0}, r"vocab_size must be in \[1, 97\] \(the rows of the head\), got 0"),
        ({"length": -1}, "length must not be negative, got -1"),
        ({"length": 30}, r"length must be at most 29 \(max_seq_len 32 minus the longest prompt's 3 tokens\), got 30"),
    ],
)
def test_invalid_prompt_or_length_raises(options, message):
    with pytest.raises(ValueError, match=message):
        continue_prompts(make(), **{"prompts": [[1, 2, 3]], "length": 1, "key": KEY, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and not negative, got -0.1"),
        ({"top_k": -1}, "top_k must not be negative, got -1"),
        ({"min_tokens": -1}, "min_tokens must not be negative, got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ],
)
def test_invalid_sampling_option_raises(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


# The command


TEXTS = ["the quick brown fox jumps over the lazy dog\n" * 3, "seven wizards mix ink while the fox sleeps\n" * 3]


def write_run(folder: Path, config: RunConfig) -> None:
    """Writes the initial files of a run's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**to_json(config), "corpus_sha256": "0" * 64}))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with weights/, a Hugging Face folder, and run/, a run with a checkpoint. Both have random weights."""
    from flax_models.train.checkpoint import Checkpoints

    place = tmp_path_factory.mktemp("generate")
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    tokenizer, _ = load_or_train(documents, 280, place / "cache")
    config = dataclasses.replace(SMALL, vocab_size=tokenizer.get_vocab_size(), max_seq_len=24)
    save(random_decoder(config), place / "weights", fields={"eos_token_id": 3})
    write(tokenizer, place / "weights" / "tokenizer.json")
    (place / "weights" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))

    options = TrainConfig(steps=2, batch_size=1)
    write_run(place / "run", RunConfig(model=config, train=options))
    write(tokenizer, place / "run" / "tokenizer.json")
    checkpoints = Checkpoints(place / "run" / "checkpoints")
    checkpoints.save(1, Trainer(random_decoder(config, seed=7), options).initial._replace(step=jnp.asarray(1)), {})
    checkpoints.close()
    return place


@pytest.mark.parametrize("source", ["weights", "run"])
def test_the_command_prints_every_prompt_with_its_continuation(place, source, capsys):
    options = [f"--{source}", str(place / source), "--prompt", "the fox", "--prompt", "ink", "--length", "9"]
    assert program.main(options) == 0
    first = capsys.readouterr().out
    texts = first.split("---\n")
    assert texts[0].startswith("the fox")
    assert texts[1].startswith("ink")
    assert len(texts[0]) > len("the fox\n")
    assert program.main(options) == 0
    assert capsys.readouterr().out == first
    assert program.main([*options, "--seed", "1"]) == 0
    assert capsys.readouterr().out != first


def test_a_chat_prints_the_answers_to_prompts_in_the_template(place, tmp_path, capsys):
    for path in (place / "weights").iterdir():
        (tmp_path / path.name).symlink_to(path)
    template = "{% for m in messages %}{{ m.content }}{{ '? ' if m.role == 'user' else '<|end|>' }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    options = ["--weights", str(tmp_path), "--temperature", "0", "--length", "9"]
    assert program.main([*options, "--prompt", "ink? ", "--prompt", "the fox? "]) == 0
    texts = capsys.readouterr().out
    assert program.main([*options, "--chat", "--prompt", "ink", "--prompt", "the fox"]) == 0
    first, second = capsys.readouterr().out.removesuffix("---\n").split("---\n")
    assert texts == f"ink? {first}---\nthe fox? {second}---\n"
    assert program.main([*options, "--chat", "--prompt", "ink<|end|>"]) == 1
    assert capsys.readouterr().err.startswith("error: --prompt contains '<|end|>', which is a token of the chat")


def test_ends_come_from_the_generation_config_and_else_from_the_config(place):
    assert program.read_weights(place / "weights", "float32").vocabulary.ends == (3, 4)
    generation = place / "weights" / "generation_config.json"
    generation.write_text("{}")
    try:
        assert program.read_weights(place / "weights", "bfloat16").vocabulary.ends == (3,)
    finally:
        generation.write_text(json.dumps({"eos_token_id": [3, 4]}))


@pytest.mark.parametrize("wrong", ["a", 1.5, True, -1, 10**20, [3, "a"], {"id": 3}])
def test_an_end_token_that_is_no_number_is_an_error_that_names_the_file_and_the_field(place, capsys, wrong):
    folder = place / "weights"
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": wrong}))
    try:
        assert program.main(["--weights", str(folder), "--prompt", "the"]) == 1
    finally:
        generation.write_text(json.dumps({"eos_token_id": [3, 4]}))
    err = capsys.readouterr().err
    assert err == f"error: {generation}: eos_token_id must be a token's number or a list of them, got {wrong!r}\n"


def test_user_errors_are_one_line(place, capsys, tmp_path):
    prompt = ["--prompt", "the"]
    weights, run = ["--weights", str(place / "weights")], ["--run", str(place / "run")]
    (tmp_path / "bare").mkdir()
    write_run(tmp_path / "new", CONFIGS["micro"])
    (tmp_path / "new" / "tokenizer.json").write_bytes((place / "run" / "tokenizer.json").read_bytes())
    for options, message in [
        ([*weights, *prompt, "--length", "9" * 20], "--length must be at most "),
        ([*weights, "--prompt", ""], "--prompt must have at least one token, got none"),
        ([*run, "--prompt", "wizards " * 30], "--prompt must have fewer tokens than the model's max_seq_len 24, got"),
        (["--weights", str(tmp_path / "bare"), *prompt], "cannot read"),
        (["--run", str(tmp_path / "bare"), *prompt], f"{tmp_path / 'bare'} is not a run: it has no config.json"),
        (["--run", str(tmp_path / "absent"), *prompt], f"{tmp_path / 'absent'} is not a run: it has no config.json"),
        ([*run, *prompt, "--step", "5"], f"--step must be one of the checkpoints in {place / 'run'}"),
        (["--run", str(tmp_path / "new"), *prompt], f"{tmp_path / 'new'} has no checkpoint yet"),
    ]:
        assert program.main(options) == 1, options
        err = capsys.readouterr().err
        assert err.startswith(f"error: {message}"), err
        assert err.count("\n") == 1


OF_WEIGHTS, OF_RUN = (["--prompt", "b", option, "a"] for option in ("--weights", "--run"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "a"], "one of the arguments --weights --run is required"),
        (["--run", "a"], "the following arguments are required: --prompt"),
        (["--run", "a", "--prompt"], "argument --prompt: expected one argument"),
        (["--run", "a", "--prompt", "b", "--length", "many"], "argument --length: invalid int value: 'many'"),
        (["--run", "a", "--prompt", "b", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--run", "a", "--prompt", "b", "--lenth", "3"], "unrecognized arguments: --lenth 3"),
        ([*OF_WEIGHTS, "--temperature=-1"], "--temperature must be finite and not negative, got -1.0"),
        ([*OF_WEIGHTS, "--temperature", "inf"], "--temperature must be finite and not negative, got inf"),
        ([*OF_WEIGHTS, "--top-p", "2"], "--top-p must be in (0, 1], got 2.0"),
        ([*OF_WEIGHTS, "--seed", "9" * 20], f"--seed must be in [0, 4,294,967,296), got {'9' * 20}"),
        ([*OF_WEIGHTS, "--seed=-1"], "--seed must be in [0, 4,294,967,296), got -1"),
        ([*OF_WEIGHTS, "--min-tokens=-1"], "--min-tokens must not be negative, got -1"),
        ([*OF_WEIGHTS, "--length", "0"], "--length must be at least 1, got 0"),
        ([*OF_WEIGHTS, "--step", "1"], "--step requires --run, got --weights"),
        ([*OF_WEIGHTS, "--allow-older"], "--allow-older requires --run, got --weights"),
        ([*OF_RUN, "--dtype", "bfloat16"], "--dtype requires --weights, got --run"),
        ([*OF_RUN, "--ignore-config-fields", "c"], "--ignore-config-fields requires --weights, got --run"),
    ],
)
def test_invalid_option_is_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main(options)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}"), err
    assert err.count("\n") == 1


def test_too_large_length_raises_and_the_default_is_reduced_with_a_note(place, capsys):
    options = ["--run", str(place / "run"), "--prompt", "the fox"]
    width = len(program.read_run(place / "run").vocabulary.prompt("the fox"))
    why = f"the longest prompt has {width} tokens and the model's max_seq_len is 24"
    assert program.main([*options, "--length", "25"]) == 1
    assert capsys.readouterr().err == f"error: --length must be at most {24 - width}, got 25: {why}\n"
    assert program.main(options) == 0
    assert capsys.readouterr().err == f"note: --length is {24 - width} instead of 128: {why}\n"


def test_older_checkpoint_is_used_only_with_an_option(place, tmp_path, capsys):
    from flax_models.export import main as export_main
    from flax_models.train.checkpoint import Checkpoints

    run = shutil.copytree(place / "run", tmp_path / "run")
    state = Trainer(random_decoder(program.read_run(run).model.config, seed=8), TrainConfig()).initial
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(2, state._replace(step=jnp.asarray(2, jnp.int32)), {})
    checkpoints.close()
    largest = max((run / "checkpoints" / "2").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(b"")

    options = ["--run", str(run), "--out", str(tmp_path / "out")]
    for command, given in [(export_main, options), (program.main, ["--run", str(run), "--prompt", "ink"])]:
        assert command(given) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"error: cannot read the checkpoint {run}/checkpoints/2: ")
        assert err.endswith(
            "; use --allow-older for the latest checkpoint that can be read, "
            "or --step N for the checkpoint of step N (1, 2)\n"
        )
        assert err.count("\n") == 1
    for step, message in [
        ("2", f"cannot read the checkpoint {run}/checkpoints/2: "),
        ("3", f"--step must be one of the checkpoints in {run}/checkpoints (1, 2), got 3\n"),
    ]:
        assert export_main([*options, "--step", step]) == 1
        assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()
    assert export_main([*options, "--step", "1"]) == 0
    assert capsys.readouterr().err == ""
    shutil.rmtree(tmp_path / "out")
    assert export_main([*options, "--allow-older"]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"warning: cannot read the checkpoint {run}/checkpoints/2: ")
    assert err.endswith("; the checkpoint of step 1 is used\n")
    assert err.count("\n") == 1
