"""The vocabulary of a run: its tokenizer and end tokens.

A model with random weights uses a small tokenizer trained on the text (`flax_models.data.tokenizer`) or the tokenizer
of a Hugging Face folder. A model with the weights of a folder uses the tokenizer of that folder. A run copies the
folder's tokenizer files to runs/NAME/hub/, so that it can be resumed, exported and used for generation after the folder
has been moved.
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
from flax_models.model.config import MOST, ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HUB = "hub"  # in a run's folder: copy of a Hugging Face folder's config.json and tokenizer files
OWN = "tokenizer.json"  # in a run's folder: the tokenizer trained on its text


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the tokens that end texts.

    With a tokenizer trained on the text, no tokens are added to texts, and every prompt starts with `end`, because each
    document follows `end` in training. With the tokenizer of a Hugging Face folder, texts and prompts get the tokens
    that its template adds (<bos>).
    """

    tokenizer: "Tokenizer"
    end: int | None
    """Token after each document; None if the folder defines none, in which case training on texts is not possible."""
    ends: tuple[int, ...]
    """Tokens that end a generated text."""
    folder: Path | None = None
    """The Hugging Face folder of the tokenizer; None: trained on the text."""

    def encode(
        self, documents: Sequence[Document | Dialogue], progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Returns the tokens (n,) int32 of the documents, with `end` after each; special tokens in a text are encoded
        as plain text.

        Args:
            documents: the texts.
            progress: called repeatedly with the number of documents done so far.

        Raises:
            RunError: a document is a dialogue or contains `end`, or there is no `end`.
        """
        texts = [record for record in documents if isinstance(record, Document)]
        if len(texts) < len(documents):
            raise RunError("--data must have texts, got dialogues")
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
        """Returns the tokens of the dialogues, with a mask of the answers and their end tokens.

        Dialogues are formatted with the folder's chat template, or as plain text (`flax_models.data.dialogue`) if there
        is none.

        Args:
            dialogues: the dialogues, in order.
            progress: called repeatedly with the number of dialogues done so far.

        Raises:
            RunError: a record is a text, the template rejects a dialogue, an answer cannot be located in the text, or a
                turn contains a control token. The message names the record.

        Example:
            >>> vocabulary = read_hub_vocabulary(Path("Llama-3.2-1B-Instruct"))  # doctest: +SKIP
            >>> vocabulary.encode_examples(load_corpus([Path("alpaca.jsonl")]).train)  # doctest: +SKIP
        """
        found = [record for record in dialogues if isinstance(record, Dialogue)]
        if len(found) < len(dialogues):
            raise RunError("--data must have dialogues, got texts")
        return self.format.encode(found, progress)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The folder's chat template, None if it has none; raises RunError if it cannot be read."""
        return None if self.folder is None else read_chat_template(self.folder)

    @cached_property
    def format(self) -> ChatFormat | PlainFormat:
        """The format of dialogues."""
        from tokenizers import Tokenizer

        # A post-processor would shift the offsets that locate answers. The formats add its tokens themselves.
        tokenizer = Tokenizer.from_str(json.dumps({**json.loads(self.tokenizer.to_str()), "post_processor": None}))
        if self.chat_template is not None:
            return ChatFormat(tokenizer, self.chat_template)
        if self.folder is None:
            return PlainFormat(tokenizer, [own.END_ID], own.END_ID)
        encoding = self.tokenizer.encode("a")
        added = encoding.special_tokens_mask
        return PlainFormat(tokenizer, encoding.ids[: added.index(0) if 0 in added else None], self.needed_end())

    def chat_prompt(self, text: str) -> list[int]:
        """Returns the prompt tokens for the answer to one user turn, in the format of `encode_examples`."""
        return self.format.prompt(text)

    def needed_end(self) -> int:
        """Returns `end`; raises RunError if there is none."""
        if self.end is None:
            raise RunError(f"{self.folder} defines no end-of-text token: none of its files has eos_token_id")
        return self.end

    def prompt(self, text: str) -> list[int]:
        """Returns the prompt tokens of a text to continue; none for an empty text if the template adds no tokens.

        An end token that the template adds after a text is left out.
        """
        if self.folder is None:
            return [own.END_ID, *self.tokenizer.encode(text, add_special_tokens=False).ids]
        encoding = self.tokenizer.encode(text)
        ended = len(encoding.ids) > 1 and encoding.ids[-1] == self.end and encoding.special_tokens_mask[-1]
        return encoding.ids[:-1] if ended else encoding.ids

    def fit(self, config: ModelConfig) -> ModelConfig:
        """Returns a model's config with the vocab_size that this vocabulary needs.

        A tokenizer trained on little text may have fewer entries than requested; vocab_size is reduced, because rows
        without a token only cost time. Published models keep such rows.

        Raises:
            RunError: the tokenizer of a folder has more entries than vocab_size.
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
        """Writes the files that `read_run_vocabulary` reads into the folder of a new run; raises OSError.

        Args:
            run: folder of the run.
            weights: the run starts from the weights of the Hugging Face folder: keep its whole config.json.
        """
        if self.folder is None:
            own.write(self.tokenizer, run / OWN)
            return
        hub = run / HUB
        hub.mkdir()
        copy_companions(self.folder, hub)
        if weights:
            values = read_object(self.folder / "config.json")
        else:  # the first one is `end`
            ends = [] if self.end is None else list(dict.fromkeys((self.end, *self.ends)))
            values = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
        if self.chat_template is not None and self.chat_template.dated:
            (hub / DATE).write_text(f"{self.chat_template.date}\n", encoding="utf-8")
        (hub / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def made_from_text(tokenizer: "Tokenizer") -> Vocabulary:
    """Returns the vocabulary of a tokenizer that `flax_models.data.tokenizer` trained."""
    return Vocabulary(tokenizer, own.END_ID, (own.END_ID,))


def read_hub_vocabulary(folder: Path) -> Vocabulary:
    """Returns the vocabulary of a Hugging Face folder.

    The token after each document is eos_token of tokenizer_config.json, or else the first eos_token_id of config.json
    or generation_config.json. Generated text ends at this token, and at the tokens that generation_config.json, or else
    config.json, lists.

    Args:
        folder: holds tokenizer.json and the files that define the end tokens.

    Raises:
        RunError: tokenizer.json is missing or damaged, or another file cannot be read. The message names the file.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise RunError(f"cannot read a tokenizer: no such folder: {folder}")
    if not path.is_file():
        raise RunError(
            f"{folder} has no tokenizer.json; create it from the other tokenizer files with transformers: "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise RunError(f"cannot read the tokenizer {path}: {error}") from None
    tokenizer.no_truncation()  # the file may have been saved with truncation or padding
    tokenizer.no_padding()
    named = _named_end(folder, tokenizer)
    config, generation = (_end_ids(folder / name) for name in ("config.json", "generation_config.json"))
    ends = dict.fromkeys([*(generation or config), *named])
    return Vocabulary(tokenizer, next(iter([*named, *config, *generation]), None), tuple(ends), folder)


def _named_end(folder: Path, tokenizer: "Tokenizer") -> list[int]:
    path = folder / "tokenizer_config.json"
    token: Any = read_object(path).get("eos_token") if path.is_file() else None
    if isinstance(token, dict):  # the text and the token's flags
        token = token.get("content")
    if token is None:
        return []
    number = tokenizer.token_to_id(str(token))
    if number is None:
        raise RunError(f"{path}: eos_token must be an entry of tokenizer.json, got {token!r}")
    return [number]


def _end_ids(path: Path) -> list[int]:
    value = read_object(path).get("eos_token_id") if path.is_file() else None
    ends = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(end, int) and not isinstance(end, bool) and 0 <= end <= MOST for end in ends):
        raise RunError(f"{path}: eos_token_id must be a token's number or a list of them, got {value!r}")
    return ends


def read_run_vocabulary(run: Path) -> Vocabulary:
    """Returns the vocabulary of a run; raises RunError if its files cannot be read."""
    if (run / HUB).is_dir():
        return read_hub_vocabulary(run / HUB)
    return made_from_text(own.read(run / OWN))


def decoded_after(tokenizer: "Tokenizer", prompt: list[int], new: list[int]) -> str:
    """Returns the text of new tokens, decoded together with the prompt: some tokenizers drop a leading space."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)
