"""Dialogues as tokens, with a mark on those that are learned: the answers and the tokens that end them.

Position t of an example predicts token t + 1 and counts if token t + 1 is marked. `chat.py` writes dialogues
by a model's chat template, `PlainFormat` below as plain text; both tokenise what they write as a whole, so that tokens
are those which the model would meet, and a token that reaches over the border of an answer is not marked.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flax_models.data.dialogue import Dialogue, in_batches, plain_prompt
from flax_models.errors import RunError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


class Example(NamedTuple):
    """One dialogue's tokens."""

    name: str
    tokens: np.ndarray  # (n,) int32
    counted: np.ndarray  # (n,) bool: to be learned


class Fitted(NamedTuple):
    """Examples that fit a length, and what became of those that did not.

    Attributes:
        examples: in their order, those that are dropped left out.
        cut: how many of them have lost their end.
        dropped: how many are left out, since nothing that counts would be left.
    """

    examples: list[Example]
    cut: int
    dropped: int

    def describe(self) -> str:
        """Returns in words how many were cut and dropped, with percentages."""
        total = len(self.examples) + self.dropped
        cut, dropped = (f"{count:,} ({100 * count / total:.3g}%)" for count in (self.cut, self.dropped))
        return f"of {total:,} examples {cut} cut at their end, {dropped} dropped: no answer would be left"


def fit_examples(examples: Sequence[Example], length: int) -> Fitted:
    """Cuts examples at their end to sequences of a length, and drops those in which nothing is left to learn.

    Args:
        examples: at least one.
        length: positions of a sequence (T): an example keeps T + 1 tokens, as the last position predicts one too.

    Returns:
        The examples that are left, and how many were cut and dropped.

    Raises:
        RunError: none is left.

    Example:
        >>> counted = np.array([False, False, True, True])
        >>> example = Example("a.jsonl:1", np.arange(4, dtype=np.int32), counted)
        >>> fit_examples([example], length=2).examples[0].tokens
        array([0, 1, 2], dtype=int32)
    """
    kept: list[Example] = []
    cut = 0
    for name, tokens, counted in examples:
        if counted[1 : length + 1].any():
            kept.append(Example(name, tokens[: length + 1], counted[: length + 1]))
            cut += len(tokens) > length + 1
    if not kept:
        shortest = min(int(np.argmax(counted)) for _, _, counted in examples)
        raise RunError(
            f"none of {len(examples):,} examples has an answer within --max-seq-len {length}: "
            f"the first answer of the shortest begins after {shortest:,} tokens"
        )
    return Fitted(kept, cut, len(examples) - len(kept))


def to_arrays(examples: Sequence[Example]) -> dict[str, np.ndarray]:
    """Returns examples as three arrays, for a file; `from_arrays` turns them back, given the names."""
    none = np.zeros(0, np.int32)
    return {
        "lengths": np.asarray([len(example.tokens) for example in examples], np.int64),
        "tokens": np.concatenate([none, *(example.tokens for example in examples)]),
        "counted": np.concatenate([none.astype(bool), *(example.counted for example in examples)]),
    }


def from_arrays(arrays: dict[str, np.ndarray], names: Sequence[str]) -> list[Example]:
    """Returns the examples of `to_arrays`; raises ValueError or KeyError where the arrays do not belong together."""
    bounds = pairwise(accumulate(arrays["lengths"].tolist(), initial=0))
    if not len(arrays["tokens"]) == len(arrays["counted"]) == arrays["lengths"].sum():
        raise ValueError("its arrays have different lengths")
    return [
        Example(name, arrays["tokens"][first:last], arrays["counted"][first:last])
        for name, (first, last) in zip(names, bounds, strict=True)
    ]


class PlainFormat:
    """Writes dialogues as plain text (`flax_models.data.dialogue`); what spells a special token is plain text too.

    Args:
        tokenizer: without a post-processor, which would move offsets.
        before: tokens that each example begins with, as every prompt does.
        end: token after each answer.

    Attributes:
        name: for people.
        ends: tokens that end an answer.
        key: everything that its tokens depend on, beside the tokenizer.
    """

    name = "plain text (### Instruction, ### Response), as there is no chat template"

    def __init__(self, tokenizer: "Tokenizer", before: Sequence[int], end: int) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer, self._before, self._end = tokenizer, list(before), end
        self.ends = (end,)
        self.key = ("plain", *map(str, before), str(end))

    def encode(self, dialogues: Sequence[Dialogue], progress: Callable[[int], None] | None = None) -> list[Example]:
        """Returns the dialogues' tokens, each answer followed by the end token; see `Vocabulary.encode_examples`."""
        examples: list[Example] = []
        for batch in in_batches(dialogues):
            texts = [piece.prompt + piece.answer for dialogue in batch for piece in dialogue.pieces()]
            encoded = iter(self._tokenizer.encode_batch(texts))
            for dialogue in batch:
                tokens, counted = [*self._before], [False] * len(self._before)
                for prompt, answer in dialogue.pieces():
                    encoding = next(encoded)
                    if self._end in encoding.ids:  # of tokenizers that know it as a word of its own too
                        word = self._tokenizer.id_to_token(self._end)
                        raise RunError(f"--data: {dialogue.name} spells {word}, which ends an answer")
                    tokens += [*encoding.ids, self._end]
                    counted += [*within(encoding, len(prompt), len(prompt + answer)), True]
                examples.append(Example(dialogue.name, np.asarray(tokens, np.int32), np.asarray(counted, bool)))
            if progress is not None:
                progress(len(examples))
        return examples

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens that the answer to an instruction is drawn after."""
        return [*self._before, *self._tokenizer.encode(plain_prompt(text)).ids]


def within(encoding: "Encoding", first: int, last: int) -> np.ndarray:
    """Returns (n,) bool: which tokens lie in the characters from `first` to before `last`, none over the border."""
    offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)  # (n, 2)
    return (offsets[:, 0] >= first) & (offsets[:, 0] < last) & (offsets[:, 1] <= last)
