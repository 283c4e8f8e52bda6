"""Compares losses and gradients of installed hosts with and without the adapters of `jax_pallas.hosts`.

    python tests/jax_hosts.py tunix [MODEL...]      small models of tunix, and 20 steps of `PeftTrainer`
    python tests/jax_hosts.py maxtext [OPTION=VALUE...]  small models of MaxText, with options of its configuration

It prints the largest error of a gradient, relative to the largest element of its array. The tests use modules with the
hosts' interfaces instead (`jax_host_stand_ins.py`).
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.linen import logical_axis_rules
from jax import Array

sys.path.insert(0, str(Path(__file__).parent.parent))

MODELS = ("gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3")
VOCAB, LENGTH = 64, 8
TOKENS = jax.random.randint(jax.random.key(1), (2, LENGTH), 1, VOCAB)
BATCH = {
    "input_tokens": TOKENS,
    "input_mask": jnp.arange(LENGTH) > jnp.array([[3], [-1]]),
    "positions": jnp.tile(jnp.arange(LENGTH), (2, 1)),
    "attention_mask": jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None].repeat(2, 0),
}


def worst(expected: Any, found: Any) -> float:
    """Returns the largest error of an array, relative to its largest element."""

    def error(one: Array, other: Array) -> float:
        if not one.size or not jnp.issubdtype(one.dtype, jnp.floating):
            return 0.0
        return float(jnp.abs(one - other).max() / (jnp.abs(one).max() + 1e-9))

    return max(jax.tree.leaves(jax.tree.map(error, expected, found)))


def tunix_model(name: str, tied: bool) -> Any:
    """Returns a small model of tunix."""
    module = importlib.import_module(f"tunix.models.{name}.model")
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "vocab_size": VOCAB,
        "num_embed": VOCAB,
        "embed_dim": 32,
        "hidden_dim": 32,
        "num_heads": 2,
    }
    sizes |= {"head_dim": 16, "num_kv_heads": 1, "rope_theta": 10000, "norm_eps": 1e-6, "sliding_window_size": LENGTH}
    sizes |= {"use_tied_embedding": tied, "weight_tying": tied, "final_logit_softcap": 5.0}
    sizes |= {"dtype": jnp.float32, "param_dtype": jnp.float32, "use_post_attn_norm": False, "use_post_ffw_norm": False}
    if hasattr(module, "AttentionType"):
        sizes["attention_types"] = (module.AttentionType.GLOBAL,)
    fields = {field.name for field in dataclasses.fields(module.ModelConfig)}
    config = module.ModelConfig(**{key: value for key, value in sizes.items() if key in fields})
    model = next(getattr(module, key) for key in (name.capitalize(), "Transformer") if hasattr(module, key))
    return model(config, rngs=nnx.Rngs(0))


def loss_of(output: Any) -> Array:
    return output.primary_loss.compute() if hasattr(output, "primary_loss") else output


def tunix(*names: str) -> None:
    from jax_pallas.hosts.tunix import loss_fn, patch

    peft_trainer, common = (importlib.import_module(f"tunix.{name}") for name in ("sft.peft_trainer", "rl.common"))
    for name in names or MODELS:
        for tied in (False, True):
            model = tunix_model(name, tied)

            def step(loss: Callable[..., Any], model: Any = model) -> Any:
                value, gradients = nnx.jit(nnx.value_and_grad(lambda model: loss_of(loss(model, **BATCH))))(model)
                return value, nnx.to_pure_dict(gradients)

            try:
                found = step(loss_fn())
            except TypeError as error:
                print(f"{name}: {error}")
                break
            print(f"{name}, tied {tied}: loss_fn {worst(step(peft_trainer._default_loss_fn), found):.1e}", end="")
            if hasattr(common, "compute_chunked_logps"):
                graph, state = nnx.split(model)

                def log_probs(graph: Any = graph, state: Any = state) -> Any:
                    def total(state: Any) -> Array:
                        options = {"stop_gradient": False, "return_entropy": True, "temperature": 0.7, "chunk_size": 2}
                        tokens = TOKENS[:, :4], TOKENS[:, 4:]
                        found = common.compute_per_token_logps(graph, state, *tokens, 0, 1, **options)
                        return jnp.sum(jnp.sin(jnp.stack(found)))

                    return jax.value_and_grad(total)(state)

                expected = log_probs()
                with patch():
                    print(f", patch {worst(expected, log_probs()):.1e}", end="")
            print()
    compare_training(peft_trainer, loss_fn())


def compare_training(peft_trainer: Any, ours: Callable[..., Any]) -> None:
    """Trains for 20 steps with the default loss of tunix and with ours, and compares the losses of the steps."""
    curves: list[Any] = []
    for loss in (peft_trainer._default_loss_fn, ours):
        config = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=20)
        trainer = peft_trainer.PeftTrainer(tunix_model("qwen3", True), optax.adamw(1e-2), config)
        trainer.with_loss_fn(loss).with_gen_model_input_fn(lambda batch: batch).train([BATCH] * 20)
        curves.append(np.array(trainer.metrics_logger.get_metric_history("", "loss", "train")))
    assert len(curves[0]) == len(curves[1]) == 20
    difference = np.abs(curves[1] / curves[0] - 1).max()
    print(f"20 steps of PeftTrainer: losses {curves[0][0]:.4f} to {curves[0][-1]:.4f}, difference {difference:.1e}")


def maxtext(*options: str) -> None:
    package = importlib.import_module("maxtext")
    modules = ("configs.pyconfig", "utils.maxtext_utils", "utils.maxtext_utils_nnx", "utils.model_creation_utils")
    pyconfig, utils, utils_nnx, creation = (importlib.import_module(f"maxtext.{name}") for name in modules)
    train = importlib.import_module("maxtext.trainers.pre_train.train")
    from jax_pallas.hosts.maxtext import patch

    arguments = [None, str(Path(package.__file__ or "").parent / "configs" / "base.yml"), *options]
    fixed: dict[str, Any] = {
        "run_name": "hosts",
        "enable_checkpointing": False,
        "max_target_length": 32,
        "per_device_batch_size": 1,
    }
    fixed |= {"base_num_decoder_layers": 0, "base_emb_dim": 32, "vocab_size": 128, "dtype": "float32"}
    fixed |= {"matmul_precision": "highest", "num_vocab_tiling": 4, "z_loss_multiplier": 1e-2}
    for tied in (False, True):
        cap = 5.0 if tied else 0.0
        config = pyconfig.initialize(arguments, logits_via_embedding=tied, final_logits_soft_cap=cap, **fixed)
        mesh = utils.get_mesh_from_config(config)
        shape = jax.device_count(), 32
        hidden = jax.random.normal(jax.random.key(0), (*shape, 32))
        target = jax.random.randint(jax.random.key(1), shape, 0, 128)
        data = {"targets": target, "targets_segmentation": jnp.arange(32) % 5 * jnp.ones((shape[0], 1), int)}
        explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
        with logical_axis_rules(config.logical_axis_rules), jax.set_mesh(mesh) if explicit else mesh:
            rngs = utils_nnx.create_nnx_rngs(config)
            model = creation.from_config(config, mesh=mesh, rngs=rngs, model_mode="train")
            graph, state, rest = nnx.split(model, nnx.Param, ...)

            def run(
                graph: Any = graph, state: Any = state, rest: Any = rest, call: Any = (hidden, data, config)
            ) -> Any:
                def losses(state: Any, x: Array) -> Any:
                    return train.vocab_tiling_nnx_loss(nnx.merge(graph, state, rest, copy=True), x, *call[1:], True)

                gradients = jax.jit(jax.grad(lambda state, x: losses(state, x)[0], (0, 1)))(state, call[0])
                return jax.jit(losses)(state, call[0]), gradients

            expected = run()
            with patch():
                print(f"tied {tied}, {mesh.size} devices: {worst(expected, run()):.1e}")


if __name__ == "__main__":
    {"tunix": tunix, "maxtext": maxtext}[sys.argv[1]](*sys.argv[2:])
