"""Formats dialogues with a chat template, as transformers does, and finds the answers in the text.

A template with {% generation %} blocks marks the answers. A template without them is rendered twice for each answer:
the turns before the answer with add_generation_prompt, and the same turns with the answer. The text that the second
rendering adds is the answer with its end token. Both renderings must be prefixes of the text of the whole dialogue. If
they are not, for example because the template removes the reasoning from earlier turns, the answer is not trained on;
for the last answer, this is an error. The text that a template writes at the very end (Phi-3: eos_token) belongs to an
answer only if nothing else ends the answer.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from flax_models.data.chat_template import ChatTemplate, MarkedText, without_marks
from flax_models.data.dialogue import ANSWERS, Dialogue, in_batches
from flax_models.data.examples import Example, within
from flax_models.data.template_process import CLOSE, OPEN
from flax_models.errors import RunError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


def _any_of(words: Iterable[str]) -> str:
    """Returns a regular expression that matches any of the words; without words, one that matches nothing."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


class ChatFormat:
    """Formats dialogues with a chat template, and rejects contents that contain control tokens.

    The content of any turn must not contain a special token. The content of a turn that is not an answer must also not
    contain another added token that the template writes, such as <think>.

    Args:
        tokenizer: tokenizer without a post-processor, which would shift offsets.
        template: chat template of the same folder.

    Attributes:
        name: human-readable name of the format.
        key: everything besides the tokenizer that the tokens depend on, for the token cache.
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
        control = special | written
        self._is_control = np.zeros(1 + max(tokenizer.get_vocab().values()), bool)  # (V,)
        self._is_control[list(control)] = True
        self._not_in_answers = re.compile(_any_of([*special.values(), OPEN, CLOSE]))
        self._not_in_turns = re.compile(_any_of([*control.values(), OPEN, CLOSE]))
        self._ended = re.compile(f"(?:{_any_of(control.values())})\\s*\\Z")
        tokens, date = json.dumps(template.tokens, sort_keys=True), template.date.isoformat() if template.dated else ""
        self.key = ("chat", jinja2.__version__, template.source, tokens, date)

    @cached_property
    def _closing(self) -> str:
        """The text that the template writes at the very end without add_generation_prompt; empty for most templates."""
        try:
            closed, asking = (self._template.render(_PROBE, "a probe", prompts=prompts) for prompts in (False, True))
        except RunError:  # a template that rejects these turns
            return ""
        pairs = enumerate(zip(closed, asking, strict=False))
        size = next((i for i, (one, other) in pairs if one != other), min(len(closed), len(asking)))
        cut = (match.start() for match in self._not_in_turns.finditer(closed) if match.start() < size < match.end())
        return closed[next(cut, size) :]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The token with which the template ends an answer, if there is one."""
        try:
            marked = self._format(_PROBE, "a probe")
        except RunError:  # a template that rejects these turns: only the folder's end tokens end generated text
            return ()
        encoding = self._tokenizer.encode(marked.text)
        counted = np.asarray(encoding.ids)[self._counted(encoding, marked)]
        return (int(counted[-1]),) if counted.size and self._is_control[counted[-1]] else ()

    def encode(self, dialogues: Sequence[Dialogue], progress: Callable[[int], None] | None = None) -> list[Example]:
        """Returns the dialogues' tokens; see `Vocabulary.encode_examples`."""
        examples: list[Example] = []
        for batch in in_batches(dialogues):
            texts = [self._format(dialogue.messages(), f"--data: {dialogue.name}") for dialogue in batch]
            encoded = self._tokenizer.encode_batch([marked.text for marked in texts])
            for dialogue, marked, encoding in zip(batch, texts, encoded, strict=True):
                counted = self._counted(encoding, marked)
                if not counted.any():
                    raise RunError(
                        f"--data: {dialogue.name}: the chat template of {self._template.origin} marks no answer in it"
                    )
                examples.append(Example(dialogue.name, np.asarray(encoding.ids, np.int32), counted))
            if progress is not None:
                progress(len(examples))
        return examples

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens of a user turn followed by the template's prompt for an answer."""
        self._check(text, "--prompt", answers=False)
        rendered = self._template.render([{"role": "user", "content": text}], "--prompt", prompts=True)
        return self._tokenizer.encode(without_marks(rendered).text).ids

    def _format(self, messages: Sequence[Mapping[str, str]], where: str) -> MarkedText:
        """Returns the text of messages, of which the last is an answer; `where` names them in errors."""
        for message in messages:
            self._check(message["content"], where, answers=message["role"] in ANSWERS)
        template = self._template
        text = template.render(messages, where)
        if template.marks:
            return without_marks(text)
        answers = []
        for i, message in enumerate(messages):
            if message["role"] not in ANSWERS:
                continue
            last = i + 1 == len(messages)
            before = template.render(messages[:i], where, prompts=True)
            after = text if last else template.render(messages[: i + 1], where)
            after = after.removesuffix(self._closing)
            if text.startswith(after) and after.startswith(before):
                ended = not last or self._ended.search(after, len(before))
                answers.append((len(before), len(after) if ended else len(text)))
            elif last:
                raise RunError(
                    f"{where}: the chat template of {template.origin} formats the turns before the last answer "
                    f"differently when the answer follows, so the answer cannot be located; mark answers in the "
                    f"template with {{% generation %}} blocks"
                )
        return MarkedText(text, answers, from_template=False)

    def _check(self, content: str, where: str, *, answers: bool) -> None:
        """Raises RunError if a turn's content contains a control token of the dialogue."""
        if found := (self._not_in_answers if answers else self._not_in_turns).search(content):
            raise RunError(f"{where} contains {found[0]!r}, which is a token of the chat template")

    def _counted(self, encoding: "Encoding", marked: MarkedText) -> np.ndarray:
        """Returns (n,) bool: which tokens count in the loss."""
        counted = np.zeros(len(encoding.ids), bool)
        control = self._is_control[encoding.ids]
        starts = np.asarray([first for first, _ in encoding.offsets], np.int64)
        for first, last in marked.answers:
            # The token that ends an answer may include white space after the end of the generation block.
            inside = within(encoding, first, last) | (control & (starts >= first) & (starts < last))
            ending = np.flatnonzero(inside & control)
            if not marked.from_template and ending.size:
                after = marked.text[encoding.offsets[ending[-1]][1] : last]
                if not after.strip():  # generated text ends before the line break that the template adds
                    inside[ending[-1] + 1 :] = False
            counted |= inside
        return counted
