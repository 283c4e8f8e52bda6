"""The training and evaluation data of a run: tokenized texts or dialogues, and their batches.

Texts form one stream of tokens, from which windows are sampled (data/batches.py). Dialogues are examples of different
lengths, which are packed into rows (data/packing.py). Texts can also be packed, so that attention does not cross
documents; texts longer than a row are split.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flax_models.data import tokenizer as own_tokenizer
from flax_models.data.batches import IGNORED, Batch, BatchSampler, DocumentIndex, Sampler, held_out_windows
from flax_models.data.corpus import Corpus, load_corpus
from flax_models.data.dialogue import Dialogue
from flax_models.data.examples import Example, fit_examples
from flax_models.data.packing import PackedSampler, describe_examples, pack_rows, room_for
from flax_models.data.token_cache import describe_tokens, findings, read_or_encode
from flax_models.data.vocabulary import Vocabulary, made_from_text, read_hub_vocabulary, read_run_vocabulary
from flax_models.display import Display
from flax_models.errors import RunError, naming
from flax_models.train.baselines import Baselines, baselines
from flax_models.train.config import RunConfig, TrainConfig
from flax_models.train.run_folder import read_record

TRIED = 512  # number of rows from which the share of padding is estimated: twice packing.BINS


class Text(NamedTuple):
    """A corpus, its vocabulary, and its tokens."""

    corpus: Corpus
    vocabulary: Vocabulary
    train: np.ndarray | list[Example]  # (n,) int32: texts, each followed by the end token
    held_out: np.ndarray | list[Example]


class Data(NamedTuple):
    """The batches of a run, and the baselines of its held-out loss."""

    sampler: Sampler
    held_out: Batch
    baselines: Baselines
    describe: Callable[[np.ndarray], str]  # describes a batch, given the sampler's `starts`
    lengths: int | np.ndarray  # length of all sequences, or of each
    columns: int | None  # number of columns of `Batch.lengths`; None: each row is one sequence
    tokens: float  # mean number of positions per step without padding
    size: int  # number of positions in one pass over the data
    facts: tuple[tuple[str, str], ...]  # (label, text) to display


def read_text(config: RunConfig, resumed: Path | None, display: Display) -> Text:
    """Reads the corpus and the tokenizer, displays facts about them, and tokenizes the corpus.

    Args:
        config: options of the run.
        resumed: folder of the run that is continued; None: a new run.
        display: prints the facts.

    Raises:
        RunError: a file cannot be read, a record cannot be encoded, or the text of a continued run has changed.
    """
    corpus = load_corpus(config.data)
    display.fact("corpus", _describe_corpus(corpus))
    if resumed and read_record(resumed).corpus_sha256 != corpus.sha256:
        raise RunError(f"--resume: the text has changed since {resumed} was started (its hash differs)")
    if resumed:
        vocabulary, origin = read_run_vocabulary(resumed), "from the run"
    elif source := config.weights or config.tokenizer:
        with naming("--weights" if config.weights else "--tokenizer"):
            vocabulary, origin = read_hub_vocabulary(source), f"from {source}"
    else:
        cache = own_tokenizer.cache_folder()
        tokenizer, origin = own_tokenizer.load_or_train(corpus.train, config.model.vocab_size, cache)
        vocabulary = made_from_text(tokenizer)
    display.fact("tokenizer", f"{vocabulary.tokenizer.get_vocab_size():,} entries, {origin}")
    if isinstance(corpus.train[0], Dialogue):
        display.fact("format", vocabulary.format.name)
    tokens = read_or_encode(corpus, vocabulary, own_tokenizer.cache_folder(), display)
    sizes = f"{describe_tokens(tokens.train)} to train on, {describe_tokens(tokens.held_out)} held out"
    display.fact("tokens", f"{sizes}, {tokens.origin}")
    for line in findings(tokens, corpus, vocabulary.ends):
        display.fact("warning", line)
    return Text(corpus, vocabulary, tokens.train, tokens.held_out)


def _describe_corpus(corpus: Corpus) -> str:
    size = sum(len(document.text) for document in (*corpus.train, *corpus.held_out))
    skipped = f", {corpus.skipped:,} files skipped that are not UTF-8 text" if corpus.skipped else ""
    notes = "".join(f", {note}" for note in corpus.notes)
    what = "dialogues" if isinstance(corpus.train[0], Dialogue) else "texts"
    return (
        f"{corpus.source}: {len(corpus.train)} {what} and {len(corpus.held_out)} held out, {size:,} characters"
        f"{skipped}{notes}, sha256 {corpus.sha256[:16]}"
    )


def make_data(text: Text, config: TrainConfig, length: int, seed: int, vocab_size: int) -> Data:
    """Returns the batches of a run.

    Args:
        text: the tokenized corpus.
        config: batch size, and how rows are filled.
        length: T, positions per row.
        seed: random seed of the order.
        vocab_size: the model's vocab_size, for the baselines.

    Raises:
        RunError: there is too little data to train on or to evaluate, or --packing does not support it.
    """
    if isinstance(text.train, np.ndarray) and isinstance(text.held_out, np.ndarray):
        if config.packing in (None, "windows"):
            return _windows(text, text.train, text.held_out, config, length, seed, vocab_size)
        end, names = text.vocabulary.needed_end(), [document.name for document in text.corpus.train]
        train = _pieces(text.train, end, names, length)
        held_out = _pieces(text.held_out, end, [document.name for document in text.corpus.held_out], length)
        return _packed(train, held_out, (), config, length, seed, vocab_size)
    assert isinstance(text.train, list)
    assert isinstance(text.held_out, list)
    if config.packing == "windows":
        raise RunError("--packing must be best_fit or none for dialogues, got windows")
    facts: list[tuple[str, str]] = []
    fitted = [fit_examples(examples, length) for examples in (text.train, text.held_out)]
    if any(part.cut or part.dropped for part in fitted):
        facts = [("warning", f"--max-seq-len {length}: {fitted[0].describe()}; held out: {fitted[1].describe()}")]
    return _packed(fitted[0].examples, fitted[1].examples, facts, config, length, seed, vocab_size)


def _windows(
    text: Text, stream: np.ndarray, held_out: np.ndarray, config: TrainConfig, length: int, seed: int, vocab_size: int
) -> Data:
    sampler = BatchSampler(stream, config.batch_size, length, seed)
    windows = held_out_windows(held_out, length, config.held_out_windows)
    index = DocumentIndex(stream, text.vocabulary.needed_end(), [document.name for document in text.corpus.train])
    return Data(
        sampler=sampler,
        held_out=windows,
        baselines=_baselines(stream, windows, vocab_size),
        describe=lambda starts: index.describe(starts, length),
        lengths=length,
        columns=None,
        tokens=config.batch_size * length,
        size=len(stream),
        facts=(),
    )


def _packed(
    train: list[Example],
    held_out: list[Example],
    facts: Sequence[tuple[str, str]],
    config: TrainConfig,
    length: int,
    seed: int,
    vocab_size: int,
) -> Data:
    lengths = np.asarray([len(example.tokens) - 1 for example in train])
    room = 1 if config.packing == "none" or not train else room_for(lengths, length)
    windows = pack_rows(held_out, length, config.held_out_windows, room=room)
    sampler = PackedSampler(train, config.batch_size, length, seed, room=room)
    share = _padding(train, length, seed, room)
    how = f"best fit, at most {sampler.columns - 1} examples per row" if room > 1 else "none, one example per row"
    return Data(
        sampler=sampler,
        held_out=windows,
        baselines=_baselines(np.concatenate([example.tokens for example in train]), windows, vocab_size),
        describe=lambda indices: describe_examples(train, indices),
        lengths=lengths,
        columns=sampler.columns,
        tokens=config.batch_size * length * (1 - share),
        size=int(np.sum(lengths)),
        facts=(*facts, ("packing", f"{how}: {share:.2%} padding")),
    )


def _baselines(stream: np.ndarray, windows: Batch, vocab_size: int) -> Baselines:
    counted = windows.targets != IGNORED
    return baselines(stream, windows.tokens[counted], windows.targets[counted], vocab_size)


def _padding(examples: list[Example], length: int, seed: int, room: int) -> float:
    """Returns the share of padding in the first rows of a pass."""
    sampler = PackedSampler(examples, 1, length, seed, room=room)
    tokens, count = 0, 0
    while count < TRIED:
        sampler.next()
        if sampler.passes:
            break
        tokens, count = tokens + sampler.tokens, count + 1
    sampler.close()
    return 1 - tokens / (count * length)


def _pieces(stream: np.ndarray, end: int, names: Sequence[str], length: int) -> list[Example]:
    """Converts the documents of a stream to examples whose tokens all count in the loss.

    A document longer than a row becomes several examples that overlap by one token.
    """
    bounds = pairwise([0, *(np.flatnonzero(stream == end) + 1).tolist()])

    def cut() -> Iterator[Example]:
        for name, (first, last) in zip(names, bounds, strict=True):
            for start in range(first, last - 1, length):
                tokens = stream[start : min(start + length + 1, last)]
                yield Example(f"{name}, from its token {start - first:,}", tokens, np.ones(len(tokens), bool))

    return list(cut())
