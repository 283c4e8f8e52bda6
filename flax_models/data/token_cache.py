"""Cache of tokenized corpora: a corpus is encoded once, and later runs on the same text read the tokens from a file.

The file name is a hash of everything that the tokens depend on: the texts, the tokenizer, the chat template and the
library versions. Cache files may be deleted at any time.
"""

import hashlib
import os
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flax_models.data.atomic_file import atomic_file
from flax_models.data.corpus import Corpus
from flax_models.data.dialogue import Dialogue
from flax_models.data.examples import Example, from_arrays, to_arrays
from flax_models.data.vocabulary import Vocabulary
from flax_models.display import Display

_VERSION = "tokens 1"  # part of the key; increment whenever reading, splitting, formatting or encoding changes


class Tokens(NamedTuple):
    """A tokenized corpus: token streams (n,) int32 of texts, or examples of dialogues.

    Attributes:
        origin: human-readable note on whether the tokens were cached or encoded.
    """

    train: np.ndarray | list[Example]
    held_out: np.ndarray | list[Example]
    origin: str


def read_or_encode(corpus: Corpus, vocabulary: Vocabulary, folder: Path, display: Display) -> Tokens:
    """Returns the tokens of a corpus, from the cache or newly encoded.

    A damaged cache file is replaced. If the cache cannot be written, the run continues without it. `Tokens.origin`
    reports both.

    Args:
        corpus: texts or dialogues.
        vocabulary: the vocabulary that encodes them.
        folder: folder of the cache.
        display: shows progress.

    Raises:
        RunError: a record cannot be encoded; the message names it.
    """
    path = folder / f"tokens-{_key(corpus, vocabulary)[:32]}.npz"
    fault = ""
    if os.path.isfile(path):  # Path.is_file raises in a folder without search permission
        try:
            return _from_arrays(_read(path), corpus, "cached")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            fault = f", because {path} was damaged ({' '.join(str(error).split())})"
    began = time.monotonic()
    arrays = _encode(corpus, vocabulary, display)
    count = sum(array.size for name, array in arrays.items() if "tokens" in name)
    origin = f"encoded at {count / (time.monotonic() - began):,.0f} tokens per second{fault}"
    try:
        _write(path, arrays)
    except OSError as error:
        origin += f", not cached: cannot write {folder}: {error.strerror}"
    return _from_arrays(arrays, corpus, origin)


def describe_tokens(tokens: np.ndarray | list[Example]) -> str:
    """Describes the number of tokens and, for examples, the percentage that counts in the loss."""
    if isinstance(tokens, np.ndarray):
        return f"{len(tokens):,}"
    counted, total = sum(int(e.counted.sum()) for e in tokens), sum(len(e.tokens) for e in tokens)
    return f"{total:,} in {len(tokens):,} examples ({100 * counted / total:.3g}% count in the loss)"


def findings(tokens: Tokens, corpus: Corpus, ends: Sequence[int]) -> list[str]:
    """Returns one warning line for each problem with the examples; none for texts.

    Args:
        tokens: tokens of the corpus.
        corpus: the corpus.
        ends: tokens that end generated text.
    """
    if not (isinstance(tokens.train, list) and isinstance(tokens.held_out, list)):
        return []
    examples = [*tokens.train, *tokens.held_out]
    answers = sum(record.answers for record in (*corpus.train, *corpus.held_out) if isinstance(record, Dialogue))
    counted = sum(int(np.count_nonzero(np.diff(e.counted, prepend=False) & e.counted)) for e in examples)
    unended = sum(int(e.tokens[np.flatnonzero(e.counted)[-1]]) not in ends for e in examples)
    lines = []
    if missed := max(0, answers - counted):
        lines.append(
            f"{missed:,} of {answers:,} answers do not count in the loss: the chat template formats them differently "
            f"when more turns follow"
        )
    if unended:
        lines.append(
            f"{unended:,} of {len(examples):,} examples end with a token that does not end generated text: "
            f"eos_token_id of generation_config.json should list the token with which the chat template ends answers"
        )
    return lines


def _key(corpus: Corpus, vocabulary: Vocabulary) -> str:
    import tokenizers

    parts = [_VERSION, tokenizers.__version__, corpus.sha256, str(len(corpus.train)), vocabulary.tokenizer.to_str()]
    if isinstance(corpus.train[0], Dialogue):
        parts += vocabulary.format.key
    else:
        parts += ["texts", str(vocabulary.folder is None), str(vocabulary.end)]
    digest = hashlib.sha256()
    for part in map(str.encode, parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _encode(corpus: Corpus, vocabulary: Vocabulary, display: Display) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    total = len(corpus.train) + len(corpus.held_out)
    with display.counting("tokenizing", total) as show:
        for part, records, before in (("train", corpus.train, 0), ("held_out", corpus.held_out, len(corpus.train))):

            def progress(done: int, before: int = before) -> None:
                show(before + done)

            if isinstance(records[0], Dialogue):
                packed = to_arrays(vocabulary.encode_examples(records, progress))
                arrays |= {f"{part}_{name}": array for name, array in packed.items()}
            else:
                arrays[f"{part}_tokens"] = vocabulary.encode(records, progress)
    return arrays


def _from_arrays(arrays: dict[str, np.ndarray], corpus: Corpus, origin: str) -> Tokens:
    if not isinstance(corpus.train[0], Dialogue):
        return Tokens(arrays["train_tokens"], arrays["held_out_tokens"], origin)
    train, held_out = (
        from_arrays(
            {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)},
            [record.name for record in records],
        )
        for prefix, records in (("train_", corpus.train), ("held_out_", corpus.held_out))
    )
    return Tokens(train, held_out, origin)


def _read(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)  # reading verifies the CRC-32 of each array


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a file atomically; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power failure may leave an empty file
