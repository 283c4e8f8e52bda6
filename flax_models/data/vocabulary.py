"""The tokens of a run: text into them and back, which one ends a document, and where they come from.

Random weights are trained with a small tokenizer made from the text (`flax_models.data.tokenizer`), or with that of a
Hugging Face folder; a folder's weights with the folder's own. A run keeps what it needs of such a folder in
runs/NAME/hub/, so that it goes on, generates and exports when the folder has moved.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_models.data import tokenizer as own
from flax_models.data.chat import ChatFormat
from flax_models.data.chat_template import DATE, ChatTemplate, read_chat_template
from flax_models.data.dialogue import Dialogue, Document
from flax_models.data.examples import Example, PlainFormat
from flax_models.errors import RunError
from flax_models.hub.config import read_object
from flax_models.hub.weights import copy_companions
from flax_models.model.config import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HUB = "hub"  # a run's copy of a Hugging Face folder's config.json and tokenizer files
OWN = "tokenizer.json"  # of a run whose tokenizer was made from its text


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and what its tokens mean to a run.

    With a tokenizer made from the text, texts are encoded as they stand, and every prompt follows `end`, as documents
    do in training. With a Hugging Face folder's, texts and prompts have what its template puts around them (<bos>).
    """

    tokenizer: "Tokenizer"
    end: int | None
    """Token after each document; None where a folder names none, and nothing can be trained on it."""
    ends: tuple[int, ...]
    """Tokens that end a generated text."""
    folder: Path | None = None
    """The Hugging Face folder that it was read from; None: made from the text."""

    def encode(
        self, documents: Sequence[Document | Dialogue], progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Returns the documents' tokens (n,) int32, `end` after each; what spells a special token is plain text.

        Args:
            documents: texts.
            progress: called with the number of documents done, every now and then.

        Raises:
            RunError: one of them is a dialogue, or spells `end`, or there is no `end`.
        """
        texts = [record for record in documents if isinstance(record, Document)]
        if len(texts) < len(documents):
            raise RunError("--data: dialogues with answers to learn were given where texts are wanted")
        if self.folder is None:
            return own.encode(self.tokenizer, texts, progress=progress)
        end = self.needed_end()
        self.tokenizer.encode_special_tokens = True
        try:
            return own.encode(self.tokenizer, texts, end=end, template=True, progress=progress)
        finally:
            self.tokenizer.encode_special_tokens = False

    def encode_examples(
        self, dialogues: Sequence[Document | Dialogue], progress: Callable[[int], None] | None = None
    ) -> list[Example]:
        """Returns the dialogues' tokens, those marked that are learned: the answers and what ends them.

        They are written by the folder's chat template; as plain text (`flax_models.data.dialogue`) where there is none.

        Args:
            dialogues: in this order.
            progress: called with the number of dialogues done, every now and then.

        Raises:
            RunError: one of them is a text, or the template refuses a dialogue, or an answer cannot be told from the
                rest, or a turn spells a token that steers dialogues; names the record.

        Example:
            >>> vocabulary = read_hub_vocabulary(Path("Llama-3.2-1B-Instruct"))  # doctest: +SKIP
            >>> vocabulary.encode_examples(load_corpus([Path("alpaca.jsonl")]).train)  # doctest: +SKIP
        """
        found = [record for record in dialogues if isinstance(record, Dialogue)]
        if len(found) < len(dialogues):
            raise RunError("--data: texts were given where dialogues with answers to learn are wanted")
        return self.format.encode(found, progress)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The folder's, None where it has none; raises RunError if it cannot be read."""
        return None if self.folder is None else read_chat_template(self.folder)

    @cached_property
    def format(self) -> ChatFormat | PlainFormat:
        """How dialogues are written."""
        from tokenizers import Tokenizer

        # Post-processors move offsets, and with them the borders of answers; what else they do, formats do themselves.
        tokenizer = Tokenizer.from_str(json.dumps({**json.loads(self.tokenizer.to_str()), "post_processor": None}))
        if self.chat_template is not None:
            return ChatFormat(tokenizer, self.chat_template)
        if self.folder is None:
            return PlainFormat(tokenizer, [own.END_ID], own.END_ID)
        encoding = self.tokenizer.encode("a")
        added = encoding.special_tokens_mask
        return PlainFormat(tokenizer, encoding.ids[: added.index(0) if 0 in added else None], self.needed_end())

    def chat_prompt(self, text: str) -> list[int]:
        """Returns the tokens that the answer to one user's turn is drawn after, as `encode_examples` writes them."""
        return self.format.prompt(text)

    def needed_end(self) -> int:
        """Returns `end`; raises RunError where there is none."""
        if self.end is None:
            raise RunError(f"{self.folder} names no token that ends a text: eos_token_id is in none of its files")
        return self.end

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens that a text is continued from; none for an empty text that no template adds to."""
        if self.folder is None:
            return [own.END_ID, *self.tokenizer.encode(text, add_special_tokens=False).ids]
        return self.tokenizer.encode(text).ids

    def fit(self, config: ModelConfig) -> ModelConfig:
        """Returns a model's config with as many rows as this vocabulary needs.

        A tokenizer made from little text may not fill the vocabulary asked for; rows without a token would flatter
        nobody and cost time. Published models have such rows, and keep them.

        Raises:
            RunError: the tokenizer of a folder has more entries than the model has rows.
        """
        size = 1 + max(self.tokenizer.get_vocab().values())
        if self.folder is None:
            return dataclasses.replace(config, vocab_size=size)
        if size > config.vocab_size:
            raise RunError(
                f"the tokenizer of {self.folder} has {size:,} entries, and --vocab-size is {config.vocab_size:,}"
            )
        return config

    def write(self, run: Path, *, weights: bool) -> None:
        """Writes what `read_run_vocabulary` reads into the folder of a new run; raises OSError.

        Args:
            run: the folder.
            weights: the folder's weights are trained too, and its config.json is kept with its tokenizer.
        """
        if self.folder is None:
            own.write(self.tokenizer, run / OWN)
            return
        hub = run / HUB
        hub.mkdir()
        copy_companions(self.folder, hub)
        values = read_object(self.folder / "config.json") if weights else {"eos_token_id": self.end}
        if self.chat_template is not None and self.chat_template.dated:
            (hub / DATE).write_text(f"{self.chat_template.date}\n", encoding="utf-8")
        (hub / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def made_from_text(tokenizer: "Tokenizer") -> Vocabulary:
    """Returns the vocabulary of a tokenizer that `flax_models.data.tokenizer` made."""
    return Vocabulary(tokenizer, own.END_ID, (own.END_ID,))


def read_hub_vocabulary(folder: Path) -> Vocabulary:
    """Returns the vocabulary of a Hugging Face folder.

    The token after each document is the tokenizer's own end (eos_token of tokenizer_config.json), or else the first
    eos_token_id of config.json or generation_config.json. It ends generated texts too, beside those that
    generation_config.json (or else config.json) lists.

    Args:
        folder: holds tokenizer.json, and files that name the end.

    Raises:
        RunError: tokenizer.json is missing or broken, or another file cannot be read; names it.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise RunError(
            f"{folder} has no tokenizer.json; transformers makes one of other tokenizer files: "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a broken file
        raise RunError(f"cannot read the tokenizer {path}: {error}") from None
    tokenizer.no_truncation()  # a file may have been saved with either, and texts are neither cut nor filled up here
    tokenizer.no_padding()
    named = _named_end(folder, tokenizer)
    config, generation = (_end_ids(folder / name) for name in ("config.json", "generation_config.json"))
    ends = dict.fromkeys([*(generation or config), *named])
    return Vocabulary(tokenizer, next(iter([*named, *config, *generation]), None), tuple(ends), folder)


def _named_end(folder: Path, tokenizer: "Tokenizer") -> list[int]:
    path = folder / "tokenizer_config.json"
    token: Any = read_object(path).get("eos_token") if path.is_file() else None
    if isinstance(token, dict):  # with the token's flags beside its text
        token = token.get("content")
    if token is None:
        return []
    number = tokenizer.token_to_id(str(token))
    if number is None:
        raise RunError(f"{path}: eos_token must be an entry of tokenizer.json, got {token!r}")
    return [number]


def _end_ids(path: Path) -> list[int]:
    ends = read_object(path).get("eos_token_id") if path.is_file() else None
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def read_run_vocabulary(run: Path) -> Vocabulary:
    """Returns the vocabulary that a run was started with; raises RunError if its files cannot be read."""
    if (run / HUB).is_dir():
        return read_hub_vocabulary(run / HUB)
    return made_from_text(own.read(run / OWN))


def decoded_after(tokenizer: "Tokenizer", prompt: list[int], new: list[int]) -> str:
    """Returns what new tokens add to a prompt's text, decoded with it: some tokenizers drop a text's first space."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)
