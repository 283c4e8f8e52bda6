"""Rows of tunix and MaxText in `benchmarks.hosts`: the head and the loss on fixed hidden states.

- tunix: `_default_loss_fn` of `PeftTrainer` with an `Embedder` of tunix as the tied head, in bfloat16, against
  `jax_pallas.hosts.tunix.loss_fn`.
- MaxText: `vocab_tiling_nnx_loss` with `TILES` tiles and a model without layers, with a tied embedding in float32 and
  activations in bfloat16, which are its defaults, against the same function of `jax_pallas.hosts.maxtext`.

Both variants are timed in turns, so that they share the clock of the GPU.
"""

import gc
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from benchmarks.hosts_process import check_differences
from benchmarks.hosts_rows import CONFIGS, Row
from benchmarks.hosts_times import Prepared, time_steps
from benchmarks.jax_host import trace_without_graphs
from benchmarks.methods import load
from benchmarks.timing import WARM_UP

TILES = 8  # of MaxText: of 1,024 or 2,048 tokens
# None of these has an effect on the head and the loss.
MAXTEXT_OPTIONS = {
    "run_name": "hosts",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "base_num_decoder_layers": 0,
    "per_device_batch_size": 1,
}


class Call(NamedTuple):
    """A compiled call of a loss and its gradients.

    Args:
        function: the jitted function.
        arguments: of it.
        run: enqueues one call and returns the loss, and the gradients of hidden states and head.
        bytes: of its arguments, results and temporaries.
    """

    function: Any
    arguments: tuple[Any, ...]
    run: Callable[[], tuple[Array, Any]]
    bytes: int


def measure_in_turns(rows: Sequence[Row], seconds: float, kernels: bool) -> list[dict[str, Any]]:
    """Returns the figures of rows that differ in the variant only, whose calls are timed in turns.

    Raises:
        UnavailableError: a library is not installed.
        ValueError: the loss or a gradient differs from the library's by more than rounding.
    """
    on_gpu = jax.default_backend() == "gpu"
    last: list[Any] = [None]  # the result of the last call; the device computes the calls in order

    def wait() -> None:
        jax.block_until_ready(last[0])

    prepared = [prepare(row, last) for row in rows]
    gc.collect()
    return time_steps(prepared, wait, on_gpu, seconds, kernels)


def prepare(row: Row, last: list[Any]) -> Prepared:
    """Compiles, checks and warms up the call of a row.

    Args:
        row: the row.
        last: gets the result of each call, in place of the one before.
    """
    # Rows of a process differ in the variant only, and the library's call is needed for both.
    own = compiled(row.host, row.config, "plain", row.seq, row.batch)
    call = compiled(row.host, row.config, row.variant, row.seq, row.batch)
    errors = check_differences(row.variant, differences(call.run(), own.run()))

    def step() -> None:
        last[0] = call.run()

    for _ in range(WARM_UP):
        step()
    size = call.bytes if jax.default_backend() == "gpu" else None
    trace = partial(trace_without_graphs, call.function, call.arguments)
    return Prepared(row, step, trace, {"peak_bytes": size, **errors})


@lru_cache(2)
def compiled(host: str, config: str, variant: str, seq: int, batch: int) -> Call:
    """Returns the compiled loss and gradients of a row."""
    make = {"tunix": tunix_loss, "maxtext": maxtext_loss}[host]
    loss, arguments = make(config, seq, batch, ours=variant == "ours")
    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    program = function.lower(*arguments).compile()
    plan: Any = program.memory_analysis()
    parts = ("argument", "output", "temp")
    size = 0 if plan is None else sum(getattr(plan, f"{part}_size_in_bytes") for part in parts)
    return Call(function, arguments, lambda: program(*arguments), size)


def differences(found: tuple[Array, Any], expected: tuple[Array, Any]) -> list[float]:
    """Returns relative differences of a loss and, the largest one, of the gradients."""

    @jax.jit
    def difference(one: Array, other: Array) -> Array:
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        return jnp.linalg.norm((one - other).ravel()) / jnp.linalg.norm(other.ravel())

    pairs = zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True)
    gradients = [float(difference(one, other)) for one, other in pairs]
    return [float(difference(found[0], expected[0])), max(gradients)]


def draw(config: str, seq: int, batch: int) -> tuple[Array, Array]:
    """Returns hidden states (batch, seq, D) in bfloat16 and tokens (batch, seq)."""
    d, v = (CONFIGS[config][name] for name in ("hidden_size", "vocab_size"))
    hidden = jax.random.normal(jax.random.key(0), (batch, seq, d), jnp.bfloat16)
    return hidden, jax.random.randint(jax.random.key(1), (batch, seq), 0, v)


class FixedStates(nnx.Module):
    """A model of tunix that calls its head with the same hidden states in each call."""

    def __init__(self, hidden: Any, embedder: Any) -> None:
        self.hidden, self.embedder = nnx.Param(hidden), embedder

    def __call__(
        self, tokens: Array, positions: Any, cache: Any, attention_mask: Any, skip_lm_head: bool = False
    ) -> tuple[Array, Any]:
        hidden = self.hidden[...]
        return (hidden if skip_lm_head else self.embedder.decode(hidden)), cache


def tunix_loss(config: str, seq: int, batch: int, ours: bool) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    """Returns the loss of hidden states, head and tokens, and these."""
    loss_fn: Any = load("tunix.sft.peft_trainer")._default_loss_fn
    if ours:
        loss_fn = load("jax_pallas.hosts.tunix").loss_fn(head=lambda model: model.embedder)
    hidden, tokens = draw(config, seq, batch)
    d, v = hidden.shape[-1], CONFIGS[config]["vocab_size"]
    embedder = nnx.eval_shape(
        lambda: load("tunix.models.llama3.model").Embedder(vocab_size=v, embed_dim=d, rngs=nnx.Rngs(0))
    )
    graph, _ = nnx.split(embedder)
    weight = jax.random.normal(jax.random.key(2), (v, d), jnp.bfloat16) * d**-0.5

    def loss(hidden: Array, head: Any, tokens: Array) -> Array:
        model = FixedStates(hidden, nnx.merge(graph, head))
        found = loss_fn(model, tokens, jnp.ones_like(tokens), None, None)
        return found.primary_loss.compute() if hasattr(found, "primary_loss") else found

    state = nnx.state(embedder)
    return loss, (hidden, jax.tree.map(lambda _: weight, state), tokens)


def maxtext_loss(config: str, seq: int, batch: int, ours: bool) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    """Returns the loss of hidden states, parameters of a model without layers, and tokens, and these."""
    tiling = load("jax_pallas.hosts.maxtext" if ours else "maxtext.utils.vocabulary_tiling")
    hidden, tokens = draw(config, seq, batch)
    options, model = maxtext_model(config, seq)
    graph, head, rest = nnx.split(model, nnx.Param, ...)
    # The embedding of MaxText has a standard deviation of 1, with which the logits of a model without training are as
    # far apart as the square root of D.
    head = jax.tree.map(lambda array: array * hidden.shape[-1] ** -0.5 if array.ndim == 2 else array, head)

    def loss(hidden: Array, head: Any, tokens: Array) -> Array:
        data = {"targets": tokens, "targets_segmentation": jnp.ones_like(tokens)}
        model = nnx.merge(graph, head, rest, copy=True)
        # The sum: the gradient of the hidden states in MaxText 0.2.4 leaves out the factor of a mean.
        return tiling.vocab_tiling_nnx_loss(model, hidden, data, options, True)[0]

    return loss, (hidden, head, tokens)


def maxtext_model(config: str, seq: int) -> tuple[Any, Any]:
    """Returns a configuration of MaxText, and a model without layers."""
    package = load("maxtext")
    modules = ("configs.pyconfig", "utils.maxtext_utils", "utils.maxtext_utils_nnx", "utils.model_creation_utils")
    pyconfig, utils, utils_nnx, creation = (load(f"maxtext.{name}") for name in modules)
    file = Path(package.__file__ or "").parent / "configs" / "base.yml"
    shape = CONFIGS[config]
    options = pyconfig.initialize(
        [None, str(file)],
        base_emb_dim=shape["hidden_size"],
        vocab_size=shape["vocab_size"],
        max_target_length=seq,
        logits_via_embedding=True,
        normalize_embedding_logits=False,
        num_vocab_tiling=TILES,
        **MAXTEXT_OPTIONS,
    )
    mesh = utils.get_mesh_from_config(options)
    with mesh:
        made = creation.from_config(options, mesh=mesh, rngs=utils_nnx.create_nnx_rngs(options), model_mode="train")
    return options, made
