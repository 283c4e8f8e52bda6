"""Tests examples: the plain-text format, truncation, the token cache, and the output of a run."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_models import write_tokenizer
from rich.console import Console

from flax_models.data import token_cache
from flax_models.data.corpus import Corpus, load_corpus
from flax_models.data.dialogue import Dialogue, Document, Turn
from flax_models.data.examples import Example, fit_examples, from_arrays, to_arrays
from flax_models.data.token_cache import read_or_encode
from flax_models.data.tokenizer import END, END_ID, load_or_train
from flax_models.data.vocabulary import Vocabulary, made_from_text, read_hub_vocabulary
from flax_models.display import Display
from flax_models.errors import RunError
from flax_models.train.config import CONFIGS, RunConfig
from flax_models.train.task_data import Text, read_text

ALPACA = Dialogue(
    "a.jsonl:1", (Turn("instruction", "Größe?"), Turn("input", "日本 👋"), Turn("output", f"weiß {END} nicht"))
)
PAIR = Dialogue("a.jsonl:2", (Turn("prompt", "2 + 2 ="), Turn("completion", " 4")))
CHAT = Dialogue(
    "a.jsonl:3", (Turn("user", "hi"), Turn("assistant", "hello"), Turn("user", "more"), Turn("assistant", "no"))
)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
    return made_from_text(load_or_train([ALPACA, PAIR, CHAT], 300, tmp_path_factory.mktemp("tokenizers"))[0])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The word tokenizer of a model without a chat template. It prepends <s> to a text."""
    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder, ["###", "Instruction:", "Response:", "the", "fox", "jumps", "why?"])
    (folder / "config.json").write_text("{}")
    return folder


def display() -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(Console(file=out, width=200)), out


def decoded(vocabulary: Vocabulary, tokens: np.ndarray) -> str:
    return vocabulary.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


# Plain text


def test_answers_and_end_tokens_count_in_plain_text(vocabulary):
    alpaca, pair, chat = vocabulary.encode_examples([ALPACA, PAIR, CHAT])
    for example, dialogue in ((alpaca, ALPACA), (pair, PAIR)):
        assert decoded(vocabulary, example.tokens) == END + dialogue.text + END
        assert decoded(vocabulary, example.tokens[example.counted]) == dialogue.turns[-1].content + END
        assert (example.tokens == END_ID).sum() == 2, "an answer that spells the end token must not contain it"
    assert decoded(vocabulary, chat.tokens[chat.counted]) == f"hello{END}no{END}"
    assert decoded(vocabulary, chat.tokens).endswith(f"hello{END}### Instruction:\nmore\n\n### Response:\nno{END}")
    whole = vocabulary.tokenizer.encode(ALPACA.text).ids
    assert alpaca.tokens.tolist() == [END_ID, *whole, END_ID], "the tokens must be those of the whole text"
    assert alpaca.name == "a.jsonl:1"


def test_a_prompt_is_the_beginning_of_its_example(vocabulary, base):
    for words in (vocabulary, read_hub_vocabulary(base)):
        (example,) = words.encode_examples([Dialogue("a", (Turn("user", "why? fox"), Turn("assistant", "the fox")))])
        prompt = words.chat_prompt("why? fox")
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert example.counted.tolist() == [i >= len(prompt) for i in range(len(example.tokens))]
        assert words.format.ends == (words.end,)


def test_a_folder_without_a_chat_template_has_its_own_first_token_and_end(base):
    vocabulary = read_hub_vocabulary(base)
    word = vocabulary.tokenizer.token_to_id
    (example,) = vocabulary.encode_examples([Dialogue("a", (Turn("prompt", "the fox "), Turn("completion", "jumps")))])
    assert example.tokens.tolist() == [1, word("the"), word("fox"), word("jumps"), 2]
    assert example.counted.tolist() == [False] * 3 + [True] * 2
    with pytest.raises(RunError, match=r"--data: a\.jsonl:9 contains </s>, which is the end token of answers"):
        vocabulary.encode_examples([Dialogue("a.jsonl:9", (Turn("prompt", "the </s> "), Turn("completion", "fox")))])
    (base.parent / "endless").mkdir()
    (base.parent / "endless" / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    with pytest.raises(RunError, match="defines no end-of-text token"):
        read_hub_vocabulary(base.parent / "endless").encode_examples([PAIR])


def test_a_tokenizer_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(RunError, match=f"^cannot read a tokenizer: no such folder: {tmp_path}/absent$"):
        read_hub_vocabulary(tmp_path / "absent")


def test_texts_and_dialogues_are_not_interchangeable(vocabulary):
    with pytest.raises(RunError, match="--data must have texts, got dialogues"):
        vocabulary.encode([PAIR])
    with pytest.raises(RunError, match="--data must have dialogues, got texts"):
        vocabulary.encode_examples([Document("a", "text")])


# Fitting


def example(name: str, counted: str) -> Example:
    return Example(name, np.arange(len(counted), dtype=np.int32), np.array([mark == "1" for mark in counted]))


def test_examples_are_truncated_or_dropped():
    fitted = fit_examples(
        [example("a", "0001111"), example("b", "000001"), example("c", "0011"), example("d", "10000")], 4
    )
    assert [(e.name, e.tokens.tolist(), e.counted.tolist()) for e in fitted.examples] == [
        ("a", [0, 1, 2, 3, 4], [False, False, False, True, True]),
        ("c", [0, 1, 2, 3], [False, False, True, True]),
    ]
    assert (fitted.cut, fitted.dropped) == (1, 2)
    assert fitted.describe() == ("of 4 examples, 1 (25%) truncated, 2 (50%) dropped because no answer would be left")
    assert fit_examples([example("a", "00011")], 4).cut == 0, "T positions predict T tokens from T + 1"
    with pytest.raises(RunError, match=r"none of 2 examples has an answer within --max-seq-len 2: .* after 3 tokens"):
        fit_examples([example("a", "0001"), example("b", "00001")], 2)


def test_packed_examples_survive_the_array_format():
    examples = [example("a", "0001"), example("b", "011"), example("c", "1")]
    again = from_arrays(to_arrays(examples), ["a", "b", "c"])
    for one, other in zip(examples, again, strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.counted, other.counted)
    for wrong in ({"counted": np.zeros(3, bool)}, {"lengths": np.array([4, 3])}):
        with pytest.raises(ValueError, match="inconsistent lengths"):
            from_arrays({**to_arrays(examples), **wrong}, ["a", "b", "c"])
    with pytest.raises(ValueError, match="zip"):
        from_arrays(to_arrays(examples), ["a", "b"])


# The cache


def corpus(kind: str, **changes: Any) -> Corpus:
    records = {
        "texts": ((Document("a", "the fox jumps"), Document("b", "over")), (Document("c", "a dog"),)),
        "dialogues": ((ALPACA, CHAT), (PAIR,)),
    }
    train, held_out = records[kind]
    return Corpus(**{"train": train, "held_out": held_out, "sha256": kind, "source": "", "skipped": 0, **changes})


def same(first: token_cache.Tokens, second: token_cache.Tokens) -> bool:
    def plain(tokens: np.ndarray | list[Example]) -> Any:
        if isinstance(tokens, np.ndarray):
            return tokens.dtype, tokens.tolist()
        return [(name, t.dtype, t.tolist(), counted.dtype, counted.tolist()) for name, t, counted in tokens]

    return plain(first.train) == plain(second.train) and plain(first.held_out) == plain(second.held_out)


@pytest.mark.parametrize("kind", ["texts", "dialogues"])
def test_tokens_are_encoded_once(vocabulary, tmp_path, kind, monkeypatch):
    shown, _ = display()
    first = read_or_encode(corpus(kind), vocabulary, tmp_path, shown)
    assert first.origin.startswith("encoded at ")
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(token_cache, "_encode", None)
    again = read_or_encode(corpus(kind), vocabulary, tmp_path, shown)
    assert again.origin == "cached"
    assert same(first, again)
    if kind == "texts":
        np.testing.assert_array_equal(again.train, vocabulary.encode(corpus(kind).train))
    monkeypatch.undo()
    assert read_or_encode(corpus(kind, sha256="other"), vocabulary, tmp_path, shown).origin != "cached"
    bytes_ = path.read_bytes()
    for broken in (bytes_[: len(bytes_) // 2], b"", bytes_.replace(first_tokens(first), b"\xff" * 8), b"PK\3\4 not so"):
        path.write_bytes(broken)
        mended = read_or_encode(corpus(kind), vocabulary, tmp_path, shown)
        assert f", because {path} was damaged (" in mended.origin
        assert same(first, mended)
        assert path.read_bytes() == bytes_


def first_tokens(tokens: token_cache.Tokens) -> bytes:
    array = tokens.train if isinstance(tokens.train, np.ndarray) else tokens.train[0].tokens
    return array[:2].tobytes()


def test_everything_that_tokens_depend_on_is_in_the_caches_key(vocabulary, base, tmp_path):
    def key(kind: str, words: Vocabulary, **changes: Any) -> str:
        return token_cache._key(corpus(kind, **changes), words)

    other = tmp_path / "other"
    write_tokenizer(other, ["the"])
    keys = [key(kind, words) for kind in ("texts", "dialogues") for words in (vocabulary, read_hub_vocabulary(base))]
    keys += [key(kind, read_hub_vocabulary(other)) for kind in ("texts", "dialogues")]
    for template in ("{{ bos_token }}", "{{ eos_token }}", "{{ strftime_now('%d') }}"):
        (other / "chat_template.jinja").write_text(template)
        keys.append(key("dialogues", read_hub_vocabulary(other)))
    for date in ("2024-01-01", "2024-01-02"):
        (other / "chat_date.txt").write_text(date)
        keys.append(key("dialogues", read_hub_vocabulary(other)))
    values = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**values, "bos_token": "</s>"}))
    keys.append(key("dialogues", read_hub_vocabulary(other)))
    keys.append(key("texts", vocabulary, sha256="other"))
    assert len(set(keys)) == len(keys)
    (other / "chat_template.jinja").write_text("{{ bos_token }}")
    undated = key("dialogues", read_hub_vocabulary(other))
    (other / "chat_date.txt").write_text("2024-01-03")
    assert key("dialogues", read_hub_vocabulary(other)) == undated


def test_unwritable_cache_does_not_stop_training(vocabulary, tmp_path):
    (tmp_path / "file").write_text("")
    tokens = read_or_encode(corpus("texts"), vocabulary, tmp_path / "file", display()[0])
    assert ", not cached: " in tokens.origin
    tokens = read_or_encode(corpus("texts"), vocabulary, tmp_path / ("x" * 300), display()[0])  # Path.is_file raises
    assert ", not cached: " in tokens.origin
    assert len(tokens.train) > 0


def test_slow_encoding_reports_progress(monkeypatch):
    shown, out = display()
    with shown.counting("tokenizing", 3000) as show:
        show(1000)
        assert out.getvalue() == ""
        monkeypatch.setattr("flax_models.display.SECONDS_BETWEEN_LINES", 0.0)
        show(2000)
    assert out.getvalue() == "tokenizing  2,000/3,000\n"
    terminal = io.StringIO()
    with Display(Console(file=terminal, force_terminal=True, width=80)).counting("tokenizing", 3000) as show:
        show(3000)
    assert "3000/3000" in terminal.getvalue()


# Output of a run


def read(config: RunConfig) -> tuple[Text, str]:
    shown, out = display()
    return read_text(config, None, shown), out.getvalue()


def test_a_run_says_what_it_learns_from(tmp_path, base, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    lines = [{"messages": turns * 2, "id": i} for i in range(12)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig(data=(data,), model=CONFIGS["micro"].model)
    text, output = read(config)
    assert isinstance(text.train, list)
    assert isinstance(text.held_out, list)
    assert len(text.train) + len(text.held_out) == 12
    assert load_corpus([data]).train == text.corpus.train
    assert f"corpus     {data}: {len(text.train)} dialogues and {len(text.held_out)} held out, " in output
    assert ", unused fields: id, 11 duplicate records, sha256 " in output
    assert "\nformat     plain text (### Instruction, ### Response), because there is no chat template\n" in output
    assert f" in {len(text.train)} examples (" in output
    assert "% count in the loss) held out, encoded at " in output
    assert read(config)[1].rstrip().endswith("% count in the loss) held out, cached")

    # A template that omits earlier answers and ends answers with a token that does not end generated text.
    hub = tmp_path / "hub"
    hub.mkdir()
    for path in base.iterdir():
        (hub / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '-' }} <pad> {% endfor %}"
    (hub / "chat_template.jinja").write_text(template)
    _, output = read(RunConfig(data=(data,), tokenizer=hub, model=CONFIGS["micro"].model))
    assert f"\nformat     the chat template of {hub / 'chat_template.jinja'}\n" in output
    assert (
        "\nwarning    12 of 24 answers do not count in the loss: the chat template formats them differently when"
        in output
    )
    assert "\nwarning    12 of 12 examples end with a token that does not end generated text: eos_token_id" in output
