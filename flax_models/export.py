"""`python -m flax_models.export --run RUN_FOLDER --out DIR`: a trained run as a Hugging Face folder.

transformers loads what it writes: weights, config.json, the tokenizer, and which token ends a text. A run that started
from a folder gives that folder's tokenizer files and generation config as they were.

The adapters of a run with --lora-rank are merged into the weights. With --adapter they alone are written, as the peft
library loads them beside the folder that the run started from.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flax_models.command_line import OneLineParser
from flax_models.data.tokenizer import END, END_ID, write
from flax_models.data.vocabulary import Vocabulary
from flax_models.errors import RunError
from flax_models.hub.adapter_folder import save_adapter
from flax_models.hub.weights import save
from flax_models.model.decoder import Decoder
from flax_models.model.lora import merge
from flax_models.train.config import RunConfig
from flax_models.train.trained import add_checkpoint_options, read_run

PROGRAM = "python -m flax_models.export"


def export(
    run: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    adapter: bool = False,
    step: int | None = None,
    allow_older: bool = False,
) -> int:
    """Writes a run's latest checkpoint as a Hugging Face folder.

    Args:
        run: folder of the run.
        out: made; must not hold anything yet.
        dtype: of the tensors written; None: that of the run's parameters.
        max_shard_bytes: most bytes of tensors in a file.
        adapter: write the run's adapters alone; otherwise they are merged into the weights.
        step: write exactly this checkpoint; None: the latest.
        allow_older: write an older checkpoint, with a warning on stderr, where the latest cannot be read.

    Returns:
        The checkpoint's step.

    Raises:
        RunError: the run has no such checkpoint, or it cannot be read, `out` holds something or cannot be written, or
            the run's adapters alone are not what it learned.
    """
    trained = read_run(run, step=step, allow_older=allow_older)
    if adapter:
        _check_adapter(run, trained.config)
        save_adapter(trained.model, out, base=trained.config.weights, dtype=dtype)
        return trained.step
    save_with_tokenizer(merge(trained.model), trained.vocabulary, out, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return trained.step


def _check_adapter(run: Path, config: RunConfig) -> None:
    """Raises RunError unless a run's adapters, beside a folder that there is, are the run's model."""
    if not config.lora.lora_rank:
        raise RunError(f"--adapter: {run} has no adapters, it was trained without --lora-rank")
    if config.lora.unfreeze:
        others = " ".join(config.lora.unfreeze)
        raise RunError(f"--adapter: {run} trained {others} beside its adapters (--unfreeze); export the merged model")
    if config.weights is None:
        raise RunError(f"--adapter: {run} started from random weights, which no folder holds; export the merged model")


def save_with_tokenizer(
    model: Decoder,
    vocabulary: Vocabulary,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model without adapters and its vocabulary as a Hugging Face folder; see `export` for the rest."""
    if vocabulary.folder is not None:
        save(model, out, dtype=dtype, max_shard_bytes=max_shard_bytes, like=vocabulary.folder)
        return
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    ends = {"bos_token_id": END_ID, "eos_token_id": END_ID}
    save(model, out, dtype=dtype, max_shard_bytes=max_shard_bytes, fields=ends)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer.to_str())
    # In training every text followed END; transformers, and flax_models.generate, put it there by this.
    tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_seq_len,
    }
    try:
        write(tokenizer, out / "tokenizer.json")
        for name, values in (("tokenizer_config.json", tokenizer_config), ("generation_config.json", ends)):
            (out / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {out}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 1 for what a person can mend."""
    options = OneLineParser(prog=PROGRAM, description="Write a trained run as a Hugging Face folder.")
    options.add_argument("--run", type=Path, required=True, help="folder of a run of flax_models.train")
    options.add_argument("--out", type=Path, required=True, help="folder to make")
    options.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default=None, help="of the tensors (the run's own)"
    )
    options.add_argument("--adapter", action="store_true", help="write the adapters of --lora-rank alone, for peft")
    add_checkpoint_options(options)
    chosen = options.parse_args(arguments)
    try:
        step = export(
            chosen.run,
            chosen.out,
            dtype=chosen.dtype,
            adapter=chosen.adapter,
            step=chosen.step,
            allow_older=chosen.allow_older,
        )
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{chosen.out} holds step {step:,} of {chosen.run}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
