"""Tokenized dialogues, with a mask of the tokens that count in the loss: the answers and their end tokens.

Position t of an example predicts token t + 1, and counts if the mask is True for token t + 1. `chat.py` formats
dialogues with a chat template, `PlainFormat` formats them as plain text. Both tokenize the whole text at once, so that
the tokens are the same as in generation. A token that crosses the boundary of an answer does not count.
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
    """The tokens of one dialogue."""

    name: str
    tokens: np.ndarray  # (n,) int32
    counted: np.ndarray  # (n,) bool: tokens that count in the loss


class Fitted(NamedTuple):
    """Examples truncated to a length, with the number of truncated and dropped examples.

    Attributes:
        examples: the remaining examples, in their order.
        cut: number of truncated examples.
        dropped: number of examples dropped because no counted token would be left.
    """

    examples: list[Example]
    cut: int
    dropped: int

    def describe(self) -> str:
        """Describes how many examples were truncated and dropped, with percentages."""
        total = len(self.examples) + self.dropped
        cut, dropped = (f"{count:,} ({100 * count / total:.3g}%)" for count in (self.cut, self.dropped))
        return f"of {total:,} examples, {cut} truncated, {dropped} dropped because no answer would be left"


def fit_examples(examples: Sequence[Example], length: int) -> Fitted:
    """Truncates examples at their end to a length, and drops examples with no counted token left.

    Args:
        examples: at least one example.
        length: positions per sequence (T): an example keeps T + 1 tokens, including the target of the last position.

    Returns:
        The remaining examples, and how many were truncated and dropped.

    Raises:
        RunError: no example remains.

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
    """Converts examples to three arrays, which a file can store; `from_arrays` is the inverse."""
    none = np.zeros(0, np.int32)
    return {
        "lengths": np.asarray([len(example.tokens) for example in examples], np.int64),
        "tokens": np.concatenate([none, *(example.tokens for example in examples)]),
        "counted": np.concatenate([none.astype(bool), *(example.counted for example in examples)]),
    }


def from_arrays(arrays: dict[str, np.ndarray], names: Sequence[str]) -> list[Example]:
    """Converts the arrays of `to_arrays` to examples; raises ValueError or KeyError if the arrays are inconsistent."""
    bounds = pairwise(accumulate(arrays["lengths"].tolist(), initial=0))
    if not len(arrays["tokens"]) == len(arrays["counted"]) == arrays["lengths"].sum():
        raise ValueError("its arrays have inconsistent lengths")
    return [
        Example(name, arrays["tokens"][first:last], arrays["counted"][first:last])
        for name, (first, last) in zip(names, bounds, strict=True)
    ]


class PlainFormat:
    """Formats dialogues as plain text (`flax_models.data.dialogue`); the text of a special token stays plain text.

    Args:
        tokenizer: tokenizer without a post-processor, which would shift offsets.
        before: tokens at the start of each example and of each prompt.
        end: token after each answer.

    Attributes:
        name: human-readable name of the format.
        ends: tokens that end an answer.
        key: everything besides the tokenizer that the tokens depend on, for the token cache.
    """

    name = "plain text (### Instruction, ### Response), because there is no chat template"

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
                    if self._end in encoding.ids:  # possible if the token is also a regular entry of the vocabulary
                        word = self._tokenizer.id_to_token(self._end)
                        raise RunError(f"--data: {dialogue.name} contains {word}, which is the end token of answers")
                    tokens += [*encoding.ids, self._end]
                    counted += [*within(encoding, len(prompt), len(prompt + answer)), True]
                examples.append(Example(dialogue.name, np.asarray(tokens, np.int32), np.asarray(counted, bool)))
            if progress is not None:
                progress(len(examples))
        return examples

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens of the prompt for the answer to an instruction."""
        return [*self._before, *self._tokenizer.encode(plain_prompt(text)).ids]


def within(encoding: "Encoding", first: int, last: int) -> np.ndarray:
    """Returns (n,) bool: which tokens lie completely in the range of characters [first, last)."""
    offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)  # (n, 2)
    return (offsets[:, 0] >= first) & (offsets[:, 0] < last) & (offsets[:, 1] <= last)
