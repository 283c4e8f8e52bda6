"""Modules with the interfaces of hosts for tests where these are not installed: names, arguments and results, on
materialized logits. Each function says which file of which version has its interface, and
`test_hosts_jax_released.py` compares them with the installed ones."""

import enum
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import linen, nnx, struct
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_pallas import hosts

ADAPTERS = ("levanter", "maxtext", "tunix")
TUNIX_MODEL = "tunix.models.qwen3.model"


@contextmanager
def installed(*modules: ModuleType) -> Iterator[None]:
    """Makes modules importable. Adapters of hosts that are imported within import these."""
    with mock.patch.dict(sys.modules, {module.__name__: module for module in modules}):
        for name in ADAPTERS:
            sys.modules.pop(f"jax_pallas.hosts.{name}", None)
            if hasattr(hosts, name):
                delattr(hosts, name)
        yield


def jax_hosts() -> AbstractContextManager[None]:
    """Makes all hosts of this file importable."""
    return installed(*tunix(), *levanter(), *maxtext())


def host(name: str) -> Any:
    """Returns an installed module."""
    return sys.modules[name]


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


def packages(*names: str) -> list[ModuleType]:
    return [module(name, __path__=[]) for name in names]


# tunix


def tunix(version: str = "0.1.8") -> list[ModuleType]:
    """google-tunix 0.1.7, and commit c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3 (0.1.8): `tunix/rl/common.py`,
    `tunix/sft/peft_trainer.py` and `tunix/sft/utils.py`."""

    def default_loss(
        model: Any,
        input_tokens: Array,
        input_mask: Array,
        positions: Array,
        attention_mask: Array,
        images: Array | None = None,
    ) -> Any:
        logits, _ = model(input_tokens, positions, None, attention_mask)
        log_probs = target_log_probs(logits[:, :-1], input_tokens[:, 1:])
        total, number = -jnp.sum(log_probs * input_mask[:, 1:]), jnp.sum(input_mask[:, 1:])
        if version == "0.1.7":
            return total / (number + 1e-8)
        return LossOutput(WeightedMetric(total, number, eps=1e-8), {})

    def compute_chunked_logps(
        model: Any, hidden_states: Array, target_ids: Array, temperature: float, chunk_size: int, return_entropy: bool
    ) -> Any:
        logits = model.compute_final_logits(hidden_states)
        if temperature not in (0.0, 1.0):
            logits /= temperature
        found = target_log_probs(logits, target_ids)
        every = jax.nn.log_softmax(logits)
        return (found, -jnp.sum(jnp.exp(every) * every, axis=-1)) if return_entropy else found

    common = module("tunix.rl.common")

    @partial(jax.jit, static_argnames=("temperature", "return_entropy"))
    def compute_per_token_logps(
        graphdef: Any, state: Any, tokens: Array, temperature: float, return_entropy: bool
    ) -> Any:
        model = nnx.merge(graphdef, state)
        hidden, _ = model(tokens, positions=None, cache=None, attention_mask=None, skip_lm_head=True)
        arguments = model, hidden[:, :-1], tokens[:, 1:], temperature, 2, return_entropy
        return common.compute_chunked_logps(*arguments)

    vars(common).update(compute_per_token_logps=compute_per_token_logps)
    utils = module("tunix.sft.utils")
    if version != "0.1.7":
        vars(common).update(compute_chunked_logps=compute_chunked_logps)
        vars(utils).update(LossOutput=LossOutput, WeightedMetric=WeightedMetric)
    trainer = module("tunix.sft.peft_trainer", _default_loss_fn=default_loss, PeftTrainer=None)
    made = {"tunix": module("tunix", __path__=[], __version__=version)}
    made |= {one.__name__: one for one in packages("tunix.rl", "tunix.sft")}
    vars(made["tunix.rl"]).update(common=common)
    vars(made["tunix.sft"]).update(peft_trainer=trainer, utils=utils)
    return [*made.values(), common, trainer, utils]


def target_log_probs(logits: Array, target: Array) -> Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1)[..., 0]


@struct.dataclass
class WeightedMetric:
    unreduced_sum: Any
    denominator: Any
    eps: float | None = struct.field(default=None, pytree_node=False)

    def compute(self) -> Any:
        return self.unreduced_sum / (self.denominator + (self.eps or 0.0))


@struct.dataclass
class LossOutput:
    primary_loss: WeightedMetric
    aux_metrics: Any


class Embedder(nnx.Module):
    """The embedding of `tunix/models/qwen3/model.py`."""

    def __init__(self, vocab: int, hidden: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.input_embedding = nnx.Param(jax.random.normal(rngs.params(), (vocab, hidden)))
        self.dtype = dtype

    def decode(self, x: Array) -> Array:
        return jnp.dot(x.astype(self.dtype), self.input_embedding[...].astype(self.dtype).T)


class Einsum(nnx.Module):
    """The output layer of `tunix/models/qwen3/model.py`, `einsum_str` "BTD,DV->BTV"."""

    def __init__(self, vocab: int, hidden: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (hidden, vocab)))
        self.dtype = dtype

    def __call__(self, x: Array) -> Array:
        return jnp.einsum("BTD,DV->BTV", x.astype(self.dtype), self.w[...].astype(self.dtype))


class TunixConfig:
    def __init__(self, final_logit_softcap: float | None) -> None:
        self.final_logit_softcap = final_logit_softcap


class TunixModel(nnx.Module):
    """A model of tunix. Those of 0.1.7 have `output_hidden_states` in place of `skip_lm_head`."""

    def __init__(
        self, vocab: int, hidden: int, tied: bool, softcap: float | None = None, dtype: Any = jnp.float32
    ) -> None:
        rngs = nnx.Rngs(0)
        self.config = TunixConfig(softcap)
        self.embedder = Embedder(vocab, hidden, dtype, rngs)
        if not tied:
            self.lm_head = Einsum(vocab, hidden, dtype, rngs)

    def hidden_states(self, tokens: Array) -> Array:
        return jnp.tanh(self.embedder.input_embedding[...][tokens])

    def __call__(
        self, tokens: Array, positions: Any, cache: Any, attention_mask: Any, skip_lm_head: bool = False
    ) -> tuple[Array, Any]:
        x = self.hidden_states(tokens)
        return (x if skip_lm_head else self.compute_final_logits(x)), cache

    def compute_final_logits(self, x: Array) -> Array:
        logits = self.lm_head(x) if hasattr(self, "lm_head") else self.embedder.decode(x)
        cap = self.config.final_logit_softcap
        return logits.astype(jnp.float32) if cap is None else cap * jnp.tanh(logits.astype(jnp.float32) / cap)


class OldTunixModel(TunixModel):
    """A model of tunix 0.1.7."""

    def __call__(
        self, tokens: Array, positions: Any, cache: Any, attention_mask: Any, output_hidden_states: bool = False
    ) -> tuple[Array, Any]:
        x = self.hidden_states(tokens)
        if output_hidden_states:
            self.sow(nnx.Intermediate, "all_hidden_states", x)
        return self.compute_final_logits(x), cache


# levanter

LEVANTER_API = "levanter.kernels.pallas.fused_cross_entropy_loss.api"


def levanter() -> list[ModuleType]:
    """`levanter/kernels/pallas/fused_cross_entropy_loss/api.py` of marin-levanter 0.2.20.dev202606180959 and
    0.2.227.dev40316220070, and of commit 01666fdb55b7b8d246970916f576c3fa6b845a1d of marin, with its implementation
    "reference" alone."""

    def reference(
        x: Array,
        labels: Array,
        w: Array,
        *,
        block_sizes: Any,
        dtype: Any,
        logit_soft_cap: float | None,
        precision: Any,
        return_argmax: bool = False,
    ) -> tuple[Array, ...]:
        logits = x @ w
        if logit_soft_cap is not None:
            logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap)
        results = -target_log_probs(logits, labels), jax.nn.logsumexp(logits, axis=-1)
        return (*results, jnp.argmax(logits, axis=-1)) if return_argmax else results

    def fused_cross_entropy_loss_and_logsumexp_penalty(
        x: Array,
        labels: Array,
        w: Array,
        *,
        reduction: str | None = "mean",
        weight: Array | None = None,
        logsumexp_weight: float | None = 0.0,
        block_size: int | None = None,
        block_sizes: Any = None,
        dtype: Any = jnp.float32,
        logit_soft_cap: float | None = None,
        precision: Any = None,
        implementation: Any = None,
        return_argmax: bool = False,
    ) -> Any:
        (chosen,) = api._default_implementations() if implementation is None else implementation
        function = api.IMPLEMENTATIONS[chosen] if isinstance(chosen, str) else chosen
        keywords = {"block_sizes": None, "dtype": dtype, "logit_soft_cap": logit_soft_cap, "precision": precision}
        if return_argmax:
            keywords["return_argmax"] = True
        loss, lse, *argmax = function(x, labels, w, **keywords)
        loss = (loss + (logsumexp_weight or 0.0) * lse**2) * (1.0 if weight is None else weight)
        loss = {None: lambda loss: loss, "mean": jnp.mean, "sum": jnp.sum}[reduction](loss)
        return (loss, *argmax) if return_argmax else loss

    api: Any = module(LEVANTER_API, IMPLEMENTATIONS={"reference": reference})
    api.fused_cross_entropy_loss_and_logsumexp_penalty = fused_cross_entropy_loss_and_logsumexp_penalty
    api._default_implementations = lambda: ("reference",)
    parts = LEVANTER_API.split(".")
    parents = packages(*(".".join(parts[:number]) for number in range(1, len(parts))))
    vars(parents[-1]).update(api=api)
    return [*parents, api]


# MaxText


class ShardMode(enum.Enum):
    AUTO = "auto"
    EXPLICIT = "explicit"


RULES = {  # of `src/maxtext/configs/base.yml`, on a mesh of the axes fsdp and tensor
    "activation_batch": "fsdp",
    "activation_embed_and_logits_batch": "fsdp",
    "vocab": "tensor",
    "embed_vocab": "fsdp",
}


def maxtext(version: str = "0.2.5") -> list[ModuleType]:
    """MaxText 0.2.5, and commit e591f30cbbf217ed67ef71263ec0538239f9c3b8 (0.2.4):
    `src/maxtext/utils/vocabulary_tiling.py`, `src/maxtext/utils/sharding.py` and
    `src/maxtext/trainers/pre_train/train.py`."""

    def create_sharding(mesh: Any, logical_names: Any, rules: Any = None) -> NamedSharding:
        names = [RULES.get(name) for name in logical_names]
        return NamedSharding(mesh, P(*(name if mesh.shape.get(name, 1) > 1 else None for name in names)))

    def summed(logits: Array, data: Any, config: Any) -> tuple[Array, Array]:
        z_loss = config.z_loss_multiplier * jax.nn.logsumexp(logits, axis=-1) ** 2
        counted = data["targets_segmentation"] != 0
        losses = z_loss - target_log_probs(logits, data["targets"])
        return jnp.sum(losses * counted), jnp.sum(z_loss * counted)

    def vocab_tiling_nnx_loss(model: Any, hidden_states: Array, data: Any, config: Any, is_train: bool) -> Any:
        deterministic = not config.enable_dropout if is_train else True
        logits = model.logits_from_hidden_states_for_vocab_tiling(hidden_states, deterministic, "train")
        return summed(logits, data, config)

    def vocab_tiling_linen_loss(
        hidden_states: Array, data: Any, config: Any, model: Any, params: Any, is_train: bool
    ) -> Any:
        method = "logits_from_hidden_states_for_vocab_tiling"
        return summed(model.apply(params, hidden_states, True, "train", method=method), data, config)

    losses: dict[str, Any] = {"vocab_tiling_nnx_loss": vocab_tiling_nnx_loss}
    if version == "0.2.4":
        losses |= {"vocab_tiling_linen_loss": vocab_tiling_linen_loss}
    train = module("maxtext.trainers.pre_train.train", main=None, **losses)
    tiling = module("maxtext.utils.vocabulary_tiling", **losses)
    parents = packages("maxtext", "maxtext.common", "maxtext.trainers", "maxtext.trainers.pre_train", "maxtext.utils")
    vars(parents[0]).update(__version__=version)
    vars(parents[3]).update(train=train)
    vars(parents[4]).update(vocabulary_tiling=tiling)
    common = module("maxtext.common.common_types", ShardMode=ShardMode)
    return [*parents, train, tiling, common, module("maxtext.utils.sharding", create_sharding=create_sharding)]


class MaxTextConfig:
    """The fields of `src/maxtext/configs/base.yml` that the output layer reads."""

    def __init__(self, **fields: Any) -> None:
        self.logits_via_embedding = False
        self.normalize_embedding_logits = True
        self.final_logits_soft_cap = 0.0
        self.logits_dot_in_fp32 = False
        self.enable_dropout = False
        self.parameter_memory_host_offload = False
        self.z_loss_multiplier = 0.0
        self.dtype = jnp.float32
        self.shard_mode = ShardMode.AUTO
        vars(self).update(fields)


def maxtext_logits(x: Array, embedding: Array | None, dense: Any, config: Any) -> Array:
    """The end of `apply_output_head` of `src/maxtext/layers/nnx_decoders.py` and `decoders.py`."""
    if embedding is None:
        return dense(x)
    logits = jnp.dot(x, embedding.astype(jnp.bfloat16).T, preferred_element_type=config.dtype)
    if config.normalize_embedding_logits:
        logits = logits / jnp.sqrt(x.shape[-1])
    cap = config.final_logits_soft_cap
    return cap * jnp.tanh(logits / cap) if cap else logits


class MaxTextNorm(nnx.Module):
    """`RMSNorm` of `src/maxtext/layers/normalizations.py`."""

    def __init__(self, hidden: int) -> None:
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, hidden))

    def __call__(self, x: Array, out_sharding: Any = None) -> Array:
        x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * self.scale[...]
        return x if out_sharding is None else jax.sharding.reshard(x, out_sharding)


class MaxTextDense(nnx.Module):
    """`DenseGeneral` of `src/maxtext/layers/linears.py`."""

    def __init__(self, hidden: int, vocab: int, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (hidden, vocab)))
        self.bias = self.kernel_scale = None

    def __call__(self, x: Array) -> Array:
        return x @ self.kernel[...]


class MaxTextDecoder(nnx.Module):
    """`NNXDecoder` of `src/maxtext/layers/nnx_decoders.py`."""

    def __init__(self, vocab: int, hidden: int, config: Any, rngs: nnx.Rngs) -> None:
        self.decoder_norm = MaxTextNorm(hidden)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        if not config.logits_via_embedding:
            self.logits_dense = MaxTextDense(hidden, vocab, rngs)


class MaxTextModel(nnx.Module):
    """`Transformer` of `src/maxtext/models/models.py`."""

    def __init__(self, vocab: int, hidden: int, config: Any, mesh: Any) -> None:
        rngs = nnx.Rngs(0)
        self.config, self.mesh = config, mesh
        self.token_embedder = nnx.Embed(vocab, hidden, rngs=rngs)
        self.decoder = MaxTextDecoder(vocab, hidden, config, rngs)

    def logits_from_hidden_states_for_vocab_tiling(self, x: Array, deterministic: bool, model_mode: str) -> Array:
        x = self.decoder.dropout(self.decoder.decoder_norm(x), deterministic=deterministic)
        tied = self.config.logits_via_embedding
        embedding = self.token_embedder.embedding[...] if tied else None
        return maxtext_logits(x, embedding, None if tied else self.decoder.logits_dense, self.config)


class MaxTextLinenDecoder(linen.Module):
    """`Decoder` of `src/maxtext/layers/decoders.py`."""

    config: Any
    vocab: int

    @linen.compact
    def __call__(self, x: Array, embedding: Array, deterministic: bool) -> Array:
        x = linen.RMSNorm(name="decoder_norm")(x)
        x = linen.Dropout(0.5, broadcast_dims=(-2,))(x, deterministic=deterministic)
        if self.config.logits_via_embedding:
            return maxtext_logits(x, embedding, None, self.config)
        return linen.Dense(self.vocab, use_bias=False, name="logits_dense")(x)


class MaxTextLinenModel(linen.Module):
    """`TransformerLinen` of `src/maxtext/models/models.py`."""

    config: Any
    mesh: Any
    vocab: int
    hidden: int

    def setup(self) -> None:
        self.token_embedder = linen.Embed(self.vocab, self.hidden)
        self.decoder = MaxTextLinenDecoder(self.config, self.vocab)

    def logits_from_hidden_states_for_vocab_tiling(self, x: Array, deterministic: bool, model_mode: str) -> Array:
        return self.decoder(x, self.token_embedder.embedding, deterministic)


for layer in (Embedder, Einsum, TunixModel, OldTunixModel):
    layer.__module__ = TUNIX_MODEL
