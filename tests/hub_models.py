"""Small random transformers models for each family and feature, saved as Hugging Face folders."""

import json
import os
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

LENGTH = 40  # longer than every window and every original_max_position_embeddings below
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.5, 9.0]}

# Name -> (model_type, fields in addition to SIZES). With these values, ignoring a field changes the result.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}),
    "llama3": (
        "llama",
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "rope_theta": 500.0,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16},
        },
    ),
    "llama-linear": (
        "llama",
        {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-yarn": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_theta": 1000.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1000.0}),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "smollm3": ("smollm3", {"tie_word_embeddings": True, "no_rope_layer_interval": 2, "rope_theta": 1000.0}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 5, "attention_bias": True},
    ),
    "olmo2": ("olmo2", {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}),
    "granite": (
        "granite",
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
    ),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-long": (
        "phi3",
        {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE, "original_max_position_embeddings": 16},
    ),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def make(name: str) -> Any:
    """Returns the case's transformers model in evaluation mode, with random parameters."""
    transformers = import_transformers()
    import torch

    model_type, fields = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **fields})
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = torch.randn_like(parameter)
            if "norm" in parameter_name:
                parameter.add_(0.3 * spread)
            else:
                parameter.copy_(spread * (0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    return model


def import_transformers() -> Any:
    """Imports transformers in offline mode and ignores its import warnings.

    Skips the test if tokenizers is too old for transformers, as in `make test-oldest-jax`.
    """
    if Version(version("tokenizers")) < Version("0.22"):
        pytest.skip("transformers 5 needs tokenizers 0.22")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    transformers.logging.set_verbosity_error()
    return transformers


def write_folder(model: Any, folder: Path) -> None:
    """Saves a model in several shards, with placeholder tokenizer files."""
    model.save_pretrained(folder, max_shard_size="30KB")
    for name in TOKENIZER_FILES:
        (folder / name).write_text(json.dumps({"kind": name}))


def write_tokenizer(folder: Path, words: Sequence[str]) -> None:
    """Saves a tokenizer of whole words that prepends <s> to a text, in the format of transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    entries = ["<pad>", "<s>", "</s>", "<unk>", *words]
    tokenizer = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    import_transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def load_transformers(folder: Path) -> Any:
    """Loads the model in a folder with transformers, in float32."""
    import torch

    transformers = import_transformers()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    unexpected = {kind: names for kind, names in report.items() if names}
    assert not unexpected, unexpected
    return model.eval()


def tokens(rows: int = 2, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(5).integers(SIZES["vocab_size"], size=(rows, length))


def their_hidden_states(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.model(torch.from_numpy(tokens)).last_hidden_state.numpy()


def their_loss(model: Any, tokens: np.ndarray) -> float:
    """Returns the mean loss over all tokens except the first of each row."""
    import torch

    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)
