"""The sample that a run generates at its end."""

from typing import NamedTuple

import jax
import numpy as np

from flax_models.data.dialogue import Document
from flax_models.data.vocabulary import decoded_after
from flax_models.model.decoder import Decoder
from flax_models.model.sampling import generate
from flax_models.train.config import RunConfig
from flax_models.train.task_data import Text


class Prompt(NamedTuple):
    """What a sample continues."""

    tokens: list[int]
    shown: str
    ends: tuple[int, ...]  # tokens that end the sample


def make_prompt(text: Text, prompt: str) -> Prompt:
    """Returns the prompt of a run's sample.

    Args:
        text: the run's data.
        prompt: `--prompt`, which gets the format of the data. If it is empty, a sample of texts is the beginning of a
            document, and one of dialogues is the answer of a held-out dialogue.

    Raises:
        RunError: the chat template rejects the prompt.
    """
    vocabulary, first = text.vocabulary, text.corpus.held_out[0]
    if not isinstance(text.held_out, list) or isinstance(first, Document):
        end = vocabulary.needed_end()
        return Prompt(vocabulary.prompt(prompt) or [end], prompt, (end,))
    ends = (*vocabulary.ends, *vocabulary.format.ends)
    if prompt and first.turns[0].role == "prompt" and vocabulary.chat_template is None:
        tokens = vocabulary.prompt(prompt)  # without a heading, as in the data
    elif prompt:
        tokens = vocabulary.chat_prompt(prompt)
    else:
        example = text.held_out[0]
        tokens = example.tokens[: np.argmax(example.counted)].tolist()
    # An answer to an empty prompt may be the first of the tokens.
    return Prompt(tokens or [vocabulary.needed_end()], vocabulary.tokenizer.decode(tokens), ends)


def generate_sample(model: Decoder, prompt: Prompt, text: Text, config: RunConfig) -> str:
    """Returns a prompt with the model's continuation.

    Args:
        model: the trained model.
        prompt: what it continues.
        text: the run's data.
        config: the run's options, of which the length and the seed are read.
    """
    key = jax.random.key(config.seed)
    new = generate(model, prompt.tokens, length=config.sample_tokens, key=key, ends=prompt.ends)
    return f"sample:\n{prompt.shown}{decoded_after(text.vocabulary.tokenizer, prompt.tokens, new)}"
