"""`python -m flax_models.generate`: text from a folder of weights or from a run.

    python -m flax_models.generate --weights Llama-3.2-1B --dtype bfloat16 --prompt "Once upon" --prompt "The sea"
    python -m flax_models.generate --run runs/tiny --prompt "def main():"
    python -m flax_models.generate --run runs/Llama-3.2-1B --chat --prompt "Which colour is snow?"

`continue_prompts` of `flax_models.sampling` draws, with a cache. `generate`, below, serves the sample at the end of a
training run: it has no cache, and goes on past the model's max_seq_len.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_models.errors import RunError
from flax_models.hub_config import read_config
from flax_models.lora import merge
from flax_models.model import Decoder
from flax_models.sampling import Sampling, continue_prompts
from flax_models.trained import read_run
from flax_models.vocabulary import Vocabulary, read_hub_vocabulary
from flax_models.weights import load

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROGRAM = "python -m flax_models.generate"


@jax.jit(static_argnames=("graph", "top_k"))
def _next_token(
    graph: nnx.GraphDef,
    params: nnx.State,
    window: jax.Array,  # (1, T)
    last: jax.Array,  # () place of the last token in the window
    key: jax.Array,
    temperature: jax.Array,
    top_k: int,
) -> jax.Array:
    model = nnx.merge(graph, params)
    logits = model.logits(model(window)[0, last])  # (V,): of one position alone
    values, entries = jax.lax.top_k(logits, min(top_k, logits.shape[0]))
    return entries[jax.random.categorical(key, values / temperature)]


def generate(
    model: Decoder,
    prompt: Sequence[int],
    *,
    length: int,
    key: jax.Array,
    temperature: float = 0.8,
    top_k: int = 40,
    ends: Sequence[int] = (),
) -> list[int]:
    """Draws a continuation of a prompt, each token from softmax(logits / temperature) over the top_k largest logits.

    The window is the model's max_seq_len: of a longer text the model sees its end.

    Args:
        model: the decoder.
        prompt: at least one token.
        length: most tokens to draw.
        key: of jax.random.
        temperature: > 0; small values keep to the likeliest tokens.
        top_k: >= 1; 1 takes the likeliest token every time.
        ends: tokens that end the text; none of them is returned.

    Returns:
        The tokens drawn, without the prompt.

    Raises:
        ValueError: an empty prompt, or an option outside its range.

    Example:
        >>> from flax_models.model import ModelConfig
        >>> model = Decoder(ModelConfig(vocab_size=50, num_layers=1), rngs=nnx.Rngs(0))
        >>> len(generate(model, [0], length=5, key=jax.random.key(0)))
        5

    Source: Fan et al., "Hierarchical neural story generation", section 5.1.
    """
    if not prompt:
        raise ValueError("prompt must have at least one token, got none")
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    graph, params = nnx.split(model)
    width = model.config.max_seq_len
    tokens = list(prompt)
    for step_key in jax.random.split(key, length):
        seen = tokens[-width:]
        # One shape for every length: causal attention never looks at the padding.
        window = np.zeros((1, width), np.int32)
        window[0, : len(seen)] = seen
        last = jnp.asarray(len(seen) - 1)
        token = int(_next_token(graph, params, window, last, step_key, jnp.asarray(temperature), top_k))
        if token in ends:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class Source(NamedTuple):
    """A model with what turns text into its tokens and back."""

    model: Decoder
    vocabulary: Vocabulary


def read_weights(folder: Path, dtype: str) -> Source:
    """Returns the model of a Hugging Face folder, its tokenizer and the tokens that end its texts.

    Args:
        folder: holds weights, config.json and tokenizer.json; generation_config.json or config.json names the ends.
        dtype: of computation and parameters.

    Raises:
        RunError: a file is missing or cannot be read.
    """
    read_config(folder)  # as the tokenizer: what is wrong with either is told before gigabytes are read
    vocabulary = read_hub_vocabulary(folder)
    return Source(load(folder, dtype=dtype, param_dtype=dtype), vocabulary)


def continue_texts(
    source: Source, texts: Sequence[str], *, length: int, seed: int, sampling: Sampling, chat: bool = False
) -> list[str]:
    """Returns every text's continuation, without the text.

    Args:
        source: the model and its tokenizer.
        texts: at least one.
        length: most tokens for each; fewer where the model's max_seq_len ends.
        seed: of what is drawn.
        sampling: how.
        chat: each text is a user's turn, and its continuation the answer: in the chat template, as examples are.

    Raises:
        RunError: a text leaves no room for a token, has no token at all, or is refused by the chat template.
    """
    vocabulary = source.vocabulary
    prompts = [vocabulary.chat_prompt(text) if chat else vocabulary.prompt(text) for text in texts]
    width, longest = max(map(len, prompts)), source.model.config.max_seq_len
    if not all(prompts):
        raise RunError("--prompt must have at least one token with this tokenizer, got an empty one")
    if width >= longest:
        raise RunError(f"--prompt must have fewer tokens than the model's max_seq_len {longest}, got {width}")
    drawn = continue_prompts(
        source.model,
        prompts,
        length=min(length, longest - width),
        key=jax.random.key(seed),
        sampling=sampling,
        ends=tuple(dict.fromkeys((*vocabulary.ends, *vocabulary.format.ends))) if chat else vocabulary.ends,
    )
    return [decoded_after(vocabulary.tokenizer, prompt, new) for prompt, new in zip(prompts, drawn, strict=True)]


def decoded_after(tokenizer: "Tokenizer", prompt: list[int], new: list[int]) -> str:
    """Returns what new tokens add to a prompt's text, decoded with it: some tokenizers drop a text's first space."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def parser() -> argparse.ArgumentParser:
    """Returns the command line's options."""
    options = argparse.ArgumentParser(prog=PROGRAM, description="Continue texts with a trained model.")
    where = options.add_mutually_exclusive_group(required=True)
    where.add_argument("--weights", type=Path, help="Hugging Face folder: safetensors, config.json, tokenizer.json")
    where.add_argument("--run", type=Path, help="folder of a run of flax_models.train")
    options.add_argument("--prompt", action="append", required=True, help="text to continue; may be given many times")
    options.add_argument(
        "--chat", action="store_true", help="prompts are a user's turns, put through the chat template; print answers"
    )
    options.add_argument("--length", type=int, default=128, help="most tokens to draw for each prompt (128)")
    options.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    options.add_argument("--top-k", type=int, default=40, help="draw from so many likeliest tokens, 0: all (40)")
    options.add_argument("--top-p", type=float, default=1.0, help="draw from tokens of this probability (1)")
    options.add_argument("--min-tokens", type=int, default=0, help="no text ends before it has so many (0)")
    options.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    options.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of --weights (float32)"
    )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 1 for what a person can mend."""
    options = parser().parse_args(arguments)
    try:
        try:
            sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_tokens)
        except ValueError as error:
            raise RunError(f"--{str(error).replace('_', '-')}") from None
        if options.length < 1:
            raise RunError(f"--length must be at least 1, got {options.length}")
        if options.run is not None:
            run = read_run(options.run)
            source = Source(merge(run.model), run.vocabulary)
        else:
            source = read_weights(options.weights, options.dtype)
        texts = continue_texts(
            source,
            options.prompt,
            length=options.length,
            seed=options.seed,
            sampling=sampling,
            chat=options.chat,
        )
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for prompt, text in zip(options.prompt, texts, strict=True):
        print(text if options.chat else prompt + text)
        if len(texts) > 1:
            print("---")
    return 0


if __name__ == "__main__":
    sys.exit(main())
