"""Weights in Hugging Face folders: `load` reads a folder into a `Decoder`, `save` writes a folder.

A folder holds config.json, and either model.safetensors or several shards listed in model.safetensors.index.json. The
files have one tensor (out, in) per layer. The decoder's parameters are stacked over the layers as (L, in, out), and
projections that a family's files fuse (Phi-3's qkv_proj and gate_up_proj) are separate parameters. Loading and saving
use the same mapping, `file_parts`.

`load` reads one parameter at a time from memory-mapped files and `save` writes one shard at a time. In addition to the
model, the host memory holds only one stacked parameter or one shard. Names, shapes and dtypes are compared with the
config before anything is allocated, and a tensor with NaN or inf is an error.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from flax_models.errors import RunError, check_writable
from flax_models.hub.config import RUN_FIELDS, read_config, read_object, values_of
from flax_models.hub.fields import NEUTRAL
from flax_models.model.config import ModelConfig
from flax_models.model.decoder import Decoder, decoder_shapes
from flax_models.model.sharding import spec_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMPANIONS = (  # files of a folder that are copied along with the weights
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Tensors in some published files that follow from the config; they are ignored.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EXPONENT = {"float32": (np.uint32, 0x7F800000), "float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}
LAYER = re.compile(r"model\.layers\.(\d+)\.")
ParameterPath = tuple[str, ...]


class TensorPart(NamedTuple):
    """Rows of a tensor in the file that correspond to one parameter of the decoder."""

    path: ParameterPath  # of the parameter
    name: str  # of the tensor in the file; {} stands for the layer
    shape: tuple[int, ...]  # of these rows in the file
    first_row: int = 0
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return self.path[0] == "blocks"


def file_parts(config: ModelConfig) -> list[TensorPart]:
    """Returns the location of every parameter in the family's files; parts of a fused tensor are consecutive."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head, config.num_kv_heads * head
    parts = [TensorPart(("embedding",), "model.embed_tokens.weight", (config.vocab_size, width))]

    def vector(name: str, size: int, *path: str) -> None:
        parts.append(TensorPart(("blocks", *path), f"model.layers.{{}}.{name}", (size,)))

    def linear(name: str, columns: int, *outputs: tuple[int, str, str], bias: bool = False) -> None:
        row = 0
        for rows, module, projection in outputs:
            path, tensor = ("blocks", module, projection), f"model.layers.{{}}.{name}"
            parts.append(TensorPart((*path, "kernel"), f"{tensor}.weight", (rows, columns), row, transposed=True))
            if bias:
                parts.append(TensorPart((*path, "bias"), f"{tensor}.bias", (rows,), row))
            row += rows

    queries = ((query, "attention", "query"), (key, "attention", "key"), (key, "attention", "value"))
    gates = ((inner, "feed_forward", "gate"), (inner, "feed_forward", "up"))
    if config.family == "phi3":
        linear("self_attn.qkv_proj", width, *queries)
        linear("mlp.gate_up_proj", width, *gates)
    else:
        for letter, output in zip("qkv", queries, strict=True):
            linear(f"self_attn.{letter}_proj", width, output, bias=config.attention_bias)
        for output in gates:
            linear(f"mlp.{output[2]}_proj", width, output)
    linear("self_attn.o_proj", query, (width, "attention", "out"), bias=config.attention_out_bias)
    linear("mlp.down_proj", inner, (width, "feed_forward", "down"))
    if config.query_key_norm or config.joint_query_key_norm:
        queries_normed, keys_normed = (query, key) if config.joint_query_key_norm else (head, head)
        vector("self_attn.q_norm.weight", queries_normed, "attention", "query_norm", "scale")
        vector("self_attn.k_norm.weight", keys_normed, "attention", "key_norm", "scale")
    if config.pre_norms:
        vector("input_layernorm.weight", width, "attention_norm", "scale")
        before = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        vector(f"{before}.weight", width, "feed_forward_norm", "scale")
    if config.post_norms:
        vector("post_attention_layernorm.weight", width, "attention_post_norm", "scale")
        vector("post_feedforward_layernorm.weight", width, "feed_forward_post_norm", "scale")
    parts.append(TensorPart(("final_norm", "scale"), "model.norm.weight", (width,)))
    if not config.tie_embeddings:
        parts.append(TensorPart(("head",), "lm_head.weight", (config.vocab_size, width)))
    return parts


def _tensors(config: ModelConfig) -> dict[str, list[tuple[TensorPart, int]]]:
    """Returns the names of all tensors of the family's files, each with its parts and their layers."""
    tensors: dict[str, list[tuple[TensorPart, int]]] = {}
    parts = file_parts(config)
    for layer in range(config.num_layers + 1):  # the last iteration adds the tensors outside the layers
        for part in parts:
            if part.stacked == (layer < config.num_layers):
                tensors.setdefault(part.name.format(layer), []).append((part, layer))
    return tensors


def _shape(parts: list[tuple[TensorPart, int]]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part, _ in parts), *parts[0][0].shape[1:])


def check_tensors(folder: Path, config: ModelConfig) -> None:
    """Raises RunError unless a folder holds exactly the tensors of a config, by name, shape and dtype.

    It reads only the headers of the files. The arguments and errors are those of `check_weights`.
    """
    with ExitStack() as stack:
        _Files(folder, stack).check(config)


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raises RunError unless a folder holds exactly the tensors of a config, complete and finite.

    It reads every tensor, at about the speed of the disk, and keeps none in memory.

    Args:
        folder: holds safetensors files.
        config: the config that `read_config` returned for the folder.

    Raises:
        RunError: a file cannot be read or is truncated, or tensors are missing, unexpected, of another shape or dtype,
            or hold NaN or inf. The message names the file or the tensor.
    """
    with ExitStack() as stack:
        files = _Files(folder, stack)
        files.check(config)
        files.check_tied(config)
        for name in _tensors(config):
            files.check_finite(name)


def load(
    folder: Path | str, *, ignore_config_fields: Collection[str] = (), mesh: Mesh | None = None, **changes: Any
) -> Decoder:
    """Loads the model of a Hugging Face folder.

    Args:
        folder: holds config.json and safetensors files.
        ignore_config_fields: names of unknown fields of config.json to ignore.
        mesh: each device of the mesh gets its part of each parameter, as `flax_models.model.sharding` divides them, and
            only that is read for it; None: all parameters are on the default device.
        changes: values for these fields of `ModelConfig`: dtype, param_dtype (the dtype of the parameters, whatever
            the dtype of the files; float32 by default), scan_layers, remat, attention_implementation and max_seq_len.

    Returns:
        The model.

    Raises:
        RunError: the folder cannot be read, config.json asks for something that the decoder does not support, or
            tensors are missing, unexpected, of another shape, hold NaN or inf, or have a value that is too large for
            param_dtype. The message names the file or the tensor.
        ValueError: `changes` has another field or an invalid value.

    Example:
        >>> model = load(Path("Llama-3.2-1B"), dtype="bfloat16")  # doctest: +SKIP
    """
    folder = Path(folder)
    if unexpected := sorted(set(changes) - {*RUN_FIELDS, "max_seq_len"}):
        raise ValueError(f"changes must be among {', '.join(RUN_FIELDS)} and max_seq_len, got {', '.join(unexpected)}")
    config = dataclasses.replace(read_config(folder, ignore_config_fields), **changes)
    with ExitStack() as stack:
        files = _Files(folder, stack)
        files.check(config)
        files.check_tied(config)
        graph, shapes = nnx.split(decoder_shapes(config))
        arrays = dict(_read(config, files, mesh))
    params = nnx.map_state(lambda path, variable: variable.replace(arrays.pop(path)), shapes)
    assert not arrays, f"arrays that are not parameters of the decoder: {list(arrays)}"
    return nnx.merge(graph, params)


class _Files:
    """All tensors of a folder, by name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        if (folder / INDEX).is_file():
            try:
                weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
                names = sorted(set(weight_map.values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise RunError(f"cannot read {folder / INDEX}: {type(error).__name__}: {error}") from None
        elif (folder / SINGLE).is_file():
            weight_map, names = None, [SINGLE]
        else:
            raise RunError(f"{folder} has neither {SINGLE} nor {INDEX}")
        self._handles: dict[str, Any] = {}  # the open file of each tensor
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise RunError(f"{folder / INDEX}: a shard must be a file in the same folder, got {name!r}")
            try:
                handle = stack.enter_context(safe_open(folder / name, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise RunError(f"cannot read {folder / name}: {truncation(folder / name) or error}") from None
            self._handles |= dict.fromkeys(handle.keys(), handle)
        if weight_map is not None and (different := sorted(set(weight_map) ^ set(self._handles))):
            raise RunError(f"{folder / INDEX} and the shards differ in these tensors: {_first_few(different)}")

    def check(self, config: ModelConfig) -> None:
        """Raises RunError unless the names, shapes and dtypes of the tensors match the config."""
        found = {name for name in self._handles if not DERIVED.fullmatch(name)}
        layers = len({match[1] for name in found if (match := LAYER.match(name))})
        if layers < config.num_layers:  # checked before building names for each layer: num_layers may be very large
            raise RunError(
                f"{self.folder}: num_hidden_layers is {config.num_layers}, but there are tensors of {layers} layers"
            )
        expected = _tensors(config)
        if missing := sorted(set(expected) - found):
            raise RunError(f"{self.folder}: missing tensors: {_first_few(missing)}")
        extra = found - set(expected)
        if config.tie_embeddings:  # some files store a tied head: `check_tied`
            extra.discard("lm_head.weight")
        if extra:
            raise RunError(f"{self.folder}: unexpected tensors: {_first_few(sorted(extra))}")
        for name, parts in expected.items():
            view = self._handles[name].get_slice(name)
            if tuple(view.get_shape()) != _shape(parts):
                raise RunError(f"{self.folder}: {name} must have shape {_shape(parts)}, got {tuple(view.get_shape())}")
            if view.get_dtype() not in FLOATS:
                raise RunError(f"{self.folder}: {name} must be one of {', '.join(FLOATS)}, got {view.get_dtype()}")

    def check_tied(self, config: ModelConfig) -> None:
        """Raises RunError if a head that is tied to the embedding is stored and differs from it."""
        if not config.tie_embeddings or "lm_head.weight" not in self._handles:
            return
        if not np.array_equal(self.tensor("lm_head.weight"), self.tensor("model.embed_tokens.weight")):
            raise RunError(f"{self.folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding")

    def tensor(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Returns rows of a tensor, by default all."""
        return self._handles[name].get_slice(name)[first:last]

    def block(self, name: str, first: int, last: int, *columns: range) -> np.ndarray:
        """Returns a block of a tensor: rows, of a matrix only some columns."""
        return self._handles[name].get_slice(name)[(slice(first, last), *(slice(c.start, c.stop) for c in columns))]

    def check_finite(self, name: str) -> None:
        """Raises RunError if a tensor holds NaN or inf."""
        view = self._handles[name].get_slice(name)
        integer, exponent = EXPONENT[FLOATS[view.get_dtype()]]
        rows, *others = view.get_shape()
        step = max(1, 2**20 // max(1, math.prod(others)))  # a few MiB at a time
        for first in range(0, rows, step):
            bits = np.ascontiguousarray(view[first : min(first + step, rows)]).view(integer)
            if (invalid := (bits & exponent) == exponent).any():  # only NaN and inf have an exponent of all ones
                place = np.argwhere(invalid)[0]
                where = ", ".join(str(int(i)) for i in (first + place[0], *place[1:]))
                raise RunError(f"{self.folder}: {name} holds NaN or inf, first at [{where}]")


def truncation(path: Path) -> str | None:
    """Describes where a safetensors file is truncated; None if it is not truncated."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 + length:
                return f"the file is truncated in its header, after {size:,} bytes"
            header = json.loads(file.read(length))
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, IndexError, MemoryError, AttributeError):
        return None
    name = min((name for name in ends if 8 + length + ends[name] > size), key=lambda name: ends[name], default=None)
    if name is None:
        return None
    return f"the file is truncated in {name}: it has {size:,} of {8 + length + max(ends.values()):,} bytes"


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _read(config: ModelConfig, files: _Files, mesh: Mesh | None) -> Iterator[tuple[ParameterPath, jax.Array]]:
    dtype = jnp.dtype(config.param_dtype)
    for part in file_parts(config):
        layers = range(config.num_layers) if part.stacked else [0]
        if part.first_row == 0:  # check a fused tensor once
            for i in layers:
                files.check_finite(part.name.format(i))
        shape = part.shape[::-1] if part.transposed else part.shape
        if part.stacked:
            shape = (len(layers), *shape)
        read = partial(_read_part, files, part, dtype, shape)
        if mesh is None:
            yield part.path, jnp.asarray(read((slice(None),) * len(shape)))
        else:
            sharding = NamedSharding(mesh, spec_of(".".join(part.path), stacked=part.stacked))
            # Several devices may have the same block. JAX's type of a callback admits None for the index, which it
            # passes for no sharding.
            callback: Any = cache(read)
            yield part.path, jax.make_array_from_callback(shape, sharding, callback)


def _read_part(
    files: _Files, part: TensorPart, dtype: np.dtype, shape: tuple[int, ...], index: tuple[slice, ...]
) -> np.ndarray:
    """Returns a block of a parameter of this shape, which the slices of `index` select."""
    bounds = [range(*one.indices(size)) for one, size in zip(index, shape, strict=True)]
    layers, inside = (bounds[0], bounds[1:]) if part.stacked else ([0], bounds)
    array = np.empty((len(layers), *map(len, inside)), dtype)
    rows, *columns = inside[::-1] if part.transposed else inside
    for place, i in enumerate(layers):
        name = part.name.format(i)
        block = files.block(name, part.first_row + rows.start, part.first_row + rows.stop, *columns)
        cast_into(array[place], block.T if part.transposed else block, f"{name} of {files.folder}")
    return array if part.stacked else array[0]


def save(
    model: Decoder,
    folder: Path | str,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    like: Path | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Saves a model as a Hugging Face folder that transformers loads.

    Args:
        model: the model; its config's `family` determines the format.
        folder: folder to create; if it exists, it must be empty.
        dtype: float32, bfloat16 or float16, the dtype of the written tensors; None: the dtype of the parameters.
        max_shard_bytes: maximum bytes of tensors in one file; a larger tensor gets a separate file.
        like: folder whose tokenizer files and generation config are copied, together with the fields of its
            config.json that do not change the computation, such as token ids.
        fields: further such fields for config.json, for example eos_token_id.

    Raises:
        RunError: the folder is not empty or cannot be written, the family's config.json cannot express the model, or a
            value is too large for `dtype`, which for float16 is checked before anything is written.
        ValueError: an option is out of range, or the model has adapters.

    Example:
        >>> save(model, Path("out"), dtype="bfloat16", like=Path("Llama-3.2-1B"))  # doctest: +SKIP
    """
    config, folder = model.config, Path(folder)
    arrays = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    if unexpected := sorted(set(arrays) - {part.path for part in file_parts(config)}):
        raise ValueError(
            f"model must not have adapters (flax_models.model.lora.merge removes them), "
            f"got {'.'.join(map(str, unexpected[0]))}"
        )
    dtype = config.param_dtype if dtype is None else dtype
    if dtype not in FLOATS.values():
        raise ValueError(f"dtype must be one of {', '.join(FLOATS.values())} or None, got {dtype!r}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    if unexpected := sorted(set(fields or ()) - NEUTRAL):
        raise ValueError(f"fields must not change the computation, got {', '.join(unexpected)}")
    values = {**_neutral_values(like), **(fields or {}), **values_of(config), "torch_dtype": dtype}
    check_new_folder(folder)
    tensors, numpy_dtype = _tensors(config), np.dtype(jnp.dtype(dtype))
    if dtype == "float16":  # its range is small: values that do not fit raise before the first shard is written
        for name, parts in tensors.items():
            _tensor(name, parts, arrays, numpy_dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_tensors(tensors, arrays, folder, numpy_dtype, max_shard_bytes)
        if like is not None:
            copy_companions(like, folder)
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error}") from None


def check_new_folder(folder: Path) -> None:
    """Raises RunError unless a folder is empty or can be created, so that a model can be saved to it."""
    if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} already exists and is not an empty folder; choose another")
    check_writable(folder)


def _neutral_values(like: Path | None) -> dict[str, Any]:
    """Returns the fields of another folder's config.json that do not change the computation."""
    values = {} if like is None else read_object(like / "config.json")
    return {name: value for name, value in values.items() if name in NEUTRAL - {"dtype", "torch_dtype"}}


def copy_companions(source: Path, folder: Path) -> None:
    """Copies a folder's tokenizer files and generation config, as far as they exist; raises OSError."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_tensors(
    tensors: dict[str, list[tuple[TensorPart, int]]],
    arrays: dict[Any, Any],
    folder: Path,
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    sizes = {name: math.prod(_shape(parts)) * dtype.itemsize for name, parts in tensors.items()}
    shards: list[list[str]] = [[]]
    size = 0
    for name in tensors:
        if shards[-1] and size + sizes[name] > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sizes[name]
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        shard = {name: _tensor(name, tensors[name], arrays, dtype) for name in names}
        write_tensors(shard, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file with the default permissions of a new file; raises OSError."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode  # from the user's umask; safetensors makes its files readable only by their owner
    save_file(tensors, path, metadata={"format": "pt"})  # transformers requires this format
    path.chmod(mode)


def _tensor(name: str, parts: list[tuple[TensorPart, int]], arrays: dict[Any, Any], dtype: np.dtype) -> np.ndarray:
    """Returns one tensor in the layout of the files; contiguous, because safetensors ignores strides."""
    tensor = np.empty(_shape(parts), dtype)
    for part, layer in parts:
        array = arrays[part.path][...]
        piece = np.asarray(array[layer] if part.stacked else array)
        rows = tensor[part.first_row : part.first_row + part.shape[0]]
        cast_into(rows, piece.T if part.transposed else piece, name)
    return tensor


def cast_into(array: np.ndarray, values: np.ndarray, name: str) -> None:
    """Sets an array to values of any dtype; raises RunError, which names them, if a finite value becomes infinite."""
    with np.errstate(over="ignore"):  # NumPy's warning names no tensor, and bfloat16 has none
        array[...] = values
    if np.can_cast(values.dtype, array.dtype):
        return
    infinite = np.isinf(array)
    if infinite.any() and (lost := infinite & np.isfinite(values)).any():
        largest = float(np.abs(values[lost]).max())
        raise RunError(f"dtype {array.dtype} cannot hold the values of {name}, up to {largest:.3g}; use another dtype")
