"""Files of records: one JSON object per line (.jsonl), or a list of objects (.json).

The fields of a record determine its kind, and all records of a file must have the same kind. The first kind below
whose fields are all present is used, so "text" in Alpaca's records, or "prompt" next to "messages", is an unused field:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"instruction": ..., "input": ..., "output": ...}        input may be absent or empty
    {"prompt": ..., "completion": ...}
    {"text": ...}                                            one document, like a text file

Unused fields are counted and reported.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flax_models.data.dialogue import ANSWERS, CHAT_ROLES, Dialogue, Document, Turn
from flax_models.errors import RunError

_REQUIRED = {  # kind -> the fields that a record of this kind must have
    "messages": ("messages",),
    "instruction": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
_READ = {  # kind -> the fields that are read
    "messages": {"messages"},
    "instruction": {"instruction", "input", "output"},
    "completion": {"prompt", "completion"},
    "text": {"text"},
}


class Records(NamedTuple):
    """The records of a file: either `texts` or `dialogues` is empty."""

    texts: list[Document]
    dialogues: list[Dialogue]
    unused: Counter[str]  # unused field -> number of records that have it
    empty: int  # number of skipped empty texts


def read_records(path: Path, text: str, name: str) -> Records:
    """Returns the records of a file.

    Args:
        path: path of the file; the suffix determines whether records are lines (.jsonl) or entries of a list (.json).
        text: content of the file.
        name: name of the file; a record is named "NAME:12" after its line or its position in the list.

    Raises:
        RunError: a line is not JSON, a record has no known kind or a different kind than the first, or a field is
            invalid. The message names the file, the line and the field.

    Example:
        >>> read_records(Path("a.jsonl"), '{"prompt": "2 + 2 =", "completion": " 4"}', "a.jsonl").dialogues[0].name
        'a.jsonl:1'
    """
    records = Records([], [], Counter(), 0)
    kind, first, empty = "", "", 0
    for number, where, values in _objects(path, text.removeprefix("\ufeff")):
        found = _kind(values, where)
        kind, first = kind or found, first or where
        if found != kind:
            raise RunError(
                f"--data: {where} has the fields {_fields(values)}, but {first} has {' and '.join(_REQUIRED[kind])}; "
                f"all records of a file must have the same kind"
            )
        records.unused.update(set(values) - _READ[kind])
        if kind == "text":
            content = _string(values, "text", where)
            if content.strip():
                records.texts.append(Document(f"{name}:{number}", content))
            else:
                empty += 1
            continue
        turns = tuple(_TURNS[kind](values, where, records.unused))
        records.dialogues.append(Dialogue(f"{name}:{number}", turns))
    return records._replace(empty=empty)


def _objects(path: Path, text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields (number, location for errors, object) for each record."""
    if path.suffix.lower() == ".json":
        values = _parsed(text, str(path))
        if not isinstance(values, list):
            raise RunError(f"--data: {path} must hold a list of objects, got {_type(values)}")
        found = ((number, f"{path}, object {number}", value) for number, value in enumerate(values, start=1))
    else:  # split only at "\n": JSON strings may contain other characters at which str.splitlines splits
        lines = ((number, f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), start=1))
        found = ((number, where, _parsed(line, where)) for number, where, line in lines if line.strip())
    for number, where, value in found:
        if not isinstance(value, dict):
            raise RunError(f"--data: {where} must be an object, got {_type(value)}")
        yield number, where, value


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"--data: {where} is not JSON: {error}") from None


def _kind(values: dict[str, Any], where: str) -> str:
    for kind, required in _REQUIRED.items():
        if all(field in values for field in required):
            return kind
    kinds = ", or ".join(" and ".join(required) for required in _REQUIRED.values())
    raise RunError(f"--data: {where}: a record must have {kinds}, got the fields {_fields(values)}")


def _fields(values: dict[str, Any]) -> str:
    return ", ".join(sorted(values)[:8]) + (" and more" if len(values) > 8 else "") if values else "(none)"


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _string(values: dict[str, Any], field: str, where: str, label: str = "") -> str:
    """Returns a field that must be a string without unpaired surrogates."""
    value = values.get(field)
    if not isinstance(value, str):
        raise RunError(f"--data: {where}: {label}{field} must be a string, got {_type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RunError(f"--data: {where}: {label}{field} has an unpaired surrogate, which is not valid text") from None
    return value


def _answer(values: dict[str, Any], field: str, where: str, label: str = "") -> str:
    value = _string(values, field, where, label)
    if not value.strip():
        raise RunError(f"--data: {where}: {label}{field} is an answer and must not be empty")
    return value


def _instruction(values: dict[str, Any], where: str, unused: Counter[str]) -> Iterator[Turn]:
    yield Turn("instruction", _string(values, "instruction", where))
    if values.get("input") is not None and (content := _string(values, "input", where)):
        yield Turn("input", content)
    yield Turn("output", _answer(values, "output", where))


def _completion(values: dict[str, Any], where: str, unused: Counter[str]) -> Iterator[Turn]:
    yield Turn("prompt", _string(values, "prompt", where))
    yield Turn("completion", _answer(values, "completion", where))


def _messages(values: dict[str, Any], where: str, unused: Counter[str]) -> Iterator[Turn]:
    """Yields the turns up to the last answer; the turns after it do not affect the loss."""
    messages = values["messages"]
    if not isinstance(messages, list):
        raise RunError(f"--data: {where}: messages must be a list, got {_type(messages)}")
    turns: list[Turn] = []
    fields: set[str] = set()
    for i, message in enumerate(messages):
        label = f"messages[{i}]"
        if not isinstance(message, dict):
            raise RunError(f"--data: {where}: {label} must be an object, got {_type(message)}")
        role = _string(message, "role", where, f"{label}.")
        if role not in CHAT_ROLES:
            raise RunError(f"--data: {where}: {label}.role must be one of {', '.join(CHAT_ROLES)}, got {role!r}")
        if message.get("tool_calls"):  # ignoring them would train the model to answer without the calls
            raise RunError(f"--data: {where}: {label} has tool_calls, which are not supported; remove the record")
        read = _answer if role in ANSWERS else _string
        turns.append(Turn(role, read(message, "content", where, f"{label}.")))
        fields |= {f"messages.{field}" for field in set(message) - {"role", "content", "tool_calls"}}
    unused.update(fields)
    last = max((i for i, turn in enumerate(turns) if turn.role in ANSWERS), default=None)
    if last is None:
        raise RunError(f"--data: {where}: messages must have an assistant turn, got {len(turns)} other turns")
    yield from turns[: last + 1]


_TURNS: dict[str, Callable[[dict[str, Any], str, Counter[str]], Iterator[Turn]]] = {
    "messages": _messages,
    "instruction": _instruction,
    "completion": _completion,
}
