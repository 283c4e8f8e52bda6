"""Files of records: a JSON object in each line (.jsonl), or a list of objects (.json).

What a record is, its fields say; all records of a file must be of one kind, and the first kind below that has its
fields wins, so that Alpaca's own "text", or a "prompt" beside "messages", is an extra field:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"instruction": ..., "input": ..., "output": ...}        input may be absent or empty
    {"prompt": ..., "completion": ...}
    {"text": ...}                                            a text of its own, as a text file is

Other fields are left unread, and counted.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flax_models.data.dialogue import ANSWERS, CHAT_ROLES, Dialogue, Document, Turn
from flax_models.errors import RunError

_NEEDED = {  # kind -> the fields that make a record one of it
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
    """What a file of records holds: `texts` or `dialogues`, the other is empty."""

    texts: list[Document]
    dialogues: list[Dialogue]
    unread: Counter[str]  # fields that say nothing here -> how many records have them
    empty: int  # texts without a word, left out


def read_records(path: Path, text: str, name: str) -> Records:
    """Returns the records of a file.

    Args:
        path: of the file, for errors; its suffix says whether lines (.jsonl) or a list (.json) hold the records.
        text: what it holds.
        name: of the file; record 12's is "NAME:12", by its line, or by its place in the list.

    Raises:
        RunError: a line is no JSON, a record is of no kind, or of another kind than the first, or a field is not what
            it must be; names the file, the line and the field.

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
                f"--data: {where} has the fields {_some(values)}, but {first} is of another kind "
                f"({' and '.join(_NEEDED[kind])}): one file holds one kind"
            )
        records.unread.update(set(values) - _READ[kind])
        if kind == "text":
            content = _string(values, "text", where)
            if content.strip():
                records.texts.append(Document(f"{name}:{number}", content))
            else:
                empty += 1
            continue
        turns = tuple(_TURNS[kind](values, where, records.unread))
        records.dialogues.append(Dialogue(f"{name}:{number}", turns))
    return records._replace(empty=empty)


def _objects(path: Path, text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields (number, place for errors, object) of each record."""
    if path.suffix.lower() == ".json":
        values = _parsed(text, str(path))
        if not isinstance(values, list):
            raise RunError(f"--data: {path} must hold a list of objects, got {_type(values)}")
        found = ((number, f"{path}, object {number}", value) for number, value in enumerate(values, start=1))
    else:  # by "\n" alone: JSON's strings may hold what str.splitlines takes for the end of a line
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
    for kind, needed in _NEEDED.items():
        if all(field in values for field in needed):
            return kind
    wanted = ", or ".join(" and ".join(needed) for needed in _NEEDED.values())
    raise RunError(f"--data: {where} has the fields {_some(values)}; a record must have {wanted}")


def _some(values: dict[str, Any]) -> str:
    return ", ".join(sorted(values)[:8]) + (" and more" if len(values) > 8 else "") if values else "(none)"


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _string(values: dict[str, Any], field: str, where: str, label: str = "") -> str:
    """Returns a field that must be a string of whole characters."""
    value = values.get(field)
    if not isinstance(value, str):
        raise RunError(f"--data: {where}: {label}{field} must be a string, got {_type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RunError(f"--data: {where}: {label}{field} holds half of a surrogate pair, which is no text") from None
    return value


def _answer(values: dict[str, Any], field: str, where: str, label: str = "") -> str:
    value = _string(values, field, where, label)
    if not value.strip():
        raise RunError(f"--data: {where}: {label}{field} is the answer and must not be empty")
    return value


def _instruction(values: dict[str, Any], where: str, unread: Counter[str]) -> Iterator[Turn]:
    yield Turn("instruction", _string(values, "instruction", where))
    if values.get("input") is not None and (content := _string(values, "input", where)):
        yield Turn("input", content)
    yield Turn("output", _answer(values, "output", where))


def _completion(values: dict[str, Any], where: str, unread: Counter[str]) -> Iterator[Turn]:
    yield Turn("prompt", _string(values, "prompt", where))
    yield Turn("completion", _answer(values, "completion", where))


def _messages(values: dict[str, Any], where: str, unread: Counter[str]) -> Iterator[Turn]:
    """Yields the turns down to the last answer: nothing can be learned from those after it."""
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
        if message.get("tool_calls"):  # an answer without its calls would be learned as if it made none
            raise RunError(f"--data: {where}: {label} has tool_calls, which are not learned: leave the record out")
        read = _answer if role in ANSWERS else _string
        turns.append(Turn(role, read(message, "content", where, f"{label}.")))
        fields |= {f"messages.{field}" for field in set(message) - {"role", "content", "tool_calls"}}
    unread.update(fields)
    last = max((i for i, turn in enumerate(turns) if turn.role in ANSWERS), default=None)
    if last is None:
        raise RunError(f"--data: {where}: messages must have an assistant's turn, got {len(turns)} turns without one")
    yield from turns[: last + 1]


_TURNS: dict[str, Callable[[dict[str, Any], str, Counter[str]], Iterator[Turn]]] = {
    "messages": _messages,
    "instruction": _instruction,
    "completion": _completion,
}
