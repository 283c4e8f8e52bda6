"""Byte-level BPE: trained on the corpus's train part, kept in a cache under the corpus's hash.

Every byte is in the alphabet, so any text can be encoded and no entry stands for "unknown".
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flax_models.data.dialogue import Dialogue, Document, in_batches
from flax_models.errors import RunError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|end|>"  # stands after each document, and before the first token of generated text
END_ID = 0
SMALLEST_VOCABULARY = 257  # 256 bytes and END
_RECIPE = "byte-level BPE 1"  # in the cache's key: a new number whenever training below changes


def cache_folder() -> Path:
    """Returns the folder of cached tokenizers: `linear-ce` under XDG_CACHE_HOME, or under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "linear-ce"


def load_or_train(documents: Sequence[Document | Dialogue], vocab_size: int, folder: Path) -> tuple["Tokenizer", str]:
    """Returns the tokenizer of these documents, and a word on where it came from.

    Args:
        documents: the train part of a corpus.
        vocab_size: most entries; little text may give fewer.
        folder: the cache.

    Returns:
        (tokenizer, "cached" or "trained now", with the reason if it could not be cached).

    Raises:
        RunError: `vocab_size` is under 257, or the cached file is broken.
    """
    import tokenizers

    if vocab_size < SMALLEST_VOCABULARY:
        raise RunError(
            f"--vocab-size must be at least {SMALLEST_VOCABULARY} (the bytes and one more), got {vocab_size}"
        )
    digest = hashlib.sha256(f"{_RECIPE} {tokenizers.__version__} {vocab_size}".encode())
    for document in documents:
        text = document.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    path = folder / f"tokenizer-{digest.hexdigest()[:32]}.json"
    if os.path.isfile(path):  # Path.is_file raises in a folder without search permission
        return read(path), "cached"
    tokenizer = _train(documents, vocab_size)
    try:
        write(tokenizer, path)
    except OSError as error:  # a home that cannot be written to costs seconds at every start, not the run
        return tokenizer, f"trained now, not cached: {error.strerror} at {folder}"
    return tokenizer, "trained now"


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
    tokenizer.encode_special_tokens = True  # a text that spells END must not end itself
    return tokenizer


def read(path: Path) -> "Tokenizer":
    """Returns the tokenizer kept in a file; raises RunError naming the file if it holds none."""
    from tokenizers import Tokenizer

    try:
        return _as_plain_text(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception for a missing or broken file
        raise RunError(f"cannot read the tokenizer {path} (delete it to have it made again): {error}") from None


def write(tokenizer: "Tokenizer", path: Path) -> None:
    """Writes a tokenizer so that a reader sees the whole file or none; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(tokenizer.to_str(), encoding="utf-8")
    os.replace(part, path)


def encode(
    tokenizer: "Tokenizer",
    documents: Sequence[Document],
    *,
    end: int = END_ID,
    template: bool = False,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Returns the documents' tokens (n,) int32, `end` after each.

    Args:
        tokenizer: any of the tokenizers library.
        documents: in this order.
        end: the token; there is one between two documents, though a template put it before or after each, too.
        template: put around each document what the tokenizer's template says.
        progress: called with the number of documents done, every now and then.

    Raises:
        RunError: a document has `end` within it, which would be two documents.
    """
    parts = []
    for batch in in_batches(documents):
        encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=template)
        for document, ids in zip(batch, (encoding.ids for encoding in encodings), strict=True):
            first = int(template and ids[:1] == [end])
            last = int(template and len(ids) > first and ids[-1] == end)
            inner = ids[first : len(ids) - last]
            if end in inner:  # of tokenizers that know it as a word of its own, and not as a special token alone
                raise RunError(f"--data: {document.name} spells {tokenizer.id_to_token(end)}, which ends a text")
            parts.append(np.asarray([*inner, end], np.int32))
        if progress is not None:
            progress(len(parts))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
