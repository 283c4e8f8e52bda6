"""`config.json` of a Hugging Face folder: read into a `ModelConfig`, and written back.

Reading fails closed. Each family has a table of the fields that it knows; a field in no table, or a value that this
decoder does not compute, is an error that names it: a model with one unknown scale gives text that looks almost right.
"""

import json
import math
from pathlib import Path
from typing import Any

from flax_models.errors import RunError
from flax_models.model_config import Family, ModelConfig
from flax_models.rope import RopeScaling

# Kept as they are when a model is written again; none says what is computed.
NEUTRAL = frozenset(
    {
        "architectures",
        "auto_map",
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "cache_implementation",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "problem_type",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "tokenizer_class",
        "max_length",
        "max_sequence_length",
    }
)
# Known, and computed by no other value than these.
FIXED: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "mlp_bias": (False,),
    "attention_bias": (False,),  # where the family's own table has it not
    "use_mrope": (False,),
    "use_bidirectional_attention": (None, False),
    "add_cross_attention": (False,),
    "attention_dropout": (0, None),
    "resid_pdrop": (0,),
    "embd_pdrop": (0,),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
COMMON = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "hidden_act",
}
# Beyond those of all: what each family's files may say, and transformers' value where they say nothing.
FAMILIES: dict[Family, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None},
    "qwen3": {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    "gemma": {"attention_bias": False, "hidden_activation": None},
    "gemma2": {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "phi3": {"sliding_window": None, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
}
ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
DEFAULTS: dict[str, dict[str, Any]] = {  # of the common fields that files leave out; "": every family's
    "": {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False},
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
    "gemma": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma2": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
}
ROPE_FIELDS = {  # of rope_scaling, beside its type
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}


class _Fields:
    """The fields of one config.json, with the family's values for those that are not there."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where
        family = values.get("model_type")
        if family not in FAMILIES:
            raise RunError(f"{where}: model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
        self.family: Family = family
        self.defaults = {**DEFAULTS[""], **DEFAULTS[family], **FAMILIES[family]}
        known = COMMON | NEUTRAL | set(FIXED) | set(FAMILIES[family])
        if unknown := sorted(set(values) - known):
            shown = ", ".join(f"{name} ({values[name]!r})" for name in unknown)
            raise RunError(f"{where}: fields that this decoder does not know for model_type {family}: {shown}")
        for name, admitted in FIXED.items():
            if name in values and name not in FAMILIES[family] and values[name] not in admitted:
                raise RunError(f"{where}: {name} must be {admitted[0]!r}, got {values[name]!r}")

    def __getitem__(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name not in self.defaults:
            raise RunError(f"{self.where}: {name} is missing")
        return self.defaults[name]

    def optional(self, name: str) -> Any:
        return self.values.get(name, self.defaults.get(name))

    def refuse(self, name: str, wanted: str, got: object) -> RunError:
        return RunError(f"{self.where}: {name} must be {wanted}, got {got!r}")


def read_config(folder: Path) -> ModelConfig:
    """Returns the config of a Hugging Face folder, computing in float32.

    Args:
        folder: holds config.json.

    Returns:
        The config; max_seq_len is max_position_embeddings.

    Raises:
        RunError: there is none, or it asks for something this decoder does not compute; names the field.

    Source: transformers' configuration_llama.py and its likes, whose values stand for fields that are not there.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise RunError(f"cannot read {path}: it must hold an object, got {type(values).__name__}")
    return config_of(values, str(path))


def config_of(values: dict[str, Any], where: str) -> ModelConfig:
    """Returns the config that config.json's values stand for; see `read_config`."""
    fields = _Fields(values, where)
    family = fields.family
    gemma = family in ("gemma", "gemma2")
    heads = fields["num_attention_heads"]
    attention_bias = family == "qwen2" or bool(fields.optional("attention_bias"))
    num_layers = fields["num_hidden_layers"]
    window, pattern = _windows(fields, num_layers)
    rope, partial = _rope(fields)
    try:
        return ModelConfig(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=fields.optional("num_key_value_heads") or heads,
            head_dim=fields.optional("head_dim") or fields["hidden_size"] // heads,
            intermediate_size=fields["intermediate_size"],
            max_seq_len=fields["max_position_embeddings"],
            rope_theta=float(_rope_theta(fields)),
            rms_norm_eps=fields["rms_norm_eps"],
            tie_embeddings=fields["tie_word_embeddings"],
            family=family,
            rope=rope,
            partial_rotary_factor=partial,
            activation=_activation(fields),
            norm_plus_one=gemma,
            post_norms=family == "gemma2",
            embedding_scale=gemma,
            attention_bias=attention_bias,
            attention_out_bias=attention_bias and family != "qwen2",
            query_key_norm=family == "qwen3",
            query_scalar=fields.optional("query_pre_attn_scalar"),
            attention_softcap=fields.optional("attn_logit_softcapping"),
            sliding_window=window,
            window_pattern=pattern,
            logit_softcap=fields.optional("final_logit_softcapping"),
        )
    except (ValueError, TypeError) as error:
        raise RunError(f"{where}: {error}") from None


def _activation(fields: _Fields) -> Any:
    name = fields["hidden_act"]
    if fields.family == "gemma2":
        name = fields["hidden_activation"]
    elif fields.family == "gemma":
        # Gemma's first files say "gelu" and mean its tanh formula, as transformers reads them.
        name = fields["hidden_activation"] or ("gelu_pytorch_tanh" if name == "gelu" else name)
    if name not in ACTIVATIONS:
        raise fields.refuse("hidden_act", f"one of {', '.join(ACTIVATIONS)}", name)
    return ACTIVATIONS[name]


def _windows(fields: _Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = fields.optional("sliding_window")
    if fields.family in ("mistral", "phi3", "llama", "gemma"):
        return window, (True,)
    if fields.family in ("qwen2", "qwen3") and not fields["use_sliding_window"]:
        window = None
    types = fields["layer_types"]
    if types is None:
        if fields.family == "gemma2":
            return window, (True, False)
        types = ["full_attention"] * num_layers
        if window is not None:
            first = fields["max_window_layers"]
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or set(types) - {"sliding_attention", "full_attention"}:
        raise fields.refuse("layer_types", f"sliding_attention or full_attention for {num_layers} layers", types)
    if window is None:
        return None, (True,)
    sliding = tuple(name == "sliding_attention" for name in types)
    if not any(sliding):
        return None, (True,)
    for length in (1, 2):  # the shortest pattern that says it
        if all(sliding[i] == sliding[i % length] for i in range(num_layers)) and num_layers >= length:
            return window, sliding[:length]
    return window, sliding


def _rope_values(fields: _Fields) -> dict[str, Any]:
    scaling = fields.optional("rope_scaling") or fields.optional("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise fields.refuse("rope_scaling", "an object", scaling)
    return dict(scaling)


def _rope_theta(fields: _Fields) -> float:
    return _rope_values(fields).get("rope_theta", fields["rope_theta"])


def _rope(fields: _Fields) -> tuple[RopeScaling, float]:
    """Returns the scaling and the part of a head's features that turn."""
    values = _rope_values(fields)
    values.pop("rope_theta", None)
    partial = values.pop("partial_rotary_factor", fields.optional("partial_rotary_factor") or 1.0)
    kind, old_kind = values.pop("rope_type", None), values.pop("type", None)
    kind = kind or old_kind or "default"
    if fields.family == "phi3" and kind in ("su", "yarn"):  # what longrope was called at first
        kind = "longrope"
    if kind not in ROPE_FIELDS:
        raise fields.refuse("rope_scaling's rope_type", f"one of {', '.join(ROPE_FIELDS)}", kind)
    if partial != 1.0 and fields.family != "phi3":
        raise fields.refuse("partial_rotary_factor", f"1.0 for model_type {fields.family}", partial)
    top = fields.optional("original_max_position_embeddings")
    if kind == "default":
        values.pop("original_max_position_embeddings", None)  # says nothing without a scaling
    if unknown := sorted(set(values) - ROPE_FIELDS[kind]):
        raise fields.refuse("rope_scaling", f"of known fields for rope_type {kind}", ", ".join(unknown))
    for name in ROPE_FIELDS[kind] & {"short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}:
        if values.get(name) is None:
            raise RunError(f"{fields.where}: rope_scaling's {name} is missing")
    longest = fields["max_position_embeddings"]
    original = top or values.get("original_max_position_embeddings") or longest
    factor = values.get("factor")
    if factor is None:
        if kind in ("linear", "llama3"):
            raise RunError(f"{fields.where}: rope_scaling's factor is missing")
        factor = longest / original if kind in ("yarn", "longrope") else 1.0
    try:
        scaling = RopeScaling(
            rope_type=kind,
            rope_factor=float(factor),
            rope_original_seq_len=original if kind in ("llama3", "yarn", "longrope") else 0,
            rope_low_freq_factor=float(values.get("low_freq_factor", 1.0)),
            rope_high_freq_factor=float(values.get("high_freq_factor", 4.0)),
            rope_beta_fast=float(values.get("beta_fast") or 32.0),
            rope_beta_slow=float(values.get("beta_slow") or 1.0),
            rope_truncate=values.get("truncate", True),
            rope_attention_factor=_attention_factor(values, float(factor)),
            rope_short_factor=tuple(map(float, values.get("short_factor", ()))),
            rope_long_factor=tuple(map(float, values.get("long_factor", ()))),
        )
    except (ValueError, TypeError) as error:
        raise RunError(f"{fields.where}: rope_scaling: {error}") from None
    return scaling, partial


def _attention_factor(values: dict[str, Any], factor: float) -> float | None:
    """Returns the factor that the file says, itself or by the two mscale of yarn, None if it leaves it to the rule."""
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    over, under = values.get("mscale"), values.get("mscale_all_dim")
    if not over or not under or factor <= 1:
        return None
    return (0.1 * over * math.log(factor) + 1.0) / (0.1 * under * math.log(factor) + 1.0)


RUN_FIELDS = ("dtype", "param_dtype", "scan_layers", "remat", "attention_implementation")  # of no file: how, not what


def values_of(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json's values for a config, without a dtype.

    Args:
        config: its `family` says which fields there are.

    Returns:
        Plain JSON that `config_of` reads back as the same model.

    Raises:
        RunError: the family's files cannot say what the config asks for; names the fields.

    Example:
        >>> values_of(ModelConfig())["model_type"]
        'llama'
    """
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config.rope),
        "hidden_act": "silu" if config.activation == "silu" else "gelu_pytorch_tanh",
    }
    known = FAMILIES[config.family]
    sliding = [window is not None for window in config.windows()]
    if "attention_bias" in known:
        values["attention_bias"] = config.attention_bias
    if "hidden_activation" in known:
        values["hidden_activation"] = values["hidden_act"]
    if "sliding_window" in known:
        values["sliding_window"] = config.sliding_window if any(sliding) else None
    if "use_sliding_window" in known:
        values["use_sliding_window"] = any(sliding)
        values["max_window_layers"] = sliding.index(True) if any(sliding) else config.num_layers
    if "layer_types" in known:
        values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in sliding]
    if config.family == "gemma2":
        values["query_pre_attn_scalar"] = config.query_scalar or config.head_dim
        values["attn_logit_softcapping"] = config.attention_softcap
        values["final_logit_softcapping"] = config.logit_softcap
    if config.family == "phi3":
        values["partial_rotary_factor"] = config.partial_rotary_factor
        values["original_max_position_embeddings"] = config.rope.rope_original_seq_len or config.max_seq_len
    wanted, written = _meaning(config), _meaning(config_of(values, "config.json"))
    if lost := [name for name, value in wanted.items() if written[name] != value]:
        shown = ", ".join(f"{name} {wanted[name]!r}" for name in lost)
        raise RunError(f"the files of family {config.family} cannot say {shown}")
    return values


def _rope_scaling(rope: RopeScaling) -> dict[str, Any] | None:
    if rope.rope_type == "default":
        return None
    values: dict[str, Any] = {"rope_type": rope.rope_type, "factor": rope.rope_factor}
    if rope.rope_type in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.rope_original_seq_len
    if rope.rope_type == "llama3":
        values |= {"low_freq_factor": rope.rope_low_freq_factor, "high_freq_factor": rope.rope_high_freq_factor}
    if rope.rope_type == "yarn":
        values |= {"beta_fast": rope.rope_beta_fast, "beta_slow": rope.rope_beta_slow, "truncate": rope.rope_truncate}
    if rope.rope_type == "longrope":
        values |= {"short_factor": list(rope.rope_short_factor), "long_factor": list(rope.rope_long_factor)}
    if rope.rope_attention_factor is not None:
        values["attention_factor"] = rope.rope_attention_factor
    return values


def _meaning(config: ModelConfig) -> dict[str, Any]:
    """Returns what a config computes: two that differ in writing alone give the same."""
    values = {name: getattr(config, name) for name in config.__dataclass_fields__ if name not in RUN_FIELDS}
    values["sliding_window"] = config.windows()
    del values["window_pattern"]
    values["query_scalar"] = config.query_scalar or config.head_dim
    return values
