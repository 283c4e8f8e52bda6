"""Tests the data of flax_models: corpus, split, tokenizer and its cache, windows, and baselines."""

import errno
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flax_models.data.batches import IGNORED, BatchSampler, held_out_windows, padded
from flax_models.data.corpus import STDLIB_EXCLUDED, load_corpus
from flax_models.data.dialogue import Dialogue, Document
from flax_models.data.tokenizer import END, END_ID, cache_folder, encode, load_or_train
from flax_models.errors import RunError
from flax_models.train.baselines import BigramCounts, baselines, fit_mixture
from flax_models.train.task_data import _describe_corpus


def write_texts(folder: Path, count: int, lines: int = 20) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"text{i:03}.txt").write_text("".join(f"line {j} of text {i}\n" for j in range(lines)))


def names(documents: Sequence[Document | Dialogue]) -> set[str]:
    return {document.name for document in documents}


# Corpus


def test_default_corpus_is_the_standard_library_split_by_file():
    corpus = load_corpus()
    train, held_out = names(corpus.train), names(corpus.held_out)
    assert {"ast.py", "json/decoder.py"} <= train | held_out
    assert not any(STDLIB_EXCLUDED & set(name.split("/")) for name in train | held_out)
    assert not train & held_out
    sizes = [sum(len(document.text) for document in part) for part in (corpus.train, corpus.held_out)]
    assert 0.05 < sizes[1] / sum(sizes) < 0.10
    assert load_corpus() == corpus


def test_split_depends_on_names_and_not_on_the_path(tmp_path):
    write_texts(tmp_path / "a", 40)
    write_texts(tmp_path / "elsewhere" / "b", 40)
    first, second = load_corpus([tmp_path / "a"]), load_corpus([tmp_path / "elsewhere" / "b"])
    assert (first.train, first.held_out, first.sha256) == (second.train, second.held_out, second.sha256)
    assert len(first.held_out) >= 2


def test_hash_sees_every_text(tmp_path):
    write_texts(tmp_path / "a", 12)
    before = load_corpus([tmp_path / "a"]).sha256
    (tmp_path / "a" / "text003.txt").write_text("something else\n")
    assert load_corpus([tmp_path / "a"]).sha256 != before


def test_few_files_are_each_cut_at_a_line(tmp_path):
    write_texts(tmp_path / "a", 2, lines=100)
    corpus = load_corpus([tmp_path / "a"])
    for train, held_out in zip(corpus.train, corpus.held_out, strict=True):
        whole = (tmp_path / "a" / train.name).read_text()
        assert train.text + held_out.text == whole
        assert train.text.endswith("\n")
        assert 0.05 < len(held_out.text) / len(whole) < 0.15


def test_one_long_line_is_cut_too(tmp_path):
    (tmp_path / "line.txt").write_text("word " * 1000)
    corpus = load_corpus([tmp_path / "line.txt"])
    assert len(corpus.held_out[0].text) == 500


def test_one_long_file_is_not_held_out(tmp_path):
    write_texts(tmp_path / "a", 30)
    (tmp_path / "a" / "long.txt").write_text("a long text\n" * 100_000)
    assert "long.txt" in names(load_corpus([tmp_path / "a"]).train)


def test_folder_skips_hidden_files_and_counts_files_that_are_not_utf8_text(tmp_path):
    write_texts(tmp_path / "a", 3)
    (tmp_path / "a" / ".hidden").mkdir()
    (tmp_path / "a" / ".hidden" / "x.txt").write_text("no")
    (tmp_path / "a" / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "a" / "null.bin").write_bytes(b"\0\0\0")
    (tmp_path / "a" / "empty.txt").write_text("  \n")
    corpus = load_corpus([tmp_path / "a"])
    assert names(corpus.train) == {"text000.txt", "text001.txt", "text002.txt"}
    assert corpus.skipped == 2  # latin.txt and null.bin
    assert "characters, 2 files skipped that are not UTF-8 text, sha256 " in _describe_corpus(corpus)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    for name in ("a", ".hidden"):
        write_texts(tmp_path / "data" / name, 3)
    original = os.scandir

    def scandir(path: Path):
        if Path(path).name == unreadable:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    unreadable = ".hidden"
    assert names(load_corpus([tmp_path / "data"]).train) == {f"a/text00{i}.txt" for i in range(3)}
    unreadable = "a"
    with pytest.raises(RunError, match=r"--data: cannot read .*data/a: Permission denied"):
        load_corpus([tmp_path / "data"])


def test_invalid_paths_raise(tmp_path):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "null.txt").write_text("a\0b")
    (tmp_path / "empty.txt").write_text("")
    for path, message in [
        (tmp_path / "absent", "no such file or folder: .*absent"),
        (tmp_path / "nothing", "no text found in .*nothing"),
        (tmp_path / "empty.txt", "no text found in .*empty.txt"),
        (tmp_path / "latin.txt", "latin.txt is not UTF-8 text"),
        (tmp_path / "null.txt", "null.txt is not text: it has a null character"),
    ]:
        with pytest.raises(RunError, match=message):
            load_corpus([path])


# Tokenizer

TEXTS = [Document("a", "the quick brown fox the quick brown dog\n" * 20), Document("b", f"été {END} 日本\n")]


def test_cached_tokenizer_equals_the_trained_one(tmp_path):
    first, origin = load_or_train(TEXTS, 300, tmp_path)
    again, second_origin = load_or_train(TEXTS, 300, tmp_path)
    assert (origin, second_origin) == ("trained", "cached")
    assert first.to_str() == again.to_str()
    assert len(list(tmp_path.iterdir())) == 1


def test_tokenizer_depends_on_text_and_size(tmp_path):
    load_or_train(TEXTS, 300, tmp_path)
    assert load_or_train(TEXTS, 290, tmp_path)[1] == "trained"
    assert load_or_train(TEXTS[:1], 300, tmp_path)[1] == "trained"
    assert len(list(tmp_path.iterdir())) == 3


def test_any_text_survives_and_each_document_ends(tmp_path):
    tokenizer, _ = load_or_train(TEXTS, 300, tmp_path)
    tokens = encode(tokenizer, TEXTS)
    assert tokens.dtype == np.int32
    ends = np.flatnonzero(tokens == END_ID)
    assert len(ends) == 2, "a text that spells the end token must not contain it"
    assert ends[-1] == len(tokens) - 1
    assert tokenizer.decode(tokens[: ends[0]].tolist()) == TEXTS[0].text
    assert tokenizer.decode(tokens[ends[0] + 1 : ends[1]].tolist()) == TEXTS[1].text


def test_cached_tokenizer_encodes_the_text_of_the_end_token_as_text(tmp_path):
    for _ in range(2):
        tokenizer, _ = load_or_train(TEXTS, 300, tmp_path)
        assert END_ID not in tokenizer.encode(END).ids


def test_damaged_cache_and_too_small_vocabulary_raise(tmp_path):
    load_or_train(TEXTS, 300, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    with pytest.raises(RunError, match=path.name):
        load_or_train(TEXTS, 300, tmp_path)
    with pytest.raises(RunError, match=r"--vocab-size must be at least 257 .*, got 256"):
        load_or_train(TEXTS, 256, tmp_path)


def test_unwritable_cache_does_not_stop_training(tmp_path):
    (tmp_path / "file").write_text("")
    tokenizer, origin = load_or_train(TEXTS, 300, tmp_path / "file")
    assert tokenizer.get_vocab_size() > 257
    assert origin.startswith("trained, not cached: ")
    _, origin = load_or_train(TEXTS, 300, tmp_path / ("x" * 300))  # Path.is_file raises, like without search permission
    assert origin.startswith("trained, not cached: ")


def test_cache_folder_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/linear-ce")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "linear-ce"


# Windows


def test_a_pass_draws_every_window_once_and_targets_are_the_next_tokens():
    stream = np.arange(101, dtype=np.int32)
    sampler = BatchSampler(stream, batch_size=3, length=10, seed=0)
    batches = [sampler.next() for _ in range(3)]  # 10 windows minus one for the offset: 9
    assert sampler.passes == 0
    for batch in batches:
        assert batch.tokens.shape == batch.targets.shape == (3, 10)
        np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    starts = np.sort(np.concatenate([batch.tokens[:, 0] for batch in batches]))
    np.testing.assert_array_equal(np.diff(starts), 10)
    sampler.next()
    assert sampler.passes == 1


@pytest.mark.parametrize("drawn", [0, 1, 3, 4, 11])
def test_sampler_resumes_from_its_json_state(drawn):
    stream = np.arange(101, dtype=np.int32)
    sampler = BatchSampler(stream, batch_size=3, length=10, seed=5)
    for _ in range(drawn):
        sampler.next()
    state = json.loads(json.dumps(sampler.state()))
    other = BatchSampler(stream, batch_size=3, length=10, seed=99)
    other.restore(state)
    for _ in range(8):
        np.testing.assert_array_equal(sampler.next().tokens, other.next().tokens)
    assert sampler.state() == other.state()


def test_seeds_give_different_orders():
    stream = np.arange(1001, dtype=np.int32)
    first, second = (BatchSampler(stream, batch_size=8, length=10, seed=seed).next().tokens for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_too_little_text_raises():
    with pytest.raises(RunError, match="too little text to train on: got 40 tokens, a batch of 4 x 10 needs 51"):
        BatchSampler(np.zeros(40, np.int32), batch_size=4, length=10, seed=0)
    BatchSampler(np.zeros(51, np.int32), batch_size=4, length=10, seed=0)
    with pytest.raises(RunError, match="too little text to hold out: got 10 tokens, one window needs 11"):
        held_out_windows(np.zeros(10, np.int32), length=10, most=5)


def test_held_out_windows_are_spread_and_do_not_overlap():
    windows = held_out_windows(np.arange(1001, dtype=np.int32), length=10, most=5)
    np.testing.assert_array_equal(windows.tokens[:, 0], [0, 250, 500, 740, 990])
    np.testing.assert_array_equal(windows.targets, windows.tokens + 1)
    assert len(held_out_windows(np.arange(35, dtype=np.int32), length=10, most=5).tokens) == 3


def test_padding_rows_have_no_targets():
    windows = held_out_windows(np.arange(51, dtype=np.int32), length=10, most=5)
    batches = padded(windows, 4)
    assert [batch.tokens.shape for batch in batches] == [(4, 10), (4, 10)]
    assert sum(int((batch.targets != IGNORED).sum()) for batch in batches) == windows.targets.size


# Baselines


def test_counts_and_the_three_terms_by_hand():
    counts = BigramCounts(np.array([0, 1, 0, 1, 0, 2]), vocab_size=4)
    bigram, unigram, uniform = counts.probabilities(np.array([0, 0, 1, 2, 3]), np.array([1, 2, 0, 0, 3]))
    np.testing.assert_allclose(
        bigram, [2 / 3, 1 / 3, 1, 0, 0]
    )  # 0 after a token without a successor, and for a token that never occurs
    np.testing.assert_allclose(unigram, [3 / 10, 2 / 10, 4 / 10, 4 / 10, 1 / 10])
    np.testing.assert_allclose(uniform, 0.25)


def test_mixture_maximizes_the_likelihood_on_a_grid():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(3), size=40).T
    probabilities[0, ::3] = 0.0
    fitted = np.log(fit_mixture(probabilities) @ probabilities).mean()
    values = np.linspace(0.01, 0.98, 50)
    grid = np.array([(a, b, 1 - a - b) for a in values for b in values if a + b < 1])
    assert fitted >= np.log(grid @ probabilities).mean(axis=1).max() - 1e-4


def test_baselines_on_a_stream_that_alternates():
    stream = np.array([0, 1] * 200)
    context, token = np.array([0, 1, 0]), np.array([1, 0, 1])
    result = baselines(stream, context, token, vocab_size=4)
    assert result.uniform == pytest.approx(math.log(4))
    assert result.unigram == pytest.approx(-math.log(201 / 404))
    assert result.bigram == pytest.approx(0.0, abs=1e-3)


def test_no_held_out_pair_has_probability_zero():
    result = baselines(np.array([0, 1, 2, 0, 1, 2, 0, 1]), np.array([3, 2]), np.array([3, 3]), vocab_size=5)
    assert all(math.isfinite(value) for value in result)


def test_baselines_raise_for_missing_tokens():
    with pytest.raises(ValueError, match="stream must have at least two tokens, got 1"):
        baselines(np.array([0]), np.array([0]), np.array([0]), vocab_size=2)
    with pytest.raises(ValueError, match="token must have at least one entry, got none"):
        baselines(np.array([0, 1]), np.array([], int), np.array([], int), vocab_size=2)
