"""Dialogues written as transformers writes them, and where their answers stand.

Which part of the text is an answer a chat template says itself by {% generation %} blocks; one without them is run on
the turns before each answer, with the prompt for an answer, and once more with it: what the second text has beyond the
first is the answer and what ends it. Where those are not beginnings of the whole dialogue's text, an earlier answer is
not learned, as with templates that take the reasoning out of earlier turns; the last one has to be, or the dialogue is
refused. What a template writes at the end of all (Phi-3: eos_token) is part of an answer only if nothing else ends it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from flax_models.data.chat_template import ChatTemplate, Written, without_marks
from flax_models.data.dialogue import ANSWERS, Dialogue, in_batches
from flax_models.data.examples import Example, within
from flax_models.data.template_process import CLOSE, OPEN
from flax_models.errors import RunError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


def _any_of(words: Iterable[str]) -> str:
    """Returns the regular expression of any of some words; of none, one that is nowhere."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


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
        """What the template writes at the end of a text that asks for no answer; nothing, with most."""
        try:
            closed, asking = (self._template.render(_PROBE, "a probe", prompts=prompts) for prompts in (False, True))
        except RunError:  # one that wants other turns
            return ""
        pairs = enumerate(zip(closed, asking, strict=False))
        size = next((i for i, (one, other) in pairs if one != other), min(len(closed), len(asking)))
        cut = (match.start() for match in self._not_in_turns.finditer(closed) if match.start() < size < match.end())
        return closed[next(cut, size) :]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The token that the template ends an answer with; none if it does so by none."""
        try:
            written = self._write(_PROBE, "a probe")
        except RunError:  # one that wants other turns: then generated text ends by the folder's own tokens alone
            return ()
        encoding = self._tokenizer.encode(written.text)
        learned = np.asarray(encoding.ids)[self._counted(encoding, written)]
        return (int(learned[-1]),) if learned.size and self._is_control[learned[-1]] else ()

    def encode(self, dialogues: Sequence[Dialogue], progress: Callable[[int], None] | None = None) -> list[Example]:
        """Returns the dialogues' tokens; see `Vocabulary.encode_examples`."""
        examples: list[Example] = []
        for batch in in_batches(dialogues):
            written = [self._write(dialogue.messages(), f"--data: {dialogue.name}") for dialogue in batch]
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
        return self._tokenizer.encode(without_marks(written).text).ids

    def _write(self, messages: Sequence[Mapping[str, str]], where: str) -> Written:
        """Returns the text of messages, the last an answer; `where` names them in errors."""
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
                    f"{where}: the chat template of {template.origin} writes the turns before the last answer in "
                    f"another way when the answer follows, so the answer's place cannot be told; "
                    f"{{% generation %}} around answers would tell it"
                )
        return Written(text, answers, marked=False)

    def _check(self, content: str, where: str, *, answers: bool) -> None:
        """Raises RunError if a turn's content would become a token that steers the dialogue."""
        if found := (self._not_in_answers if answers else self._not_in_turns).search(content):
            raise RunError(f"{where} spells {found[0]!r}, which would be a token of the chat template and not text")

    def _counted(self, encoding: "Encoding", written: Written) -> np.ndarray:
        """Returns (n,) bool: which tokens are learned."""
        counted = np.zeros(len(encoding.ids), bool)
        control = self._is_control[encoding.ids]
        starts = np.asarray([first for first, _ in encoding.offsets], np.int64)
        for first, last in written.answers:
            # A token that ends an answer may have taken the white space after it, past the end of a generation block.
            inside = within(encoding, first, last) | (control & (starts >= first) & (starts < last))
            ending = np.flatnonzero(inside & control)
            if not written.marked and ending.size and not written.text[encoding.offsets[ending[-1]][1] : last].strip():
                inside[ending[-1] + 1 :] = False  # generated text ends before the line break that the template adds
            counted |= inside
        return counted
