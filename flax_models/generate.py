"""`python -m flax_models.generate`: generate text with a folder of weights or with a run.

    python -m flax_models.generate --weights Llama-3.2-1B --dtype bfloat16 --prompt "Once upon" --prompt "The sea"
    python -m flax_models.generate --run runs/tiny --prompt "def main():"
    python -m flax_models.generate --run runs/Llama-3.2-1B --chat --prompt "Which colour is snow?"

`flax_models.model.sampling.continue_prompts` samples the tokens.
"""

import sys

from flax_models.command_line import OneLineParser, silent_interrupts

if __name__ == "__main__":  # before the other imports, which take seconds
    with silent_interrupts():
        from flax_models import generate as program
    sys.exit(program.main())

import argparse
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from flax_models.data.vocabulary import Vocabulary, decoded_after, read_hub_vocabulary
from flax_models.errors import RunError
from flax_models.hub.config import config_note, read_config
from flax_models.hub.weights import load
from flax_models.model.decoder import Decoder, Dtype
from flax_models.model.lora import merge
from flax_models.model.sampling import Sampling, continue_prompts
from flax_models.train.config import check_seed
from flax_models.train.trained import add_checkpoint_options, read_run

PROGRAM = "python -m flax_models.generate"
LENGTH = 128  # default of --length


class Source(NamedTuple):
    """A model and its vocabulary."""

    model: Decoder
    vocabulary: Vocabulary


def read_weights(folder: Path, dtype: str, ignored: Sequence[str] = ()) -> Source:
    """Reads the model and the vocabulary of a Hugging Face folder.

    Args:
        folder: holds weights, config.json and tokenizer.json; generation_config.json or config.json names the
            end-of-text tokens.
        dtype: dtype of the computation and of the parameters.
        ignored: unknown fields of config.json to ignore.

    Raises:
        RunError: a file is missing or cannot be read.
    """
    read_config(folder, ignored)  # report errors in config.json and in the tokenizer before reading the weights
    vocabulary = read_hub_vocabulary(folder)
    return Source(load(folder, ignore_config_fields=ignored, dtype=dtype, param_dtype=dtype), vocabulary)


def continue_texts(
    source: Source, texts: Sequence[str], *, length: int | None, seed: int, sampling: Sampling, chat: bool = False
) -> list[str]:
    """Generates a continuation of each text.

    Args:
        source: the model and its vocabulary.
        texts: at least one text.
        length: maximum number of new tokens for each text. None: LENGTH, or fewer if max_seq_len leaves less room; a
            note on stderr reports this.
        seed: random seed.
        sampling: how tokens are sampled.
        chat: treat each text as a user turn, formatted by the chat template, and generate the answer.

    Returns:
        The continuations, without the texts.

    Raises:
        RunError: a text and `length` tokens exceed the model's max_seq_len, a text has no tokens, or the chat template
            rejects it.
    """
    vocabulary = source.vocabulary
    prompts = [vocabulary.chat_prompt(text) if chat else vocabulary.prompt(text) for text in texts]
    width, longest = max(map(len, prompts)), source.model.config.max_seq_len
    if not all(prompts):
        raise RunError("--prompt must have at least one token, got none")
    if width >= longest:
        raise RunError(f"--prompt must have fewer tokens than the model's max_seq_len {longest}, got {width}")
    room = longest - width
    if (length or LENGTH) > room:
        why = f"the longest prompt has {width} tokens and the model's max_seq_len is {longest}"
        if length is not None:
            raise RunError(f"--length must be at most {room}, got {length}: {why}")
        print(f"note: --length is {room} instead of {LENGTH}: {why}", file=sys.stderr)
    new_tokens = continue_prompts(
        source.model,
        prompts,
        length=min(length or LENGTH, room),
        key=jax.random.key(seed),
        sampling=sampling,
        ends=tuple(dict.fromkeys((*vocabulary.ends, *vocabulary.format.ends))) if chat else vocabulary.ends,
    )
    return [decoded_after(vocabulary.tokenizer, prompt, new) for prompt, new in zip(prompts, new_tokens, strict=True)]


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Sampling]:
    """Parses the command line; exits with status 2 if it is wrong, whatever the files that it names contain."""
    command = parser()
    options = command.parse_args(arguments)
    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_tokens)
    except ValueError as error:
        command.error(f"--{str(error).replace('_', '-')}")
    try:
        check_seed(options.seed)
    except ValueError as error:
        command.error(str(error))
    if options.length is not None and options.length < 1:
        command.error(f"--length must be at least 1, got {options.length}")
    if options.run is not None:
        if options.ignore_config_fields:
            command.error("--ignore-config-fields requires --weights, got --run")
        if options.dtype is not None:
            command.error("--dtype requires --weights, got --run")
    elif options.step is not None or options.allow_older:
        command.error(f"--{'allow-older' if options.allow_older else 'step'} requires --run, got --weights")
    return options, sampling


def parser() -> argparse.ArgumentParser:
    """Returns the command line's options."""
    options = OneLineParser(prog=PROGRAM, description="Continue texts with a trained model.")
    where = options.add_mutually_exclusive_group(required=True)
    where.add_argument("--weights", type=Path, help="Hugging Face folder: safetensors, config.json, tokenizer.json")
    where.add_argument("--run", type=Path, help="folder of a run of flax_models.train")
    options.add_argument("--prompt", action="append", required=True, help="text to continue; may be repeated")
    options.add_argument(
        "--chat",
        action="store_true",
        help="format each prompt as a user turn with the chat template, and print only the answers",
    )
    options.add_argument(
        "--length",
        type=int,
        help=f"maximum number of new tokens for each prompt (default: {LENGTH}, or fewer if max_seq_len leaves less)",
    )
    options.add_argument(
        "--temperature", type=float, default=0.8, help="sampling temperature; 0: always the most likely token (0.8)"
    )
    options.add_argument("--top-k", type=int, default=40, help="sample from the k most likely tokens; 0: from all (40)")
    options.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens whose total probability reaches p (1)",
    )
    options.add_argument("--min-tokens", type=int, default=0, help="minimum number of new tokens (0)")
    options.add_argument("--seed", type=int, default=0, help="random seed (0)")
    options.add_argument(
        "--dtype",
        choices=typing.get_args(Dtype),
        help="dtype of the computation and of the parameters, with --weights (float32)",
    )
    options.add_argument(
        "--ignore-config-fields",
        nargs="+",
        default=(),
        metavar="NAME",
        help="unknown fields in the config.json of --weights to ignore; they must not change what the model computes",
    )
    add_checkpoint_options(options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status: 0, 1 for an error that the user can fix, 130 for Ctrl-C. Exits with
    status 2 if the command line is wrong."""
    options, sampling = parse(arguments)
    try:
        if options.run is not None:
            run = read_run(options.run, step=options.step, allow_older=options.allow_older)
            source = Source(merge(run.model), run.vocabulary)
        else:
            if note := config_note(options.weights, options.ignore_config_fields):
                print(f"note: {note}", file=sys.stderr)
            source = read_weights(options.weights, options.dtype or "float32", options.ignore_config_fields)
        texts = continue_texts(
            source,
            options.prompt,
            length=options.length,
            seed=options.seed,
            sampling=sampling,
            chat=options.chat,
        )
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for prompt, text in zip(options.prompt, texts, strict=True):
        print(text if options.chat else prompt + text)
        if len(texts) > 1:
            print("---")
    return 0
