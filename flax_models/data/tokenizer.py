"""Byte-level BPE, trained on the training part of the corpus and cached under a hash of the corpus.

The alphabet has every byte, so any text can be encoded and there is no "unknown" token.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flax_models.data.atomic_file import atomic_file
from flax_models.data.dialogue import Dialogue, Document, in_batches
from flax_models.errors import RunError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|end|>"  # after each document, and before the first token of generated text
END_ID = 0
SMALLEST_VOCABULARY = 257  # 256 bytes and END
_VERSION = "byte-level BPE 1"  # part of the cache key; increment whenever the training below changes


def cache_folder() -> Path:
    """Returns the cache folder: `linear-ce` in XDG_CACHE_HOME or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "linear-ce"


def load_or_train(documents: Sequence[Document | Dialogue], vocab_size: int, folder: Path) -> tuple["Tokenizer", str]:
    """Returns the tokenizer for these documents, from the cache or newly trained.

    Args:
        documents: the training part of a corpus.
        vocab_size: maximum number of entries; little text may give fewer.
        folder: folder of the cache.

    Returns:
        (tokenizer, "cached" or "trained", with the reason if it could not be cached).

    Raises:
        UsageError: `vocab_size` is less than 257.
        RunError: the cached file is damaged.
    """
    import tokenizers

    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"--vocab-size must be at least {SMALLEST_VOCABULARY} (256 bytes and the end token), got {vocab_size}"
        )
    digest = hashlib.sha256(f"{_VERSION} {tokenizers.__version__} {vocab_size}".encode())
    for document in documents:
        text = document.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    path = folder / f"tokenizer-{digest.hexdigest()[:32]}.json"
    if os.path.isfile(path):  # Path.is_file raises in a folder without search permission
        return read(path), "cached"
    tokenizer = _train(documents, vocab_size)
    try:
        write(tokenizer, path)
    except OSError as error:  # training takes seconds: continue without a cache
        return tokenizer, f"trained, not cached: cannot write {folder}: {error.strerror}"
    return tokenizer, "trained"


def _train(documents: Sequence[Document | Dialogue], vocab_size: int) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return _as_plain_text(tokenizer)


def _as_plain_text(tokenizer: "Tokenizer") -> "Tokenizer":
    tokenizer.encode_special_tokens = True  # the string "<|end|>" in a text must not become the token END
    return tokenizer


def read(path: Path) -> "Tokenizer":
    """Reads a tokenizer from a file; raises RunError, which names the file, if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        return _as_plain_text(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception for a missing or damaged file
        raise RunError(f"cannot read the tokenizer {path} (delete it to recreate it): {error}") from None


def write(tokenizer: "Tokenizer", path: Path) -> None:
    """Writes a tokenizer atomically; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part:
        part.write_text(tokenizer.to_str(), encoding="utf-8")


def encode(
    tokenizer: "Tokenizer",
    documents: Sequence[Document],
    *,
    end: int = END_ID,
    template: bool = False,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Returns the tokens (n,) int32 of the documents, with `end` after each document.

    Args:
        tokenizer: a tokenizer of the tokenizers library.
        documents: the documents, in order.
        end: the end token. It appears once between two documents, even if the tokenizer's template also adds it.
        template: add the tokens of the tokenizer's template around each document.
        progress: called repeatedly with the number of documents done so far.

    Raises:
        RunError: a document contains `end`.
    """
    parts = []
    for batch in in_batches(documents):
        encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=template)
        for document, ids in zip(batch, (encoding.ids for encoding in encodings), strict=True):
            first = int(template and ids[:1] == [end])
            last = int(template and len(ids) > first and ids[-1] == end)
            inner = ids[first : len(ids) - last]
            if end in inner:  # possible if the token is also a regular entry of the vocabulary
                raise RunError(
                    f"--data: {document.name} contains {tokenizer.id_to_token(end)}, which is the end token of texts"
                )
            parts.append(np.asarray([*inner, end], np.int32))
        if progress is not None:
            progress(len(parts))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
