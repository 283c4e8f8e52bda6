"""`config.json` of a Hugging Face folder: read into a `ModelConfig`, and written back.

Reading fails closed. Each family has a table of the fields that it knows (flax_models.hub.fields); a field in no table,
or a value that this decoder does not compute, is an error that names it: a model with one unknown scale gives text that
looks almost right.
"""

import json
import math
from pathlib import Path
from typing import Any

from flax_models.errors import RunError
from flax_models.hub.fields import ACTIVATIONS, ARCHITECTURES, COMMON, DEFAULTS, FAMILIES, FIXED, NEUTRAL, ROPE_FIELDS
from flax_models.model.config import Family, ModelConfig
from flax_models.model.rope import RopeScaling


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
    return config_of(read_object(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """Returns what a JSON file holds; raises RunError naming it if it cannot be read or holds no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise RunError(f"cannot read {path}: it must hold an object, got {type(values).__name__}")
    return values


def config_of(values: dict[str, Any], where: str) -> ModelConfig:
    """Returns the config that config.json's values stand for; see `read_config`."""
    fields = _Fields(values, where)
    family = fields.family
    gemma = family in ("gemma", "gemma2")
    heads = fields["num_attention_heads"]
    attention_bias = family == "qwen2" or bool(fields.optional("attention_bias"))
    num_layers = fields["num_hidden_layers"]
    window, pattern = _windows(fields, num_layers)
    rope = _rope(fields)
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
            rms_norm_eps=fields["rms_norm_eps"],
            tie_embeddings=fields["tie_word_embeddings"],
            family=family,
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
            **rope,
        )
    except (ValueError, TypeError) as error:
        raise RunError(f"{where}: {error}") from None


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


def _rope(fields: _Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that say how heads turn."""
    values = fields.optional("rope_scaling") or fields.optional("rope_parameters") or {}
    if not isinstance(values, dict):
        raise fields.refuse("rope_scaling", "an object", values)
    values = dict(values)
    theta = values.pop("rope_theta", fields["rope_theta"])
    partial = values.pop("partial_rotary_factor", fields.optional("partial_rotary_factor") or 1.0)
    if partial != 1.0 and fields.family != "phi3":
        raise fields.refuse("partial_rotary_factor", f"1.0 for model_type {fields.family}", partial)
    try:
        scaling = _rope_scaling_of(_rope_type(values, fields), values, fields)
        return {"rope_theta": float(theta), "partial_rotary_factor": partial, "rope": scaling}
    except (ValueError, TypeError) as error:
        raise RunError(f"{fields.where}: rope_scaling: {error}") from None


def _rope_type(values: dict[str, Any], fields: _Fields) -> Any:
    """Takes the type out of rope_scaling's values and returns it; raises RunError unless the others are that type's."""
    kind, old_kind = values.pop("rope_type", None), values.pop("type", None)
    kind = kind or old_kind or "default"
    if fields.family == "phi3" and kind in ("su", "yarn"):  # what longrope was called at first
        kind = "longrope"
    if kind not in ROPE_FIELDS:
        raise fields.refuse("rope_scaling's rope_type", f"one of {', '.join(ROPE_FIELDS)}", kind)
    if kind == "default":
        values.pop("original_max_position_embeddings", None)  # says nothing without a scaling
    if unknown := sorted(set(values) - ROPE_FIELDS[kind]):
        raise fields.refuse("rope_scaling", f"of known fields for rope_type {kind}", ", ".join(unknown))
    needed = {"short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}
    if kind in ("linear", "llama3"):  # of the others, the factor follows from the lengths
        needed.add("factor")
    if missing := sorted(name for name in ROPE_FIELDS[kind] & needed if values.get(name) is None):
        raise RunError(f"{fields.where}: rope_scaling's {missing[0]} is missing")
    return kind


def _rope_scaling_of(kind: Any, values: dict[str, Any], fields: _Fields) -> RopeScaling:
    longest = fields["max_position_embeddings"]
    original = fields.optional("original_max_position_embeddings")
    original = original or values.get("original_max_position_embeddings") or longest
    factor = values.get("factor")
    if factor is None:
        factor = 1.0 if kind == "default" else longest / original
    return RopeScaling(
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
    if lost := differing(config, config_of(values, "config.json")):
        shown = ", ".join(f"{name} {wanted!r}" for name, (wanted, _) in lost.items())
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


def differing(first: ModelConfig, second: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the fields in which two configs ask for different models, with both values; how they run may differ.

    Example:
        >>> differing(ModelConfig(num_layers=3, remat="full"), ModelConfig(num_layers=4))
        {'num_layers': (3, 4)}
    """
    ours, theirs = _meaning(first), _meaning(second)
    return {name: (value, theirs[name]) for name, value in ours.items() if theirs[name] != value}


def _meaning(config: ModelConfig) -> dict[str, Any]:
    """Returns what a config computes: two that differ in writing alone give the same."""
    values = {name: value for name, value in vars(config).items() if name not in RUN_FIELDS}
    values |= vars(values.pop("rope"))
    values["sliding_window"] = config.windows() if any(config.windows()) else None
    del values["window_pattern"]
    values["query_scalar"] = config.query_scalar or config.head_dim
    return values
