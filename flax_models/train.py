"""`python -m flax_models.train`: trains a language model on text and says how well it did.

Without an argument it trains the `tiny` config on the Python standard library's sources, and ends with the held-out
loss beside three baselines and a sample of generated text. Everything it learns stays in runs/NAME/.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from flax_models import tokenizer as tokenizers_of_runs
from flax_models.baselines import Baselines, baselines
from flax_models.batches import Batch, BatchSampler, held_out_windows
from flax_models.checkpoint import Checkpoints
from flax_models.config import CONFIGS, RunConfig, check_same
from flax_models.corpus import Corpus, load_corpus
from flax_models.display import Display, duration
from flax_models.errors import RunError
from flax_models.generate import generate
from flax_models.loop import RunParts, train
from flax_models.metrics import MetricsLog, read_rows
from flax_models.model import Decoder
from flax_models.plot import plot_losses
from flax_models.run_folder import RunRecord, folder_to_resume, new_folder, read_record, write_record
from flax_models.step import Trainer
from flax_models.tokenizer import END_ID

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROGRAM = "python -m flax_models.train"


def parse(arguments: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """Returns the options, and the folder of the run to continue if one is.

    `--config` names the defaults of all other options, and `--resume` takes them from the run that it continues, so
    both are looked for before the rest is read.

    Args:
        arguments: of the command line.

    Returns:
        (config, folder to continue or None).

    Raises:
        RunError: there is nothing to continue, or an option differs from the run's.
        SystemExit: an option is wrong, or --help.
    """
    import tyro

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, prog=PROGRAM)
    first.add_argument("--config", choices=tuple(CONFIGS), default="tiny")
    first.add_argument("--name")
    first.add_argument("--runs", type=Path, default=RunConfig.runs)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(arguments)
    defaults, folder = CONFIGS[known.config], None
    if known.resume:
        folder = folder_to_resume(known.runs, known.name, known.config)
        stored = read_record(folder).config
        defaults = dataclasses.replace(stored, name=folder.name)
    config = tyro.cli(
        RunConfig,
        prog=PROGRAM,
        args=list(arguments),
        default=defaults,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    if folder is not None:
        check_same(config, stored, folder / "config.json")
    return config, folder


def run(config: RunConfig, resumed: Path | None, display: Display) -> None:
    """Trains, measures and samples one run.

    Args:
        config: its options.
        resumed: folder of the run to continue, None for a new one.
        display: where to say what happens.

    Raises:
        RunError: anything the person who started it can mend.
    """
    began = time.monotonic()
    folder = resumed or new_folder(config)
    display.fact("run", f"{folder} ({'continued' if resumed else config.config})")
    corpus = load_corpus(config.data)
    display.fact("corpus", _describe_corpus(corpus))
    if resumed:
        if read_record(folder).corpus_sha256 != corpus.sha256:
            raise RunError(f"--resume: the text has changed since {folder} was started (its hash is another)")
        tokenizer, origin = tokenizers_of_runs.read(folder / "tokenizer.json"), "the run's own"
    else:
        tokenizer, origin = tokenizers_of_runs.load_or_train(
            corpus.train, config.model.vocab_size, tokenizers_of_runs.cache_folder()
        )
    vocab_size = tokenizer.get_vocab_size()
    display.fact("tokenizer", f"{vocab_size:,} entries, {origin}")
    stream = tokenizers_of_runs.encode(tokenizer, corpus.train)
    held_out = tokenizers_of_runs.encode(tokenizer, corpus.held_out)
    display.fact("tokens", f"{len(stream):,} to train on, {len(held_out):,} held out")

    train_config = config.train
    # Little text may not fill the vocabulary asked for; rows without a token would flatter nobody and cost time.
    model_config = dataclasses.replace(config.model, vocab_size=vocab_size)
    length = model_config.max_seq_len
    sampler = BatchSampler(stream, train_config.batch_size, length, config.seed)
    windows = held_out_windows(held_out, length, train_config.held_out_windows)
    judged = baselines(stream, windows.tokens.ravel(), windows.targets.ravel(), vocab_size)

    trainer = Trainer(Decoder(model_config, rngs=nnx.Rngs(config.seed)), train_config)
    display.fact("model", _describe_model(trainer))
    tokens = train_config.steps * train_config.batch_size * length
    display.fact(
        "training",
        f"{train_config.steps:,} steps of {train_config.batch_size} x {length} tokens, "
        f"{tokens / len(stream):.2f} passes over the text",
    )

    if not resumed:
        write_record(folder, RunRecord(config, corpus.sha256))
        tokenizers_of_runs.write(tokenizer, folder / "tokenizer.json")
    checkpoints = Checkpoints(folder / "checkpoints")
    state = trainer.initial
    if resumed:
        state, place = checkpoints.restore(trainer.initial)
        sampler.restore(place)
        display.fact("continued", f"from step {int(state.step):,}")
    metrics = MetricsLog(folder, after=int(state.step))
    parts = RunParts(trainer, sampler, windows, checkpoints, metrics, display)
    trained = time.monotonic()
    try:
        state = train(state, train_config, parts)
    finally:
        metrics.close()
        checkpoints.close()
        plot_losses(folder / "loss.png", read_rows(folder), judged, title=folder.name)
    trained = time.monotonic() - trained

    loss = trainer.held_out_loss(state.params, windows)
    _report(loss, judged, windows, display)
    display.say()
    display.say(_sample(trainer.model(state.params), tokenizer, config))
    seconds = time.monotonic() - began
    result = {
        "held_out_loss": loss,
        **judged._asdict(),
        "held_out_tokens": windows.targets.size,
        "train_seconds": round(trained, 1),
        "seconds": round(seconds, 1),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    display.say()
    display.say(
        f"{duration(seconds)} in all, {duration(trained)} of them training; {folder}/ holds the run and loss.png"
    )


def _describe_corpus(corpus: Corpus) -> str:
    size = sum(len(document.text) for document in (*corpus.train, *corpus.held_out)) / 1e6
    skipped = f", {corpus.skipped} not UTF-8 left out" if corpus.skipped else ""
    return (
        f"{corpus.source}: {len(corpus.train)} texts and {len(corpus.held_out)} held out, {size:.1f} million characters"
        f"{skipped}, sha256 {corpus.sha256[:16]}"
    )


def _describe_model(trainer: Trainer) -> str:
    parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(trainer.initial.params))
    return f"{parameters:,} parameters on {jax.devices()[0].device_kind}"


def _report(loss: float, judged: Baselines, windows: Batch, display: Display) -> None:
    display.say()
    display.say(f"held-out loss, nats a token over {windows.targets.size:,} tokens")
    for name, value in judged._asdict().items():
        display.say(f"  {name:<10}{value:6.3f}")
    gaps = ", ".join(
        f"{abs(value - loss):.2f} {'below' if loss < value else 'above'} {name}"
        for name, value in judged._asdict().items()
    )
    display.say(f"  {'model':<10}{loss:6.3f}   {gaps}")


def _sample(model: Decoder, tokenizer: "Tokenizer", config: RunConfig) -> str:
    prompt = [END_ID, *tokenizer.encode(config.prompt, add_special_tokens=False).ids]
    drawn = generate(model, prompt, length=config.sample_tokens, key=jax.random.key(config.seed), end=END_ID)
    return f"sample:\n{config.prompt}{tokenizer.decode(drawn)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 for what a person can mend, 130 for Ctrl-C."""
    console = Console()
    try:
        config, resumed = parse(sys.argv[1:] if arguments is None else arguments)
        run(config, resumed, Display(console))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
