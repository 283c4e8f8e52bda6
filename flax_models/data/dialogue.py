"""What a corpus is made of: texts, and dialogues with answers to learn; and how a dialogue reads as plain text.

Where a model has no chat template, a dialogue is written like this, and an answer is followed by the end token:

    ### System:
    You are brief.

    ### Instruction:
    Which colour is it?

    ### Input:
    snow

    ### Response:
    White.

System and input stand there if the record has them; a chat's user turns are instructions and its assistant turns
responses. A prompt with its completion has no headings: the one follows the other as they stand.

Source: Taori et al., "Stanford Alpaca", for the headings; the sentence that it puts before them is left out.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ANSWERS = frozenset({"assistant", "output", "completion"})  # roles whose turns are learned
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
_GAP = "\n\n"  # after a turn with a heading, if it is no answer
_BATCH = 2**21  # characters: every thread has some of them, and progress is told a few times a second


class Document(NamedTuple):
    """One text and the name it is split by."""

    name: str
    text: str


class Turn(NamedTuple):
    """What one side says; the role is a chat's, or the name of the field that it stood in (instruction, output)."""

    role: str
    content: str


class Piece(NamedTuple):
    """Plain text up to an answer, and the answer."""

    prompt: str
    answer: str


class Dialogue(NamedTuple):
    """Turns, the last of them an answer, and the name that they are split by.

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
        """How many of the turns are answers."""
        return sum(turn.role in ANSWERS for turn in self.turns)

    @property
    def text(self) -> str:
        """The dialogue as plain text, without tokens that end answers."""
        return _GAP.join(piece.prompt + piece.answer for piece in self.pieces())

    def pieces(self) -> list[Piece]:
        """Returns the dialogue as plain text, in pieces that each end with an answer."""
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
        """Returns the dialogue as a chat template takes it; an input follows its instruction in one user turn."""
        messages: list[dict[str, str]] = []
        for role, content in self.turns:
            if role == "input":
                messages[-1]["content"] += _GAP + content
            else:
                messages.append({"role": _IN_CHAT.get(role, role), "content": content})
        return messages


def plain_prompt(text: str) -> str:
    """Returns the plain text that asks for the answer to one instruction."""
    return Dialogue("", (Turn("instruction", text), Turn("output", ""))).text


def in_batches[T: (Document, Dialogue)](records: Sequence[T]) -> Iterator[list[T]]:
    """Yields records in lists of about two million characters, to be encoded together."""
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
