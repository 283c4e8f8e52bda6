"""Text to train on: read it, name it by a hash, hold some of it out.

Without paths the corpus is the Python standard library of the running interpreter: real text, several million tokens of
it, there on every machine that can run this program, and nothing to download. It is split by file, since lines of one
file repeat each other and a split inside files would flatter the held-out loss.
"""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flax_models.errors import RunError

# Tests and generated tables, an application, and packages that are not the library's own.
STDLIB_EXCLUDED = frozenset({"test", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"})
HELD_OUT_SHARE = (
    0.06  # of the characters: about 130,000 tokens of the standard library, a standard error near 0.01 nats
)
FEWEST_FILES = 10  # under this a split by file is too coarse, and the end of each file is held out instead


class Document(NamedTuple):
    """One text and the name it is split by."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out.

    Args:
        train: documents the tokenizer, the baselines and the model see.
        held_out: documents none of them sees.
        sha256: hash over every name and text.
        source: what it is, for people.
        skipped: files left out since they are not UTF-8 text.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str
    source: str
    skipped: int


def load_corpus(paths: Sequence[Path] = ()) -> Corpus:
    """Reads and splits a corpus; which documents are held out depends on their names and sizes alone.

    Args:
        paths: text files, or folders searched for them (hidden files and folders, and files that are not UTF-8, are
            passed over); none means the Python standard library.

    Returns:
        The corpus.

    Raises:
        RunError: a path does not exist, cannot be read, is a file that is not UTF-8, or no text is found.

    Example:
        >>> corpus = load_corpus()
        >>> len(corpus.train) > len(corpus.held_out) > 0
        True
    """
    documents: list[Document] = []
    skipped = 0
    for name, path, required in _files(paths):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            if required:
                raise RunError(f"--data: {path} is not UTF-8 text") from None
            skipped += 1
            continue
        except OSError as error:
            raise RunError(f"--data: cannot read {path}: {error.strerror}") from None
        if text.strip() and "\0" not in text:
            documents.append(Document(name, text))
    source = ", ".join(map(str, paths)) if paths else "Python standard library"
    if not documents:
        raise RunError(f"--data: no text found in {source}")
    digest = hashlib.sha256()
    for name, text in documents:
        for part in (name.encode(), text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    train, held_out = _split(documents)
    return Corpus(train, held_out, digest.hexdigest(), source, skipped)


def _files(paths: Sequence[Path]) -> Iterator[tuple[str, Path, bool]]:
    """Yields (name, path, named by the user) of each file, in an order that does not depend on the file system."""
    if not paths:
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if not STDLIB_EXCLUDED.intersection(relative.parts):
                yield relative.as_posix(), path, False
        return
    for root in paths:
        if root.is_file():
            yield root.name, root, True
        elif root.is_dir():
            for path in sorted(root.rglob("*")):
                relative = path.relative_to(root)
                if path.is_file() and not any(part.startswith(".") for part in relative.parts):
                    yield relative.as_posix(), path, False
        else:
            raise RunError(f"--data: no such file or folder: {root}")


def _split(documents: Sequence[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Returns (train, held out): files in the order of their names' hashes, until the held-out share is reached."""
    if len(documents) < FEWEST_FILES:
        cuts = [_cut(document.text) for document in documents]
        train = (Document(d.name, d.text[:cut]) for d, cut in zip(documents, cuts, strict=True))
        held_out = (Document(d.name, d.text[cut:]) for d, cut in zip(documents, cuts, strict=True))
        return tuple(train), tuple(held_out)
    wanted = HELD_OUT_SHARE * sum(len(document.text) for document in documents)
    order = sorted(range(len(documents)), key=lambda i: hashlib.sha256(documents[i].name.encode()).digest())
    chosen: set[int] = set()
    size = 0
    for i in order:
        length = len(documents[i].text)
        if size + length <= 1.5 * wanted:  # one long file must not double the share
            chosen.add(i)
            size += length
        if size >= wanted:
            break
    if not chosen:  # every file is longer than the share: the shortest does least harm to training
        chosen.add(min(range(len(documents)), key=lambda i: len(documents[i].text)))
    train = tuple(document for i, document in enumerate(documents) if i not in chosen)
    return train, tuple(documents[i] for i in sorted(chosen))


def _cut(text: str) -> int:
    """Returns where the last tenth of a text begins, at the start of a line if it has one there."""
    position = len(text) - max(1, len(text) // 10)
    line = text.find("\n", position)
    return position if line in (-1, len(text) - 1) else line + 1
