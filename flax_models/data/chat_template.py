"""Chat templates of Hugging Face folders: Jinja programs that convert messages to one text.

Templates are untrusted code. They run in a sandbox in a separate process with limited time and memory
(template_process.py), with the variables and functions that transformers provides. A {% generation %} block, which
contains an answer, writes marks around its text.

Source: transformers, utils/chat_template_utils.py.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flax_models.data.template_process import CLOSE, OPEN
from flax_models.data.template_worker import WORKER, TemplateFault
from flax_models.errors import RunError
from flax_models.hub.config import read_object

DATE = "chat_date.txt"  # in a run's folder: the date for strftime_now, so that a resumed run formats the same text


class MarkedText(NamedTuple):
    """A dialogue's text, and the locations of its answers, including what ends them."""

    text: str
    answers: list[tuple[int, int]]  # ranges of characters, [first, last)
    from_template: bool  # marked by {% generation %} blocks


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a folder.

    Args:
        source: the Jinja program.
        origin: the file that it was read from, for messages.
        tokens: bos_token, eos_token and so on by name; these are variables of the program.
        date: the date that strftime_now formats, at midnight.
    """

    source: str
    origin: Path
    tokens: Mapping[str, str]
    date: datetime.date

    @property
    def dated(self) -> bool:
        """Whether the template may write the date."""
        return "strftime_now" in self.source

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """The string literals and literal text in the program."""
        try:
            return WORKER.literals(self.source, self.date.isoformat())
        except TemplateFault as fault:
            place = "the chat template" if fault.line is None else f"line {fault.line} of the chat template"
            raise RunError(f"{self.origin}: {place}{' ' if fault.limit else ': '}{fault}") from None

    @cached_property
    def marks(self) -> bool:
        """Whether the template has {% generation %} blocks."""
        return OPEN in self.literals

    def render(self, messages: Sequence[Mapping[str, str]], where: str, *, prompts: bool = False) -> str:
        """Returns the text of messages, with the marks of {% generation %} blocks in it.

        Args:
            messages: objects with `role` and `content`.
            where: the record, for errors.
            prompts: set add_generation_prompt.

        Raises:
            RunError: the template rejects the messages, fails, or exceeds the time or memory limit.
        """
        variables = {**self.tokens, "tools": None, "documents": None}
        variables |= {"messages": list(messages), "add_generation_prompt": prompts}
        self.literals  # noqa: B018  # compiles the template, so that a syntax error does not blame the messages
        try:
            return WORKER.render(self.source, self.date.isoformat(), variables)
        except TemplateFault as fault:
            verb = "" if fault.limit else "rejects it: "
            raise RunError(f"{where}: the chat template of {self.origin} {verb}{fault}") from None


def without_marks(text: str) -> MarkedText:
    """Removes the marks of {% generation %} blocks and returns the ranges between them as answers."""
    answers, plain, size = [], [], 0
    for i, part in enumerate(text.split(OPEN)):
        answer, found, rest = part.partition(CLOSE)
        if i and found:
            answers.append((size, size + len(answer)))
        plain += [answer, rest]
        size += len(answer) + len(rest)
    return MarkedText("".join(plain), answers, from_template=True)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Returns the chat template of a Hugging Face folder, None if it has none.

    As in transformers, chat_template.jinja takes precedence over `chat_template` in tokenizer_config.json.
    chat_template.json, which transformers reads only for processors, comes last. Of several named templates, the one
    named "default" is used.

    Args:
        folder: the folder.

    Raises:
        RunError: a file cannot be read, or its chat_template is not a template.
    """
    config, special, listed = (
        read_object(path) if (path := folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json")
    )
    tokens = {name: _content(value) for name, value in {**special, **config}.items() if name.endswith("_token")}
    date = _date(folder / DATE)

    def template(source: Any, origin: Path) -> ChatTemplate:
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise RunError(f'{origin}: chat_template must be a string or a list with one named "default"')
        return ChatTemplate(source, origin, {name: text for name, text in tokens.items() if text is not None}, date)

    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return template(path.read_text(encoding="utf-8"), path)
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"cannot read {path}: {error}") from None
    for values, name in ((config, "tokenizer_config.json"), (listed, "chat_template.json")):
        if values.get("chat_template") is not None:
            return template(values["chat_template"], folder / name)
    return None


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token  # a dict holds the text and the token's flags
    return content if isinstance(content, str) else None


def _date(path: Path) -> datetime.date:
    if not path.is_file():
        return datetime.date.today()
    try:
        return datetime.date.fromisoformat(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
