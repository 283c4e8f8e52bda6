"""Reads texts or dialogues to train on, hashes them, and holds out a part of them.

Without paths, the corpus is the Python standard library of the running interpreter: several million tokens of real
text that are available on every machine without a download. The corpus is split by file. Lines of one file repeat each
other, so a split inside files would make the held-out loss too low.

Files of records (`flax_models.data.records`) hold texts or dialogues. Both are split in the same way.
"""

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from flax_models.data.dialogue import Dialogue, Document
from flax_models.data.records import read_records
from flax_models.errors import RunError

# Tests, generated tables, an application, and third-party packages.
STDLIB_EXCLUDED = frozenset({"test", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"})
# Fraction of the characters. About 130,000 tokens of the standard library: a standard error near 0.01 nats.
HELD_OUT_SHARE = 0.06
FEWEST_FILES = 10  # with fewer files, a split by file is too coarse, and the end of each file is held out


@dataclass(frozen=True)
class Corpus:
    """Documents or dialogues to train on, and documents or dialogues held out.

    Args:
        train: used to train the tokenizer, the baselines and the model.
        held_out: used only for evaluation.
        sha256: hash of all names and texts.
        source: human-readable description.
        skipped: number of files skipped because they are not UTF-8 text or have a null character.
        notes: messages about the records.
    """

    train: tuple[Document, ...] | tuple[Dialogue, ...]
    held_out: tuple[Document, ...] | tuple[Dialogue, ...]
    sha256: str
    source: str
    skipped: int
    notes: tuple[str, ...] = ()


def load_corpus(paths: Sequence[Path] = ()) -> Corpus:
    """Reads and splits a corpus. The split depends only on names and sizes.

    Args:
        paths: text files, files of records (.jsonl, or .json with a list), or folders. Folders are searched for text
            files and .jsonl files; hidden files and folders, and files that are not UTF-8 text or have a null
            character, are skipped. Without paths, the corpus is the Python standard library.

    Returns:
        The corpus, of texts or of dialogues.

    Raises:
        RunError: a path does not exist or cannot be read, a file named in `paths` is not UTF-8 text or has a null
            character, a record is invalid, there are both texts and dialogues, no text is found, or there is only one
            dialogue.

    Example:
        >>> corpus = load_corpus()
        >>> len(corpus.train) > len(corpus.held_out) > 0
        True
    """
    documents: list[Document] = []
    dialogues: list[Dialogue] = []
    unused: Counter[str] = Counter()
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
            unused += found.unused
            empty += found.empty
        elif "\0" in text:  # a binary file
            if required:
                raise RunError(f"--data: {path} is not text: it has a null character")
            skipped += 1
        elif text.strip():
            documents.append(Document(name, text))
    source = ", ".join(map(str, paths)) if paths else "Python standard library"
    if documents and dialogues:
        raise RunError(
            f"--data must have either texts or dialogues, got both: {documents[0].name} is a text and "
            f"{dialogues[0].name} is a dialogue"
        )
    records = documents or dialogues
    if not records:
        raise RunError(f"--data: no text found in {source}")
    notes = _notes(unused, empty, len(dialogues) - len({dialogue.turns for dialogue in dialogues}))
    train, held_out = _split(documents) if documents else _split_whole(dialogues)
    return Corpus(train, held_out, _sha256(records), source, skipped, notes)


def _sha256(records: Sequence[Document | Dialogue]) -> str:
    digest = hashlib.sha256()
    for record in records:
        content = [record.text] if isinstance(record, Document) else [part for turn in record.turns for part in turn]
        for part in map(str.encode, (record.name, *content)):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _notes(unused: Counter[str], empty: int, repeated: int) -> tuple[str, ...]:
    notes = []
    if unused:
        names = sorted(unused, key=lambda name: (-unused[name], name))
        rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
        notes.append(f"unused fields: {', '.join(names[:4])}{rest}")
    if empty:
        notes.append(f"{empty:,} empty records skipped")
    if repeated:
        notes.append(f"{repeated:,} duplicate records")
    return tuple(notes)


def _files(paths: Sequence[Path]) -> Iterator[tuple[str, Path, bool]]:
    """Yields (name, path, whether the user named the file) of each file, in an order independent of the file system."""
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
            for path in sorted(_visible(root)):
                yield path.relative_to(root).as_posix(), path, False
        else:
            raise RunError(f"--data: no such file or folder: {root}")


def _visible(root: Path) -> Iterator[Path]:
    """Yields the files in a folder that are not hidden; raises RunError if a folder in it cannot be read."""

    def fail(error: OSError) -> NoReturn:  # rglob would leave out the folder
        raise RunError(f"--data: cannot read {error.filename}: {error.strerror}")

    for folder, folders, files in root.walk(on_error=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in files if not name.startswith(".") and (path := folder / name).is_file())


def _split(documents: Sequence[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Returns (train, held out): whole files are held out, or, with few files, the end of each file."""
    if len(documents) >= FEWEST_FILES:
        return _split_whole(documents)
    cuts = [_cut(document.text) for document in documents]
    train = (Document(d.name, d.text[:cut]) for d, cut in zip(documents, cuts, strict=True))
    held_out = (Document(d.name, d.text[cut:]) for d, cut in zip(documents, cuts, strict=True))
    return tuple(train), tuple(held_out)


def _split_whole[T: (Document, Dialogue)](records: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Returns (train, held out): records in the order of their names' hashes, until HELD_OUT_SHARE is reached."""
    if len(records) < 2:
        raise RunError(f"--data must have at least two records, because one is held out, got only {records[0].name}")
    sizes = [len(record.text) for record in records]
    target = HELD_OUT_SHARE * sum(sizes)
    order = sorted(range(len(records)), key=lambda i: hashlib.sha256(records[i].name.encode()).digest())
    chosen: set[int] = set()
    size = 0
    for i in order:
        if size + sizes[i] <= 1.5 * target:  # a long record must not double the share
            chosen.add(i)
            size += sizes[i]
        if size >= target:
            break
    if not chosen:  # every record is longer than the share: hold out the shortest
        chosen.add(min(range(len(records)), key=lambda i: sizes[i]))
    train = tuple(record for i, record in enumerate(records) if i not in chosen)
    return train, tuple(records[i] for i in sorted(chosen))


def _cut(text: str) -> int:
    """Returns the index at which the last tenth of a text begins, moved to the next line start if there is one."""
    position = len(text) - max(1, len(text) // 10)
    line = text.find("\n", position)
    return position if line in (-1, len(text) - 1) else line + 1
