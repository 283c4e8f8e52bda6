"""Texts or dialogues to train on: read them, name them by a hash, hold some of them out.

Without paths the corpus is the Python standard library of the running interpreter: real text, several million tokens of
it, there on every machine that can run this program, and nothing to download. It is split by file, since lines of one
file repeat each other and a split inside files would flatter the held-out loss.

Files of records (`flax_models.data.records`) hold texts or dialogues; the same code holds some of either out.
"""

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flax_models.data.dialogue import Dialogue, Document
from flax_models.data.records import read_records
from flax_models.errors import RunError

# Tests and generated tables, an application, and packages that are not the library's own.
STDLIB_EXCLUDED = frozenset({"test", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"})
HELD_OUT_SHARE = (
    0.06  # of the characters: about 130,000 tokens of the standard library, a standard error near 0.01 nats
)
FEWEST_FILES = 10  # under this a split by file is too coarse, and the end of each file is held out instead


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, or dialogues.

    Args:
        train: what the tokenizer, the baselines and the model see.
        held_out: what none of them sees.
        sha256: hash over every name and text.
        source: what it is, for people.
        skipped: files left out since they are not UTF-8 text.
        notes: what else was found in records, for people.
    """

    train: tuple[Document, ...] | tuple[Dialogue, ...]
    held_out: tuple[Document, ...] | tuple[Dialogue, ...]
    sha256: str
    source: str
    skipped: int
    notes: tuple[str, ...] = ()


def load_corpus(paths: Sequence[Path] = ()) -> Corpus:
    """Reads and splits a corpus; what is held out depends on names and sizes alone.

    Args:
        paths: text files, files of records (.jsonl, or .json with a list), or folders searched for texts and .jsonl
            (hidden files and folders, and files that are not UTF-8, are passed over); none means the Python standard
            library.

    Returns:
        The corpus, of texts or of dialogues.

    Raises:
        RunError: a path does not exist, cannot be read, is a file that is not UTF-8, a record is wrong, there are both
            texts and dialogues, or no text is found, or one dialogue alone.

    Example:
        >>> corpus = load_corpus()
        >>> len(corpus.train) > len(corpus.held_out) > 0
        True
    """
    documents: list[Document] = []
    dialogues: list[Dialogue] = []
    unread: Counter[str] = Counter()
    skipped = empty = 0
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
        suffix = path.suffix.lower()
        if suffix == ".jsonl" or (required and suffix == ".json"):
            found = read_records(path, text, name)
            documents += found.texts
            dialogues += found.dialogues
            unread += found.unread
            empty += found.empty
        elif text.strip() and "\0" not in text:
            documents.append(Document(name, text))
    source = ", ".join(map(str, paths)) if paths else "Python standard library"
    if documents and dialogues:
        raise RunError(
            f"--data: {documents[0].name} is a text and {dialogues[0].name} has an answer to learn: "
            f"one run learns from texts or from answers, not from both"
        )
    records = documents or dialogues
    if not records:
        raise RunError(f"--data: no text found in {source}")
    notes = _notes(unread, empty, len(dialogues) - len({dialogue.turns for dialogue in dialogues}))
    train, held_out = _split(documents) if documents else _split_whole(dialogues)
    return Corpus(train, held_out, _sha256(records), source, skipped, notes)


def _sha256(records: Sequence[Document | Dialogue]) -> str:
    digest = hashlib.sha256()
    for record in records:
        content = [record.text] if isinstance(record, Document) else [part for turn in record.turns for part in turn]
        for part in map(str.encode, (record.name, *content)):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _notes(unread: Counter[str], empty: int, repeated: int) -> tuple[str, ...]:
    notes = []
    if unread:
        names = sorted(unread, key=lambda name: (-unread[name], name))
        rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
        notes.append(f"fields not read: {', '.join(names[:4])}{rest}")
    if empty:
        notes.append(f"{empty:,} empty left out")
    if repeated:
        notes.append(f"{repeated:,} repeat another")
    return tuple(notes)


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
    """Returns (train, held out): of few files the end of each is held out, of more whole files."""
    if len(documents) >= FEWEST_FILES:
        return _split_whole(documents)
    cuts = [_cut(document.text) for document in documents]
    train = (Document(d.name, d.text[:cut]) for d, cut in zip(documents, cuts, strict=True))
    held_out = (Document(d.name, d.text[cut:]) for d, cut in zip(documents, cuts, strict=True))
    return tuple(train), tuple(held_out)


def _split_whole[T: (Document, Dialogue)](records: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Returns (train, held out): records in the order of their names' hashes, until the held-out share is reached."""
    if len(records) < 2:
        raise RunError(f"--data: {records[0].name} is the only record, and one must be held out: two are the fewest")
    sizes = [len(record.text) for record in records]
    wanted = HELD_OUT_SHARE * sum(sizes)
    order = sorted(range(len(records)), key=lambda i: hashlib.sha256(records[i].name.encode()).digest())
    chosen: set[int] = set()
    size = 0
    for i in order:
        if size + sizes[i] <= 1.5 * wanted:  # one long record must not double the share
            chosen.add(i)
            size += sizes[i]
        if size >= wanted:
            break
    if not chosen:  # every record is longer than the share: the shortest does least harm to training
        chosen.add(min(range(len(records)), key=lambda i: sizes[i]))
    train = tuple(record for i, record in enumerate(records) if i not in chosen)
    return train, tuple(records[i] for i in sorted(chosen))


def _cut(text: str) -> int:
    """Returns where the last tenth of a text begins, at the start of a line if it has one there."""
    position = len(text) - max(1, len(text) // 10)
    line = text.find("\n", position)
    return position if line in (-1, len(text) - 1) else line + 1
