"""Chat templates of Hugging Face folders: Jinja programs that turn messages into one text.

A program from elsewhere runs in a sandbox, in a process of its own whose time and memory are limited
(template_process.py), with what transformers gives it. {% generation %} blocks in it, which say what is an answer, put
marks around what they write.

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

DATE = "chat_date.txt"  # in a run's folder: what strftime_now tells, or the same text would be another tomorrow


class Written(NamedTuple):
    """A dialogue's text, and where its answers with what ends them stand."""

    text: str
    answers: list[tuple[int, int]]  # [first, last) of characters
    marked: bool  # by the template itself


@dataclass(frozen=True)
class ChatTemplate:
    """A folder's template.

    Args:
        source: the Jinja program.
        origin: the file it was read from, for people.
        tokens: bos_token, eos_token and so on, by name: variables of the program.
        date: what strftime_now tells, at midnight.
    """

    source: str
    origin: Path
    tokens: Mapping[str, str]
    date: datetime.date

    @property
    def dated(self) -> bool:
        """Whether it may write the date."""
        return "strftime_now" in self.source

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """The pieces of text that stand in the program itself."""
        try:
            return WORKER.literals(self.source, self.date.isoformat())
        except TemplateFault as fault:
            place = "the chat template" if fault.line is None else f"line {fault.line} of the chat template"
            raise RunError(f"{self.origin}: {place}{' ' if fault.limit else ': '}{fault}") from None

    @cached_property
    def marks(self) -> bool:
        """Whether it has {% generation %} blocks."""
        return OPEN in self.literals

    def render(self, messages: Sequence[Mapping[str, str]], where: str, *, prompts: bool = False) -> str:
        """Returns the text of messages, with the marks of {% generation %} blocks in it.

        Args:
            messages: with `role` and `content`.
            where: of the record, for errors.
            prompts: add what asks for an answer.

        Raises:
            RunError: the template refuses them, fails, or takes more time or memory than it may.
        """
        variables = {**self.tokens, "tools": None, "documents": None}
        variables |= {"messages": list(messages), "add_generation_prompt": prompts}
        self.literals  # noqa: B018  # what cannot be compiled is no fault of the messages
        try:
            return WORKER.render(self.source, self.date.isoformat(), variables)
        except TemplateFault as fault:
            verb = "" if fault.limit else "refuses it: "
            raise RunError(f"{where}: the chat template of {self.origin} {verb}{fault}") from None


def without_marks(text: str) -> Written:
    """Returns a text without the marks of {% generation %} blocks, and what stood between them."""
    answers, plain, size = [], [], 0
    for i, part in enumerate(text.split(OPEN)):
        answer, found, rest = part.partition(CLOSE)
        if i and found:
            answers.append((size, size + len(answer)))
        plain += [answer, rest]
        size += len(answer) + len(rest)
    return Written("".join(plain), answers, marked=True)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Returns a Hugging Face folder's chat template, None if it has none.

    chat_template.jinja goes before `chat_template` of tokenizer_config.json, as in transformers, and
    chat_template.json, which that reads for processors only, comes last. Of several named templates "default" is taken.

    Args:
        folder: as `Vocabulary.folder`.

    Raises:
        RunError: a file cannot be read, or holds no template where one should be.
    """
    config, special, listed = (
        read_object(path) if (path := folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json")
    )
    tokens = {name: _content(value) for name, value in {**special, **config}.items() if name.endswith("_token")}
    date = _date(folder / DATE)

    def made(source: Any, origin: Path) -> ChatTemplate:
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise RunError(f'{origin}: chat_template must be a string or a list with one named "default"')
        return ChatTemplate(source, origin, {name: text for name, text in tokens.items() if text is not None}, date)

    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return made(path.read_text(encoding="utf-8"), path)
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"cannot read {path}: {error}") from None
    for values, name in ((config, "tokenizer_config.json"), (listed, "chat_template.json")):
        if values.get("chat_template") is not None:
            return made(values["chat_template"], folder / name)
    return None


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token  # a dict has the token's flags beside its text
    return content if isinstance(content, str) else None


def _date(path: Path) -> datetime.date:
    if not path.is_file():
        return datetime.date.today()
    try:
        return datetime.date.fromisoformat(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
