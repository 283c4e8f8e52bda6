"""Adapter folders in the format of the peft library: adapter_model.safetensors and adapter_config.json.

A file holds two matrices, (rank, in) and (out, rank), for each adapted module of the model family. If a family fuses
several projections into one module (Phi-3's qkv_proj and gate_up_proj), their adapters are written as one adapter. Its
rank is the sum of their ranks: the A matrices are concatenated, and the B matrices form a block-diagonal matrix:

    [y_q y_k y_v] = x [W_q W_k W_v] + s x [A_q A_k A_v] diag(B_q, B_k, B_v)

This leaves each projection's adapter unchanged. peft scales by alpha / rank, so alpha is multiplied by the same factor
as the rank. Only families with separate projections can be read: an adapter that was trained on a fused module is not
block-diagonal.

Reading fails closed, as for a model's config.json: an unknown field that may change the result is an error. Dropout
(`lora_dropout`) has no effect on the outputs and the merged weights. Training has no dropout, so a run does not start
from adapters that ask for it.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_models.errors import RunError
from flax_models.hub.config import is_number, read_object
from flax_models.hub.weights import (
    FLOATS,
    TensorPart,
    cast_into,
    check_new_folder,
    file_parts,
    truncation,
    write_tensors,
)
from flax_models.model.config import ModelConfig
from flax_models.model.decoder import Decoder
from flax_models.model.lora import MODULES, AdaptedLinear, adapted_projections, adapted_shapes, column_norms
from flax_models.model.lora_config import LoraConfig, Projection

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # peft prepends this to the model's module names
PROJECTIONS: dict[str, Projection] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
READ = frozenset({"peft_type", "r", "lora_alpha", "target_modules", "use_dora", "init_lora_weights", "bias"})
# Fields that do not change what an adapter computes, at least while the other fields are unset. `read_adapter_config`
# refuses lora_dropout if the adapters will be trained.
NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "task_type",
    }
)


class _Pair(NamedTuple):
    """The adapters of one module of the file, stacked over all layers."""

    a: np.ndarray  # (L, rank, in)
    b: np.ndarray  # (L, out, rank)
    magnitude: np.ndarray | None  # (L, out)


def save_adapter(model: Decoder, folder: Path, *, base: Path | None = None, dtype: str | None = None) -> None:
    """Writes a model's adapters as a folder that `peft.PeftModel.from_pretrained` loads.

    Args:
        model: model with adapters; its config's `family` determines the names of the modules.
        folder: folder to create; if it exists, it must be empty.
        base: folder or name of the base model, recorded in adapter_config.json; None: not recorded.
        dtype: float32, bfloat16 or float16, the dtype of the written tensors; None: the dtype of the adapters.

    Raises:
        RunError: the folder is not empty or cannot be written, or a value is too large for `dtype`.
        ValueError: the model has no adapters, or an option is out of range.

    Example:
        >>> save_adapter(model, Path("my-adapter"), base=Path("Llama-3.2-1B"))  # doctest: +SKIP

    Source: peft's checkpoint format, https://huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    adapted = dict(adapted_projections(model))
    if not adapted:
        raise ValueError("model must have adapters (flax_models.model.lora.adapt), got a model without adapters")
    dtype = model.config.param_dtype if dtype is None else dtype
    if dtype not in FLOATS.values():
        raise ValueError(f"dtype must be one of {', '.join(FLOATS.values())} or None, got {dtype!r}")
    check_new_folder(folder)
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for name, parts in _modules(model).items():
        pair = _pair(model, parts)
        ranks[name.rsplit(".", 1)[-1]] = pair.a.shape[1]
        for layer in range(model.config.num_layers):
            place = PREFIX + name.format(layer)
            arrays[f"{place}.lora_A.weight"] = pair.a[layer]
            arrays[f"{place}.lora_B.weight"] = pair.b[layer]
            if pair.magnitude is not None:
                arrays[f"{place}.lora_magnitude_vector"] = pair.magnitude[layer]
    tensors = {name: np.empty(array.shape, jnp.dtype(dtype)) for name, array in arrays.items()}
    for name, tensor in tensors.items():
        cast_into(tensor, arrays[name], name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(tensors, folder / TENSORS)
        values = _config(next(iter(adapted.values())), ranks, base)
        (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error}") from None


def read_adapter_config(folder: Path, *, trains: bool = False) -> LoraConfig:
    """Returns the options of the adapters in a folder.

    Args:
        folder: holds adapter_config.json.
        trains: the adapters will be trained. Then a `lora_dropout` other than 0 is an error, because training has no
            dropout. It has no effect on the outputs of the model and on the merged weights.

    Raises:
        RunError: the file cannot be read, or a field asks for something that is not supported.
    """
    where = folder / CONFIG
    values = read_object(where)
    # The other values of init_lora_weights also change the base weights.
    admitted = {"peft_type": ["LORA"], "init_lora_weights": [True, False, "gaussian"], "bias": ["none", None]}
    for name, possible in admitted.items():
        if (value := values.get(name, possible[0])) not in possible:
            raise RunError(f"{where}: {name} must be one of {possible}, got {value!r}")
    for name in sorted(set(values) - READ - NEUTRAL):
        if values[name] or type(values[name]) is int:  # 0 may be the index of a layer
            raise RunError(f"{where}: {name} must not be set, got {values[name]!r}")
    if trains and (dropout := values.get("lora_dropout")):
        raise RunError(
            f"{where}: lora_dropout must be 0, because training has no dropout, got {dropout!r}; "
            f"set it to 0 in the file to train the adapters without dropout"
        )
    modules = values.get("target_modules")
    if not isinstance(modules, list) or not modules or any(name not in [*PROJECTIONS] for name in modules):
        raise RunError(f"{where}: target_modules must be a list of {', '.join(PROJECTIONS)}, got {modules!r}")
    targets: tuple[Projection, ...] = tuple(projection for name, projection in PROJECTIONS.items() if name in modules)
    try:
        rank, alpha, dora = values["r"], values["lora_alpha"], values.get("use_dora")
    except KeyError as error:
        raise RunError(f"{where}: {error.args[0]} is missing") from None
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise RunError(f"{where}: r must be an integer, got {rank!r}")
    if not is_number(alpha):
        raise RunError(f"{where}: lora_alpha must be a finite number, got {alpha!r}")
    if dora not in (None, False, True):
        raise RunError(f"{where}: use_dora must be true or false, got {dora!r}")
    try:
        return LoraConfig(rank, float(alpha), targets, dora=bool(dora), adapter=folder)
    except ValueError as error:
        raise RunError(f"{where}: {error}") from None


def check_adapter(folder: Path, config: ModelConfig, lora: LoraConfig) -> None:
    """Raises RunError unless a folder's adapters fit a model and are finite; the message names the tensor.

    Args:
        folder: holds adapter_model.safetensors.
        config: config of the model.
        lora: what `read_adapter_config` returns for the folder.

    Raises:
        RunError: as `load_adapter`.
    """
    for _ in _values(adapted_shapes(config, lora), folder):
        pass


def load_adapter(model: Decoder, folder: Path) -> None:
    """Loads the adapters of a folder into a model, in place.

    Args:
        model: model adapted with the options that `read_adapter_config` returns for the folder.
        folder: holds adapter_model.safetensors.

    Raises:
        RunError: the folder cannot be read, the model family fuses projections, or a tensor is missing, unexpected, of
            another shape, holds NaN or inf, or has a value that is too large for the adapters' dtype. The message names
            the first such tensor.
    """
    for parameter, value in _values(model, folder):
        parameter.set_value(jax.device_put(value, parameter[...].sharding))


def _values(model: Decoder, folder: Path) -> Iterator[tuple[nnx.Param[jax.Array], np.ndarray]]:
    """Yields the parameters of a model's adapters and their values in a folder."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / TENSORS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {path}: {truncation(path) or error}") from None
    for name, parts in _modules(model).items():
        if len(parts) > 1:
            raise RunError(
                f"--adapter: not supported for {model.config.family}, which fuses projections in "
                f"{name.rsplit('.', 1)[-1]}"
            )
        linear = getattr(getattr(model.blocks, parts[0].path[1]), parts[0].path[2])
        places = [PREFIX + name.format(layer) for layer in range(model.config.num_layers)]
        yield linear.lora_a, _stacked(tensors, places, "lora_A.weight", linear.lora_a, path)
        yield linear.lora_b, _stacked(tensors, places, "lora_B.weight", linear.lora_b, path)
        if linear.dora:
            magnitude = linear.lora_magnitude
            yield magnitude, _stacked(tensors, places, "lora_magnitude_vector", magnitude, path)
    if tensors:
        raise RunError(f"{path}: unexpected tensor {min(tensors)}")


def _stacked(
    tensors: dict[str, np.ndarray], places: list[str], name: str, like: nnx.Param[jax.Array], path: Path
) -> np.ndarray:
    """Removes the tensors of every layer from `tensors` and returns them stacked, in the dtype of `like`."""
    stacked, shape = np.empty(like.shape, like.dtype), like.shape[1:][::-1]
    for layer, place in zip(stacked, places, strict=True):
        key = f"{place}.{name}"
        if key not in tensors:
            raise RunError(f"{path}: {key} is missing")
        tensor = tensors.pop(key)
        if tensor.shape != shape:
            raise RunError(f"{path}: {key} must have shape {shape}, got {tensor.shape}")
        if not np.isfinite(_host(tensor)).all():
            raise RunError(f"{path}: {key} holds NaN or inf")
        cast_into(layer, tensor.T, f"{key} of {path}")
    return stacked


def _modules(model: Decoder) -> dict[str, list[TensorPart]]:
    """Returns the names of the adapted modules of the file, each with its kernels in order."""
    modules: dict[str, list[TensorPart]] = {}
    for part in file_parts(model.config):
        if part.path[-1] == "kernel":
            modules.setdefault(part.name.removesuffix(".weight"), []).append(part)
    adapted = {("blocks", MODULES[projection], projection, "kernel") for projection, _ in adapted_projections(model)}
    return {name: parts for name, parts in modules.items() if any(part.path in adapted for part in parts)}


def _pair(model: Decoder, parts: list[TensorPart]) -> _Pair:
    """Returns the adapter of a module, built from the adapters of its projections; some of them may have none."""
    linears = [getattr(getattr(model.blocks, part.path[1]), part.path[2]) for part in parts]
    adapted = [linear for linear in linears if isinstance(linear, AdaptedLinear)]
    a = np.concatenate([_host(linear.lora_a[...]).mT for linear in adapted], axis=1)
    b = np.zeros((len(a), sum(part.shape[0] for part in parts), a.shape[1]), np.float32)
    column = 0
    for part, linear in zip(parts, linears, strict=True):
        if isinstance(linear, AdaptedLinear):
            own = _host(linear.lora_b[...]).mT  # (L, out, R)
            rows, columns = slice(part.first_row, part.first_row + part.shape[0]), slice(column, column + own.shape[2])
            b[:, rows, columns] = own
            column += own.shape[2]
    if not adapted[0].dora:
        return _Pair(a, b, None)
    magnitudes = [  # the norms of a kernel without an adapter are magnitudes that change nothing
        linear.lora_magnitude[...]
        if isinstance(linear, AdaptedLinear)
        else jax.lax.map(column_norms, linear.kernel[...])
        for linear in linears
    ]
    return _Pair(a, b, np.concatenate([_host(magnitude) for magnitude in magnitudes], axis=1))


def _host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def _config(linear: AdaptedLinear, ranks: dict[str, int], base: Path | None) -> dict[str, Any]:
    """Returns the values of adapter_config.json; `ranks` has the rank of each module of the file."""
    rank = linear.lora_a.shape[-1]
    other = {name: size for name, size in ranks.items() if size != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(linear.scale * rank),
        "target_modules": sorted(ranks),
        "rank_pattern": other,
        "alpha_pattern": {name: _number(linear.scale * size) for name, size in other.items()},
        "use_dora": linear.dora,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _number(value: float) -> float | int:
    """Returns a number that is whole up to rounding as an integer, as peft writes it."""
    return round(value) if math.isclose(value, round(value)) else value
