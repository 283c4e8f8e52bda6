"""Measures attention over packed rows, forward and backward: `python -m benchmarks.attention`.

For the packed rows of `benchmarks.train_rows` it compares each method with float32 attention, then times it. It also
times cuDNN on rows of one sequence each. Packed rows should cost at most as much, because they need fewer operations.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import results
from benchmarks.methods import UnavailableError, check_errors, describe, installed, load
from benchmarks.timing import Sensor, host_blocks
from benchmarks.train_rows import GROUPS, Row, draw
from flax_models.model import attention
from flax_models.model.config import ModelConfig

Attend = Callable[[Array, Array, Array], Array]  # query (B, T, heads, H), key and value (B, T, kv heads, H)

ROWS = {row.name: row for group in ("packed", "smoke") for row in GROUPS[group] if row.data == "packed"}


def _unpacked(config: ModelConfig, sequences: attention.Sequences) -> Attend:
    return lambda query, key, value: attention._attend_whole(config, query, key, value, "cudnn")


def _cudnn(config: ModelConfig, sequences: attention.Sequences) -> Attend:
    return lambda query, key, value: attention._attend_packed(config, query, key, value, sequences)


def _xla(config: ModelConfig, sequences: attention.Sequences) -> Attend:
    positions = jnp.arange(sequences.of.shape[1])
    context = attention.AttentionContext(positions, positions, positions, sequences)  # its angles are not read
    return lambda query, key, value: attention._attend_seen(config, query, key, value, context, None)


def _tokamax(name: str) -> Callable[[ModelConfig, attention.Sequences], Attend]:
    def build(config: ModelConfig, sequences: attention.Sequences) -> Attend:
        base = load("tokamax._src.ops.attention.base")
        found = load("tokamax._src.ops.attention.api").IMPLEMENTATIONS
        if name not in found:
            raise UnavailableError(f"tokamax has no implementation {name!r} here")
        first = jnp.take_along_axis(sequences.starts, sequences.of, axis=1)[:, None]  # (B, 1, T): a query's first key
        mask = base.Mask(k_start=first, is_causal=True)
        return lambda query, key, value: found[name](query, key, value, mask=mask, logits_scale=config.head_dim**-0.5)

    return build


METHODS: dict[str, Callable[[ModelConfig, attention.Sequences], Attend]] = {
    "cudnn-unpacked": _unpacked,
    "cudnn": _cudnn,
    "xla": _xla,
    "tokamax-mosaic": _tokamax("mosaic_gpu"),
    "tokamax-triton": _tokamax("triton"),
}


def _reference(of: Array, query: Array, key: Array, value: Array) -> Array:
    """Attention with float32 matmuls for sequence numbers (B, T), one row of the batch at a time."""

    @jax.checkpoint
    def row(parts: tuple[Array, Array, Array, Array]) -> Array:
        of, query, key, value = parts
        length, heads, features = query.shape
        grouped = query.reshape(length, key.shape[1], -1, features)  # (T, kv heads, group, H)
        scores = jnp.einsum("tkgh,skh->kgts", grouped, key, precision="highest") * features**-0.5
        seen = (of[:, None] == of[None, :]) & (jnp.arange(length)[:, None] >= jnp.arange(length))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("kgts,skh->tkgh", weights, value, precision="highest").reshape(length, heads, features)

    return jax.lax.map(row, (of, query, key, value))


@jax.jit
def _expected(of: Array, *arrays: Array) -> tuple[Array, ...]:
    return _both(partial(_reference, of), *(array.astype(jnp.float32) for array in arrays))


def _both(attend: Attend, query: Array, key: Array, value: Array, upstream: Array) -> tuple[Array, ...]:
    """Returns the output and the gradients of query, key and value."""
    out, backward = jax.vjp(attend, query, key, value)
    return (out, *backward(upstream))


@jax.jit
def _errors(found: tuple[Array, ...], expected: tuple[Array, ...]) -> list[Array]:
    def norm(array: Array) -> Array:
        return jnp.linalg.norm(array.astype(jnp.float32).ravel())

    return [norm(ours - theirs) / norm(theirs) for ours, theirs in zip(found, expected, strict=True)]


def measure(row: Row, names: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the figures of each method on a row's lengths: errors, milliseconds, bytes of temporaries."""
    assert row.batch is not None
    config, lengths = row.model(), draw(row, row.batch).batches[0].lengths
    assert lengths is not None
    sequences = attention.make_sequences(jnp.asarray(lengths), row.seq)
    sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads)
    arrays = [
        jax.random.normal(key, (row.batch, row.seq, heads, config.head_dim), jnp.bfloat16)
        for key, heads in zip(jax.random.split(jax.random.key(0), 4), sizes, strict=True)
    ]
    sensor = Sensor(gpu=jax.devices()[0].platform == "gpu")
    for name in names:
        figures = {"row": row.name, "method": name, "b": row.batch, "t": row.seq, "heads": config.num_heads}
        figures |= {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "examples": int((lengths > 0).sum())}
        try:
            attend = METHODS[name](config, sequences)
            of = jnp.zeros_like(sequences.of) if name == "cudnn-unpacked" else sequences.of
            compiled = jax.jit(partial(_both, attend)).lower(*arrays).compile()
            forward = jax.jit(attend).lower(*arrays[:3]).compile()
            errors = map(float, _errors(compiled(*arrays), _expected(of, *arrays)))
            figures |= dict(zip(("err_out", "err_d_query", "err_d_key", "err_d_value"), errors, strict=True))
            plan: Any = compiled.memory_analysis()
            figures["temporary_bytes"] = None if plan is None else plan.temp_size_in_bytes
            if wrong := check_errors({key: figures[key] for key in figures if key.startswith("err_")}, "bfloat16"):
                yield {**figures, "status": "failed", "note": wrong}
                continue
            for key, run in (("ms", partial(compiled, *arrays)), ("forward_ms", partial(forward, *arrays[:3]))):
                figures[key] = _time(run, seconds, sensor)
        except UnavailableError as error:
            yield {**figures, "status": "skipped", "note": str(error)}
        except Exception as error:  # another library may fail in any way, and the others are still measured
            yield {**figures, "status": "failed", "note": describe(error)}
        else:
            yield {**figures, "status": "ok", "note": None}


def _time(run: Callable[[], Any], seconds: float, sensor: Sensor) -> float:
    last: list[Any] = [None]

    def step() -> None:
        last[0] = run()

    return host_blocks(step, lambda: jax.block_until_ready(last[0]), seconds, sensor).figures()["step_ms"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if what the packed path takes failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    usual = [name for name in ROWS if not name.startswith("smoke")]
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=usual, metavar="NAME", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the calls of a figure (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the figures into this file after each method")
    parser.add_argument("--commit", help="commit of the code, if git does not know it")
    options = parser.parse_args(arguments)
    commit = options.commit or results.commit("flax_models")
    versions = installed("jax", "jaxlib", "tokamax")
    file = results.ResultFile(options.json, jax.devices()[0].device_kind, versions, commit, key=("row", "method"))
    print(f"{file.head['device']}, {versions}, commit {commit}")
    failed = 0
    for name in options.rows:
        for figures in measure(ROWS[name], options.methods, options.seconds):
            file.add(figures)
            shown = ("ms", "forward_ms", "temporary_bytes", "err_out", "err_d_query", "err_d_key", "err_d_value")
            words = [f"{key} {figures[key]:.4g}" for key in shown if figures.get(key) is not None]
            print(f"{name} {figures['method']}: {figures['note'] or ', '.join(words)}", flush=True)
            failed += figures["status"] == "failed" and figures["method"] in ("cudnn", "xla")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
