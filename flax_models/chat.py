"""Chat templates of Hugging Face folders: dialogues written as transformers would, and where their answers stand.

A template is a Jinja program that turns messages into one text. It runs in a sandbox, with what transformers gives it.
Which part of the text is an answer it says itself by {% generation %} blocks; one without them is run on the turns
before each answer, with the prompt for an answer, and once more with it: what the second text has beyond the first is
the answer and what ends it. Where those are not beginnings of the whole dialogue's text, an earlier answer is not
learned, as with templates that take the reasoning out of earlier turns; the last one has to be, or the template is
refused.

Source: transformers, utils/chat_template_utils.py.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flax_models.dialogue import ANSWERS, Dialogue, in_batches
from flax_models.errors import RunError
from flax_models.examples import Example, within
from flax_models.hub_config import read_object

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# Around what a {% generation %} block writes, until the places are known. Unicode's noncharacters: no text has them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
DATE = "chat_date.txt"  # in a run's folder: what strftime_now tells, or the same text would be another tomorrow


class Written(NamedTuple):
    """A dialogue's text, and [first, last) of the characters of its answers with what ends them."""

    text: str
    answers: list[tuple[int, int]]
    marked: bool  # by the template itself


class _Generation(Extension):
    """Puts marks around what {% generation %} ... {% endgeneration %} writes."""

    tags = {"generation"}  # noqa: RUF012  # the library's own way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_OPEN, _CLOSE))
        return nodes.Scope([first, *body, last]).set_lineno(line)


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
    def _environment(self) -> ImmutableSandboxedEnvironment:
        def refuse(message: str) -> NoReturn:
            raise jinja2.TemplateError(message)

        def to_json(
            value: Any,
            ensure_ascii: bool = False,
            indent: int | None = None,
            separators: tuple[str, str] | None = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        midnight = datetime.datetime.combine(self.date, datetime.time())
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = to_json  # the library's own writes < and & as HTML wants them
        environment.globals |= {"raise_exception": refuse, "strftime_now": midnight.strftime}
        return environment

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, tuple[str, ...]]:
        """The program, and the pieces of text that stand in it."""
        try:
            program, tree = self._environment.from_string(self.source), self._environment.parse(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise RunError(f"{self.origin}: line {error.lineno} of the chat template: {error.message}") from None
        except SyntaxError as error:  # of the Python that it becomes: a break outside of a loop
            raise RunError(f"{self.origin}: the chat template: {error.msg}") from None
        data = [node.data for node in tree.find_all(nodes.TemplateData)]
        return program, (*data, *(n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)))

    @property
    def literals(self) -> tuple[str, ...]:
        """The pieces of text that stand in the program itself."""
        return self._compiled[1]

    def render(self, messages: Sequence[Mapping[str, str]], where: str, *, prompts: bool = False) -> str:
        """Returns the text of messages, with the marks of {% generation %} blocks in it.

        Args:
            messages: with `role` and `content`.
            where: of the record, for errors.
            prompts: add what asks for an answer.

        Raises:
            RunError: the template refuses them, or fails.
        """
        program, _ = self._compiled
        names: dict[str, Any] = {**self.tokens, "tools": None, "documents": None}
        try:
            return program.render(messages=messages, add_generation_prompt=prompts, **names)
        except Exception as error:  # a program from elsewhere: it may fail in any way
            fault = " ".join(str(error).split())
            raise RunError(f"{where}: the chat template of {self.origin} refuses it: {fault}") from None

    def write(self, messages: Sequence[Mapping[str, str]], where: str) -> Written:
        """Returns the text of messages, the last an answer, and where answers stand.

        Args:
            messages: with `role` and `content`.
            where: of the record, for errors.

        Raises:
            RunError: the template refuses them, or the place of the last answer cannot be told.
        """
        text = self.render(messages, where)
        if _OPEN in self.literals:
            return _without_marks(text)
        answers = []
        for i, message in enumerate(messages):
            if message["role"] not in ANSWERS:
                continue
            last = i + 1 == len(messages)
            before = self.render(messages[:i], where, prompts=True)
            after = text if last else self.render(messages[: i + 1], where)
            if text.startswith(after) and after.startswith(before):
                answers.append((len(before), len(after)))
            elif last:
                raise RunError(
                    f"{where}: the chat template of {self.origin} writes the turns before the last answer in another "
                    f"way when the answer follows, so the answer's place cannot be told; "
                    f"{{% generation %}} around answers would tell it"
                )
        return Written(text, answers, marked=False)


def _without_marks(text: str) -> Written:
    answers, plain, size = [], [], 0
    for i, part in enumerate(text.split(_OPEN)):
        answer, found, rest = part.partition(_CLOSE)
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


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, (*sorted(words, key=len, reverse=True), _OPEN, _CLOSE))))


class ChatFormat:
    """Writes dialogues by a chat template; the tokens that it writes are recognised, those in contents refused.

    Refused in any turn: what spells a special token. Refused in turns that are not answers: any other entry that the
    tokenizer takes for a word of its own and the template writes, as <think>.

    Args:
        tokenizer: without a post-processor, which would move offsets.
        template: of the same folder.

    Attributes:
        name: for people.
        key: everything that its tokens depend on, beside the tokenizer.
    """

    def __init__(self, tokenizer: "Tokenizer", template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.name = f"the chat template of {template.origin}"
        added = tokenizer.get_added_tokens_decoder()
        special = {number: token.content for number, token in added.items() if token.special}
        literals = "\0".join(template.literals)
        written = {
            number: token.content
            for number, token in added.items()
            if token.content in literals and not token.content.isspace()
        }
        self._control = special | written
        self._not_in_answers, self._not_in_turns = _any_of(special.values()), _any_of(self._control.values())
        tokens, date = json.dumps(template.tokens, sort_keys=True), template.date.isoformat() if template.dated else ""
        self.key = ("chat", jinja2.__version__, template.source, tokens, date)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The token that the template ends an answer with; none if it does so by none."""
        question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        try:
            written = self._template.write([question, answer], "a question and its answer")
        except RunError:  # one that wants other turns: then generated text ends by the folder's own tokens alone
            return ()
        encoding = self._tokenizer.encode(written.text)
        learned = np.flatnonzero(self._counted(encoding, written))
        last = encoding.ids[learned[-1]] if learned.size else None
        return (last,) if last in self._control else ()

    def encode(self, dialogues: Sequence[Dialogue], progress: Callable[[int], None] | None = None) -> list[Example]:
        """Returns the dialogues' tokens; see `Vocabulary.encode_examples`."""
        examples: list[Example] = []
        for batch in in_batches(dialogues):
            written = [self._write(dialogue) for dialogue in batch]
            encoded = self._tokenizer.encode_batch([text for text, _, _ in written])
            for dialogue, text, encoding in zip(batch, written, encoded, strict=True):
                counted = self._counted(encoding, text)
                if not counted.any():
                    raise RunError(
                        f"--data: {dialogue.name}: the chat template of {self._template.origin} marks no answer of it"
                    )
                examples.append(Example(dialogue.name, np.asarray(encoding.ids, np.int32), counted))
            if progress is not None:
                progress(len(examples))
        return examples

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens that the answer to a user's turn is drawn after."""
        self._check(text, "--prompt", answers=False)
        written = self._template.render([{"role": "user", "content": text}], "--prompt", prompts=True)
        return self._tokenizer.encode(_without_marks(written).text).ids

    def _write(self, dialogue: Dialogue) -> Written:
        where, messages = f"--data: {dialogue.name}", dialogue.messages()
        for message in messages:
            self._check(message["content"], where, answers=message["role"] in ANSWERS)
        return self._template.write(messages, where)

    def _check(self, content: str, where: str, *, answers: bool) -> None:
        """Raises RunError if a turn's content would become a token that steers the dialogue."""
        if found := (self._not_in_answers if answers else self._not_in_turns).search(content):
            raise RunError(f"{where} spells {found[0]!r}, which would be a token of the chat template and not text")

    def _counted(self, encoding: "Encoding", written: Written) -> np.ndarray:
        """Returns (n,) bool: which tokens are learned."""
        counted = np.zeros(len(encoding.ids), bool)
        control = np.isin(encoding.ids, list(self._control))
        starts = np.asarray([first for first, _ in encoding.offsets], np.int64)
        for first, last in written.answers:
            # A token that ends an answer may have taken the white space after it, past the end of a generation block.
            inside = within(encoding, first, last) | (control & (starts >= first) & (starts < last))
            ending = np.flatnonzero(inside & control)
            if not written.marked and ending.size and not written.text[encoding.offsets[ending[-1]][1] : last].strip():
                inside[ending[-1] + 1 :] = False  # generated text ends before the line break that the template adds
            counted |= inside
        return counted
