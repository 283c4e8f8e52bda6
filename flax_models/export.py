"""`python -m flax_models.export --run RUN_FOLDER --out DIR`: export a trained run as a Hugging Face folder.

The folder holds the weights, config.json, the tokenizer and the end-of-text token, and transformers loads it. If the
run started from a Hugging Face folder, the tokenizer files and the generation config of that folder are copied
unchanged.

The adapters of a run with --lora-rank are merged into the weights. With --adapter, only the adapters are written, in
the format that the peft library loads together with the folder that the run started from.
"""

import sys

from flax_models.command_line import OneLineParser, silent_interrupts

if __name__ == "__main__":  # before the other imports, which take seconds
    with silent_interrupts():
        from flax_models import export as program
    sys.exit(program.main())

import json
import typing
from collections.abc import Sequence
from pathlib import Path

from flax_models.data.tokenizer import END, END_ID, write
from flax_models.data.vocabulary import Vocabulary
from flax_models.errors import RunError
from flax_models.hub.adapter_folder import save_adapter
from flax_models.hub.weights import check_new_folder, save
from flax_models.model.decoder import Decoder, Dtype
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
        out: folder to create; if it exists, it must be empty.
        dtype: dtype of the written tensors; None: the dtype of the run's parameters.
        max_shard_bytes: maximum bytes of tensors in one file.
        adapter: write only the run's adapters; otherwise they are merged into the weights.
        step: write the checkpoint of this step; None: the latest.
        allow_older: if the latest checkpoint cannot be read, write an older one and print a warning on stderr.

    Returns:
        The checkpoint's step.

    Raises:
        RunError: the run has no such checkpoint or it cannot be read, `out` is not empty or cannot be written, a value
            is too large for `dtype`, or `adapter` is True and the adapters do not contain everything that the run
            trained.
    """
    check_new_folder(out)  # before the checkpoint is read, which may take minutes
    trained = read_run(run, step=step, allow_older=allow_older)
    if adapter:
        _check_adapter(run, trained.config)
        save_adapter(trained.model, out, base=trained.config.weights, dtype=dtype)
        return trained.step
    save_with_tokenizer(merge(trained.model), trained.vocabulary, out, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return trained.step


def _check_adapter(run: Path, config: RunConfig) -> None:
    """Raises RunError unless the run's model is a Hugging Face folder plus the run's adapters."""
    if not config.lora.lora_rank:
        raise RunError(f"--adapter: {run} has no adapters because it was trained without --lora-rank")
    if config.lora.unfreeze:
        others = " ".join(config.lora.unfreeze)
        raise RunError(
            f"--adapter: {run} also trained {others} (--unfreeze), which an adapter folder cannot hold; "
            f"export the merged model instead"
        )
    if config.weights is None:
        raise RunError(
            f"--adapter: {run} started from random weights, so there is no folder to load the adapters onto; "
            f"export the merged model instead"
        )


def save_with_tokenizer(
    model: Decoder,
    vocabulary: Vocabulary,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model without adapters and its vocabulary as a Hugging Face folder; see `export` for the arguments."""
    if vocabulary.folder is not None:
        save(model, out, dtype=dtype, max_shard_bytes=max_shard_bytes, like=vocabulary.folder)
        return
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    ends = {"bos_token_id": END_ID, "eos_token_id": END_ID}
    save(model, out, dtype=dtype, max_shard_bytes=max_shard_bytes, fields=ends)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer.to_str())
    # In training, every text follows END. This post-processor prepends END in transformers and flax_models.generate.
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
    """Runs the command and returns the exit status: 0, 1 for an error that the user can fix, 130 for Ctrl-C."""
    options = OneLineParser(prog=PROGRAM, description="Export a trained run as a Hugging Face folder.")
    options.add_argument("--run", type=Path, required=True, help="folder of a run of flax_models.train")
    options.add_argument("--out", type=Path, required=True, help="folder to create")
    options.add_argument(
        "--dtype",
        choices=typing.get_args(Dtype),
        default=None,
        help="dtype of the written tensors (default: the dtype of the run's parameters)",
    )
    options.add_argument(
        "--adapter", action="store_true", help="write only the adapters of a run with --lora-rank, for peft"
    )
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
    except KeyboardInterrupt:
        return 130
    print(f"{chosen.out} holds step {step:,} of {chosen.run}")
    return 0
