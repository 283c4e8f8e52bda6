"""`python -m flax_models.export --run RUN_FOLDER --out DIR`: a trained run as a Hugging Face folder.

transformers loads what it writes: weights, config.json, the tokenizer, and which token ends a text. A run that started
from a folder gives that folder's tokenizer files and generation config as they were.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flax_models.errors import RunError
from flax_models.model import Decoder
from flax_models.tokenizer import END, END_ID, write
from flax_models.trained import read_run
from flax_models.vocabulary import Vocabulary
from flax_models.weights import save

PROGRAM = "python -m flax_models.export"


def export(run: Path, out: Path, *, dtype: str | None = None, max_shard_bytes: int = 5 * 10**9) -> int:
    """Writes a run's latest checkpoint as a Hugging Face folder.

    Args:
        run: folder of the run.
        out: made; must not hold anything yet.
        dtype: of the tensors written; None: that of the run's parameters.
        max_shard_bytes: most bytes of tensors in a file.

    Returns:
        The checkpoint's step.

    Raises:
        RunError: the run has no checkpoint, or `out` holds something or cannot be written.
    """
    trained = read_run(run)
    save_with_tokenizer(trained.model, trained.vocabulary, out, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return trained.step


def save_with_tokenizer(
    model: Decoder,
    vocabulary: Vocabulary,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model and its vocabulary as a Hugging Face folder; see `export` for what it takes and raises."""
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
    options = argparse.ArgumentParser(prog=PROGRAM, description="Write a trained run as a Hugging Face folder.")
    options.add_argument("--run", type=Path, required=True, help="folder of a run of flax_models.train")
    options.add_argument("--out", type=Path, required=True, help="folder to make")
    options.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default=None, help="of the tensors (the run's own)"
    )
    chosen = options.parse_args(arguments)
    try:
        step = export(chosen.run, chosen.out, dtype=chosen.dtype)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{chosen.out} holds step {step:,} of {chosen.run}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
