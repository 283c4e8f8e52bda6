"""Documents and dialogues, and the plain-text format of a dialogue.

Without a chat template, a dialogue is formatted as follows, and each answer is followed by the end token:

    ### System:
    You are brief.

    ### Instruction:
    Which colour is it?

    ### Input:
    snow

    ### Response:
    White.

The system and input parts are present only if the record has them. The user turns of a chat are formatted as
instructions, the assistant turns as responses. A prompt and its completion have no headings: they are concatenated.

Source: Taori et al., "Stanford Alpaca", for the headings; its introductory sentence is omitted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ANSWERS = frozenset({"assistant", "output", "completion"})  # roles whose turns count in the loss
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
_IN_CHAT = {"instruction": "user", "prompt": "user", "output": "assistant", "completion": "assistant"}
_HEADINGS = {
    "system": "### System:\n",
    "developer": "### System:\n",
    "user": "### Instruction:\n",
    "instruction": "### Instruction:\n",
    "input": "### Input:\n",
    "tool": "### Tool:\n",
    "assistant": "### Response:\n",
    "output": "### Response:\n",
    "prompt": "",
    "completion": "",
}
_GAP = "\n\n"  # after a turn with a heading that is not an answer
_BATCH = 2**21  # characters: enough for all threads of the tokenizer, with a few progress updates per second


class Document(NamedTuple):
    """A text, and the name that determines whether it is held out."""

    name: str
    text: str


class Turn(NamedTuple):
    """One turn. The role is that of a chat message, or the name of the record's field (instruction, output)."""

    role: str
    content: str


class Piece(NamedTuple):
    """The plain text before an answer, and the answer."""

    prompt: str
    answer: str


class Dialogue(NamedTuple):
    """Turns, of which the last is an answer, and the name that determines whether the dialogue is held out.

    Example:
        >>> dialogue = Dialogue("a.jsonl:1", (Turn("prompt", "2 + 2 ="), Turn("completion", " 4")))
        >>> dialogue.text
        '2 + 2 = 4'
        >>> dialogue.messages()
        [{'role': 'user', 'content': '2 + 2 ='}, {'role': 'assistant', 'content': ' 4'}]
    """

    name: str
    turns: tuple[Turn, ...]

    @property
    def answers(self) -> int:
        """Number of turns that are answers."""
        return sum(turn.role in ANSWERS for turn in self.turns)

    @property
    def text(self) -> str:
        """The dialogue as plain text, without end tokens."""
        return _GAP.join(piece.prompt + piece.answer for piece in self.pieces())

    def pieces(self) -> list[Piece]:
        """Returns the dialogue as plain text, split after each answer."""
        pieces, prompt = [], ""
        for role, content in self.turns:
            heading = _HEADINGS[role]
            if role in ANSWERS:
                pieces.append(Piece(prompt + heading, content))
                prompt = ""
            else:
                prompt += heading + content + (_GAP if heading else "")
        return pieces

    def messages(self) -> list[dict[str, str]]:
        """Returns the messages for a chat template; an instruction and its input become one user message."""
        messages: list[dict[str, str]] = []
        for role, content in self.turns:
            if role == "input":
                messages[-1]["content"] += _GAP + content
            else:
                messages.append({"role": _IN_CHAT.get(role, role), "content": content})
        return messages


def plain_prompt(text: str) -> str:
    """Returns the plain text that prompts for the answer to an instruction."""
    return Dialogue("", (Turn("instruction", text), Turn("output", ""))).text


def in_batches[T: (Document, Dialogue)](records: Sequence[T]) -> Iterator[list[T]]:
    """Yields lists of records with about two million characters each, to be encoded together."""
    batch: list[T] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
