"""Converts `config.json` of a Hugging Face folder to a `ModelConfig`, and back.

Reading fails closed. Each family has a table of its fields (fields.py). A field that is in no table, or a value that
the decoder does not support, is an error that names the field: with one scale ignored, a model's text still looks
almost right. Fields that are known to be irrelevant are ignored and listed in a note. The caller can name further
fields to ignore.
"""

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flax_models.errors import RunError
from flax_models.hub.fields import (
    ACTIVATIONS,
    ARCHITECTURES,
    COMMON,
    COUNTS,
    COUNTS_OR_NULL,
    DEFAULTS,
    DROPOUT,
    FAMILIES,
    FIXED,
    INERT,
    NEUTRAL,
    NUMBERS,
    NUMBERS_OR_NULL,
    ROPE_FIELDS,
    SWITCHES,
)
from flax_models.model.config import MOST_LAYERS, Family, ModelConfig
from flax_models.model.rope import RopeScaling


def read_config(folder: Path, ignored: Collection[str] = ()) -> ModelConfig:
    """Returns the config of a Hugging Face folder, with dtype float32.

    Args:
        folder: holds config.json.
        ignored: names of unknown fields to ignore.

    Returns:
        The config; max_seq_len is max_position_embeddings.

    Raises:
        RunError: config.json cannot be read, or it asks for something that the decoder does not support. The message
            names the field.

    Source: transformers' configuration_llama.py and the configuration files of the other families, from which the
    defaults of absent fields are taken.
    """
    path = folder / "config.json"
    return config_of(read_object(path), str(path), ignored)


def config_note(folder: Path, ignored: Collection[str] = ()) -> str | None:
    """Returns one line that names the ignored fields of config.json, None if no field is ignored.

    Args:
        folder: holds config.json.
        ignored: as in `read_config`.

    Raises:
        RunError: config.json cannot be read.
    """
    values = read_object(folder / "config.json")
    parts = []
    if names := sorted(set(values) & INERT - set(ignored)):
        parts.append(f"ignored because they do not affect the model: {', '.join(names)}")
    if names := sorted(name for name in set(values) & DROPOUT - set(ignored) if values[name]):
        parts.append(f"not applied in training: {', '.join(f'{name} {values[name]}' for name in names)}")
    if names := sorted(set(values) & set(ignored)):
        parts.append(f"ignored on request: {', '.join(names)}")
    return f"config.json: {'; '.join(parts)}" if parts else None


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises RunError, which names the file, if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise RunError(f"cannot read {path}: it must hold a JSON object, got {type(values).__name__}")
    return values


def config_of(values: dict[str, Any], where: str, ignored: Collection[str] = ()) -> ModelConfig:
    """Returns the config for the values of config.json; see `read_config`."""
    fields = _Fields(values, where, ignored)
    family = fields.family
    gemma = family in ("gemma", "gemma2")
    heads = fields["num_attention_heads"]
    attention_bias = family == "qwen2" or bool(fields.optional("attention_bias") or fields.optional("qkv_bias"))
    num_layers = fields["num_hidden_layers"]
    rotary_pattern = _rotary_pattern(fields, num_layers)
    window, pattern = _windows(fields, num_layers, rotary_pattern)
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
            pre_norms=family != "olmo2",
            post_norms=family in ("gemma2", "olmo2"),
            embedding_scale=gemma,
            embedding_multiplier=fields.number("embedding_multiplier"),
            residual_multiplier=fields.number("residual_multiplier"),
            attention_bias=attention_bias,
            attention_out_bias=attention_bias and family not in ("qwen2", "internlm3"),
            query_key_norm=family == "qwen3",
            joint_query_key_norm=family == "olmo2",
            query_scalar=fields.optional("query_pre_attn_scalar"),
            attention_multiplier=fields.number("attention_multiplier") if family == "granite" else None,
            rotary_pattern=rotary_pattern,
            attention_softcap=fields.optional("attn_logit_softcapping"),
            sliding_window=window,
            window_pattern=pattern,
            logit_softcap=fields.optional("final_logit_softcapping"),
            logit_scale=1.0 / fields.number("logits_scaling"),
            **rope,
        )
    except (ValueError, TypeError) as error:
        raise RunError(f"{where}: {_with_file_names(str(error))}") from None


# Names of `ModelConfig` whose field of config.json has another name.
FILE_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "query_scalar": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "rope_original_seq_len": "original_max_position_embeddings",
}


def _with_file_names(message: str) -> str:
    """Replaces the names of `ModelConfig` in an error by those of config.json."""
    return re.sub(r"\w+", lambda name: FILE_NAMES.get(name[0], name[0]), message)


def is_number(value: object) -> bool:
    """Returns whether a value of a JSON file is a finite number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


class _Fields:
    """The fields of one config.json, with the family's defaults for absent fields."""

    def __init__(self, values: dict[str, Any], where: str, ignored: Collection[str]) -> None:
        self.where = where
        family = values.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise RunError(f"{where}: model_type must be one of {', '.join(FAMILIES)}, got {_short(family)}")
        self.family: Family = family
        self.defaults = {**DEFAULTS[""], **DEFAULTS[family], **FAMILIES[family]}
        read = COMMON | set(FAMILIES[family])
        if odd := sorted(set(ignored) & read):
            raise RunError(f"--ignore-config-fields: model_type {family} needs {', '.join(odd)}")
        if absent := sorted(set(ignored) - set(values)):
            raise RunError(f"--ignore-config-fields must be fields of {where}, got {', '.join(absent)}")
        self.values = values = {name: value for name, value in values.items() if name not in ignored}
        if unknown := sorted(set(values) - read - NEUTRAL - INERT - DROPOUT - set(FIXED)):
            shown = ", ".join(f"{name} ({_short(values[name])})" for name in unknown)
            raise RunError(
                f"{where}: unknown fields for model_type {family}: {shown}; if they do not change what the model "
                f"computes, ignore them with --ignore-config-fields {' '.join(unknown)}"
            )
        for name, admitted in FIXED.items():
            if name in values and name not in FAMILIES[family] and values[name] not in admitted:
                raise self.refuse(name, repr(admitted[0]), values[name])
        self._check_types()
        if (layers := values.get("num_hidden_layers", 0)) > MOST_LAYERS:
            raise self.refuse("num_hidden_layers", f"at most {MOST_LAYERS:,}", layers)
        if layers < 0:
            raise self.refuse("num_hidden_layers", "at least 0", layers)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "original_max_position_embeddings"):
            if values.get(name) == 0:
                raise self.refuse(name, "at least 1", 0)

    def _check_types(self) -> None:
        for name, value in self.values.items():
            number = is_number(value)
            if name in COUNTS | COUNTS_OR_NULL:
                if not (number and isinstance(value, int)) and not (value is None and name in COUNTS_OR_NULL):
                    raise self.refuse(name, "an integer", value)
            elif name in NUMBERS | NUMBERS_OR_NULL:
                if not number and not (value is None and name in NUMBERS_OR_NULL):
                    raise self.refuse(name, "a finite number", value)
            elif name in SWITCHES and not isinstance(value, bool):
                raise self.refuse(name, "true or false", value)

    def __getitem__(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name not in self.defaults:
            raise RunError(f"{self.where}: {name} is missing")
        return self.defaults[name]

    def optional(self, name: str) -> Any:
        return self.values.get(name, self.defaults.get(name))

    def number(self, name: str) -> float:
        """Returns a positive factor, 1 for families without the field."""
        value = self.optional(name)
        if value is not None and not value > 0:
            raise self.refuse(name, "positive", value)
        return 1.0 if value is None else float(value)

    def refuse(self, name: str, needed: str, got: object) -> RunError:
        return RunError(f"{self.where}: {name} must be {needed}, got {_short(got)}")


def _short(value: object) -> str:
    """Returns the repr of a value, shortened for a message: a malformed file may hold a long value."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _activation(fields: _Fields) -> Any:
    field = "hidden_act"
    if fields.family == "gemma2" or (fields.family == "gemma" and fields["hidden_activation"]):
        field = "hidden_activation"
    name = fields[field]
    if fields.family == "gemma" and field == "hidden_act" and name == "gelu":
        name = "gelu_pytorch_tanh"  # the first files of Gemma mean the tanh approximation; transformers agrees
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise fields.refuse(field, f"one of {', '.join(ACTIVATIONS)}", name)
    return ACTIVATIONS[name]


def _rotary_pattern(fields: _Fields, num_layers: int) -> tuple[bool, ...]:
    if fields.family != "smollm3":
        return (True,)
    rotates, interval = fields["no_rope_layers"], fields["no_rope_layer_interval"]  # 1: the layer rotates
    if not rotates:
        if interval < 1:
            raise fields.refuse("no_rope_layer_interval", "at least 1", interval)
        rotates = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or not all(value in (0, 1) for value in rotates):
        raise fields.refuse("no_rope_layers", f"0 or 1 for each of {num_layers} layers", rotates)
    return _shortest(tuple(map(bool, rotates)))


def _shortest(values: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns the shortest pattern whose repetition gives these values."""
    for length in range(1, len(values)):
        if all(values[i] == values[i % length] for i in range(len(values))):
            return values[:length]
    return values or (True,)


def _windows(fields: _Fields, num_layers: int, rotates: tuple[bool, ...]) -> tuple[int | None, tuple[bool, ...]]:
    window = fields.optional("sliding_window")
    if "layer_types" not in FAMILIES[fields.family]:
        return window, (True,)
    if "use_sliding_window" in FAMILIES[fields.family] and not fields["use_sliding_window"]:
        window = None
    types = fields["layer_types"]
    if types is None:
        if fields.family == "gemma2":
            slides = [i % 2 == 0 for i in range(num_layers)]
        elif window is None:
            slides = [False] * num_layers
        elif fields.family == "smollm3":  # the layers without rotation have the window
            slides = [not rotates[i % len(rotates)] for i in range(num_layers)]
        elif (first := fields["max_window_layers"]) is None:
            raise fields.refuse("max_window_layers", "an integer", first)
        else:
            slides = [i >= first for i in range(num_layers)]
        types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(name not in known for name in types):
        raise fields.refuse("layer_types", f"sliding_attention or full_attention for {num_layers} layers", types)
    sliding = tuple(name == "sliding_attention" for name in types)
    if not any(sliding):
        return None, (True,)
    if window is None:
        raise fields.refuse("sliding_window", "used, because layers have sliding_attention", None)
    return window, _shortest(sliding)


def _rope(fields: _Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that define the rotary embedding."""
    given = [name for name in ("rope_scaling", "rope_parameters") if fields.optional(name) is not None]
    if len(given) == 2 and fields["rope_scaling"] != fields["rope_parameters"]:
        raise fields.refuse("rope_scaling", "absent or equal to rope_parameters", fields["rope_scaling"])
    where = given[0] if given else "rope_parameters"
    values = fields[where] if given else {}
    if not isinstance(values, dict):
        raise fields.refuse(where, "an object", values)
    values = dict(values)
    _check_rope_types(values, fields, where)
    for name in sorted({"rope_theta", "partial_rotary_factor"} & set(values) & set(fields.values)):
        if fields[name] != values[name]:
            raise fields.refuse(name, f"{values[name]}, as in {where}", fields[name])
    theta = values.pop("rope_theta", fields["rope_theta"])
    partial = values.pop("partial_rotary_factor", fields.optional("partial_rotary_factor"))
    partial = 1.0 if partial is None else partial
    if partial != 1.0 and fields.family != "phi3":
        raise fields.refuse("partial_rotary_factor", f"1.0 for model_type {fields.family}", partial)
    try:
        scaling = _rope_scaling_of(_rope_type(values, fields), values, fields)
        return {"rope_theta": float(theta), "partial_rotary_factor": partial, "rope": scaling}
    except (ValueError, TypeError) as error:
        raise RunError(f"{fields.where}: rope_scaling: {_with_file_names(str(error))}") from None


def _check_rope_types(values: dict[str, Any], fields: _Fields, where: str) -> None:
    """Raises RunError if a known field of rope_scaling has the wrong type; null is an absent field."""
    known = {"rope_theta", "partial_rotary_factor"}.union(*ROPE_FIELDS.values())
    for name in sorted(known & set(values)):
        value, needed = values[name], None
        if name == "truncate":
            needed = None if isinstance(value, bool) else "true or false"
        elif name in ("short_factor", "long_factor"):
            if value is not None and not (isinstance(value, list) and all(map(is_number, value))):
                needed = "a list of finite numbers"
        elif name == "original_max_position_embeddings":
            if value is not None and not (is_number(value) and isinstance(value, int)):
                needed = "an integer"
        elif not is_number(value) and (value is not None or name == "rope_theta"):
            needed = "a finite number"
        if needed:
            raise fields.refuse(f"{where}'s {name}", needed, value)


def _rope_type(values: dict[str, Any], fields: _Fields) -> Any:
    """Removes the type from rope_scaling's values and returns it; raises RunError if the type lacks another field."""
    kind, old_kind = values.pop("rope_type", None), values.pop("type", None)
    kind = kind or old_kind or "default"
    if fields.family == "phi3" and kind in ("su", "yarn"):  # early names of longrope
        kind = "longrope"
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise fields.refuse("rope_scaling's rope_type", f"one of {', '.join(ROPE_FIELDS)}", kind)
    if kind == "default":
        values.pop("original_max_position_embeddings", None)  # has no meaning without scaling
    if unknown := sorted(set(values) - ROPE_FIELDS[kind]):
        raise fields.refuse("rope_scaling", f"an object with only fields of rope_type {kind}", ", ".join(unknown))
    needed = {"short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}
    if kind in ("linear", "llama3"):  # for the other types, the factor follows from the lengths
        needed.add("factor")
    if missing := sorted(name for name in ROPE_FIELDS[kind] & needed if values.get(name) is None):
        raise RunError(f"{fields.where}: rope_scaling's {missing[0]} is missing")
    return kind


def _rope_scaling_of(kind: Any, values: dict[str, Any], fields: _Fields) -> RopeScaling:
    longest = fields["max_position_embeddings"]
    if kind == "dynamic":
        # Dynamic scaling changes frequencies only beyond the original length, and max_seq_len is at most `longest`.
        if longest > (values.get("original_max_position_embeddings") or longest):
            raise fields.refuse(
                "rope_scaling's rope_type",
                "other than dynamic if max_position_embeddings exceeds original_max_position_embeddings",
                kind,
            )
        return RopeScaling()
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
    """Returns the attention factor, given directly or by yarn's two mscale fields; None: use the paper's formula."""
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    over, under = values.get("mscale"), values.get("mscale_all_dim")
    if not over or not under or factor <= 1:
        return None
    return (0.1 * over * math.log(factor) + 1.0) / (0.1 * under * math.log(factor) + 1.0)


# Fields that no config.json has: they do not change the model, only how it is computed.
RUN_FIELDS = ("dtype", "param_dtype", "scan_layers", "remat", "attention_implementation")


def values_of(config: ModelConfig) -> dict[str, Any]:
    """Returns the values of config.json for a config, without a dtype.

    Args:
        config: its `family` determines the fields.

    Returns:
        A JSON object that `config_of` converts back to the same model.

    Raises:
        RunError: the family's config.json cannot express the config. The message names the fields.

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
    if config.family in ("qwen2", "qwen3"):
        values["max_window_layers"] = sliding.index(True) if any(sliding) else config.num_layers
    if "no_rope_layers" in known:
        values["no_rope_layers"] = [int(rotates) for rotates in config.rotates()]
    if "qkv_bias" in known:
        values["qkv_bias"] = config.attention_bias
    if config.family == "granite":
        values["embedding_multiplier"] = config.embedding_multiplier
        values["residual_multiplier"] = config.residual_multiplier
        values["attention_multiplier"] = config.attention_scale()
        values["logits_scaling"] = 1.0 / config.logit_scale
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
        shown = ", ".join(f"{name} {asked!r}" for name, (asked, _) in lost.items())
        raise RunError(f"a config.json of family {config.family} cannot express {shown}")
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
    """Returns the fields in which two configs define different models, with both values; RUN_FIELDS may differ.

    Example:
        >>> differing(ModelConfig(num_layers=3, remat="full"), ModelConfig(num_layers=4))
        {'num_layers': (3, 4)}
    """
    ours, theirs = _meaning(first), _meaning(second)
    return {name: (value, theirs[name]) for name, value in ours.items() if theirs[name] != value}


def _meaning(config: ModelConfig) -> dict[str, Any]:
    """Returns a normal form of a config: configs that define the same model have the same normal form."""
    values = {name: value for name, value in vars(config).items() if name not in RUN_FIELDS}
    values |= vars(values.pop("rope"))
    values["sliding_window"] = config.windows() if any(config.windows()) else None
    del values["window_pattern"]
    values["rotary_pattern"] = config.rotates()
    if config.attention_multiplier is not None or config.family == "granite":
        values["attention_multiplier"], values["query_scalar"] = config.attention_scale(), None
    else:
        values["query_scalar"] = config.query_scalar or config.head_dim
    return values
