"""Compares installed JAX hosts with and without the adapters of `jax_pallas.hosts`.

    python tests/jax_hosts.py tunix [MODEL...]      small models of tunix, and 20 steps of `PeftTrainer`
    python tests/jax_hosts.py maxtext [OPTION=VALUE...]  small models of MaxText, with options of its configuration
    python tests/jax_hosts.py levanter              the losses of its kernels

Each prints JSON objects, one per line, for `test_hosts_jax_released.py`. "difference" is the largest error of an array,
relative to its largest element: of the loss and its gradients, or of the losses of 20 steps. "refused" is the error of
a model that the adapter does not support. "interface" says what differs between a host and the modules with its
interface (`jax_host_stand_ins.py`), which other tests use.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jax_host_stand_ins as stand_ins
import numpy as np
import optax
from flax import nnx
from flax.linen import logical_axis_rules
from jax import Array
from page_code import programs_of

sys.path.insert(0, str(Path(__file__).parent.parent))

MODELS = ("gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3")
VOCAB, LENGTH = 64, 8
# JAX would compile a program for each of these arrays, and `jax.random` two large ones.
TOKENS = jax.device_put(np.random.default_rng(1).integers(1, VOCAB, (2, LENGTH), np.int32))
BATCH = {
    "input_tokens": TOKENS,
    "input_mask": jax.device_put(np.arange(LENGTH) > np.array([[3], [-1]])),
    "positions": jax.device_put(np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))),
    "attention_mask": jax.device_put(np.tril(np.ones((LENGTH, LENGTH), bool))[None].repeat(2, 0)),
}


STEPS = 20


def show(name: str, **values: Any) -> None:
    print(json.dumps({"name": name, **values}), flush=True)


def losses_of_steps(loss: Callable[[Any], Array], parameters: Any) -> np.ndarray:
    """Returns the losses of 20 steps of Adam."""
    optimizer = optax.adam(1e-2)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    losses = []
    for _ in range(STEPS):
        parameters, state, value = step(parameters, state)
        losses.append(value)
    return np.array(losses)


def show_steps(name: str, expected: Any, found: Any) -> None:
    """Prints how the losses of the same steps differ, and the first and the last one."""
    assert len(expected) == len(found) == STEPS
    losses = [float(expected[0]), float(expected[-1])]
    show(name, difference=float(np.abs(np.asarray(found) / np.asarray(expected) - 1).max()), losses=losses)


def arguments_of(function: Any) -> list[Any]:
    """Returns the names, kinds and defaults of a function's arguments."""
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind.name, "none" if one.default is one.empty else repr(one.default)) for one in parameters]


def show_interface(name: str, modules: list[ModuleType], functions: list[tuple[str, str]]) -> None:
    """Prints what differs between functions of a host and of the modules with its interface.

    Args:
        modules: those with its interface.
        functions: the names of their modules, and their own.
    """
    of_tests = {module.__name__: module for module in modules}
    differences = []
    for module, function in functions:
        real, ours = (arguments_of(getattr(one, function)) for one in (sys.modules[module], of_tests[module]))
        if real != ours:
            differences.append(f"{module}.{function} has {real}, not {ours}")
    show(f"{name} interface", interface=differences)


def run_page(host: str) -> int:
    """Runs the programs of docs/hosts_jax.md that import a host. Returns their number."""
    page = Path(__file__).parents[1] / "docs" / "hosts_jax.md"
    codes = [code for code in programs_of(page) if f"from {host}" in code]
    for code in codes:
        exec(compile(code, str(page), "exec"), {})
    return len(codes)


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
    from jax_pallas.hosts.tunix import loss_fn, patch, unpatch

    peft_trainer, common = (importlib.import_module(f"tunix.{name}") for name in ("sft.peft_trainer", "rl.common"))
    for name in names or MODELS:
        for tied in (False, True):
            model = tunix_model(name, tied)

            def step(loss: Callable[..., Any], model: Any = model) -> Any:
                value, gradients = nnx.jit(nnx.value_and_grad(lambda model: loss_of(loss(model, **BATCH))))(model)
                return value, nnx.to_pure_dict(gradients)

            row = f"tunix {name}, tied {tied}"
            try:
                found = step(loss_fn())
            except TypeError as error:
                show(row, refused=str(error))
                continue
            show(row, difference=worst(step(peft_trainer._default_loss_fn), found))
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
                    show(f"{row}, patch", difference=worst(expected, log_probs()))
    try:
        patch()
        unpatch()
    except ImportError as error:
        show("tunix patch", refused=str(error))
    modules = stand_ins.tunix("0.1.8" if hasattr(common, "compute_chunked_logps") else "0.1.7")
    show_interface("tunix", modules, [("tunix.sft.peft_trainer", "_default_loss_fn")])
    compare_training(peft_trainer, loss_fn())
    show("tunix page", programs=run_page("tunix"))


def compare_training(peft_trainer: Any, ours: Callable[..., Any]) -> None:
    """Trains for 20 steps with the default loss of tunix and with ours, and compares the losses of the steps."""
    curves: list[Any] = []
    for loss in (None, ours):
        config = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=STEPS)
        trainer = peft_trainer.PeftTrainer(tunix_model("qwen3", True), optax.adamw(1e-2), config)
        if loss is not None:
            trainer = trainer.with_loss_fn(loss)
        trainer.with_gen_model_input_fn(lambda batch: batch).train([BATCH] * STEPS)
        curves.append(np.array(trainer.metrics_logger.get_metric_history("", "loss", "train")))
    show_steps("tunix steps", *curves)


def context_of(mesh: Any) -> Any:
    """Returns the context in which MaxText's functions use a mesh."""
    return jax.set_mesh(mesh) if jax.sharding.AxisType.Explicit in mesh.axis_types else mesh


def maxtext(*options: str) -> None:
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # without packages of Google Cloud
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
        with logical_axis_rules(config.logical_axis_rules), context_of(mesh):
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
                show(f"maxtext tied {tied}", devices=mesh.size, difference=worst(expected, run()))

    version, kinds = ("0.2.4", ("nnx", "linen")) if hasattr(train, "vocab_tiling_linen_loss") else ("0.2.5", ("nnx",))
    functions = [("maxtext.utils.vocabulary_tiling", f"vocab_tiling_{kind}_loss") for kind in kinds]
    show_interface("maxtext", stand_ins.maxtext(version), functions)
    settings = pyconfig.initialize(arguments, **fixed)
    missing = [name for name in vars(stand_ins.MaxTextConfig()) if not hasattr(settings, name)]
    show("maxtext config", interface=missing)
    layer = {"base_num_decoder_layers": 1, "base_mlp_dim": 32, "base_num_query_heads": 2, "base_num_kv_heads": 2}
    layer |= {"head_dim": 16, "attention": "dot_product", "enable_dropout": False, "scan_layers": False}

    def curve(tiles: int) -> np.ndarray:
        """Returns the losses of 20 steps with the loss function of MaxText's training."""
        config = pyconfig.initialize(arguments, **{**fixed, **layer, "num_vocab_tiling": tiles})
        mesh = utils.get_mesh_from_config(config)
        tokens = jax.random.randint(jax.random.key(1), (jax.device_count(), 33), 0, 128)
        ones, positions = jnp.ones_like(tokens[:, 1:]), jnp.arange(32) * jnp.ones_like(tokens[:, 1:])
        data = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        for name in data.copy():
            data |= {f"{name}_position": positions, f"{name}_segmentation": ones}
        with logical_axis_rules(config.logical_axis_rules), context_of(mesh):
            rngs = utils_nnx.create_nnx_rngs(config)
            model = creation.from_config(config, mesh=mesh, rngs=rngs, model_mode="train")
            graph, state, rest = nnx.split(model, nnx.Param, ...)

            def loss(state: Any) -> Array:
                merged = nnx.merge(graph, state, rest, copy=True)
                return train.loss_fn(merged, config, data.copy(), None, None, is_train=True)[0]

            return losses_of_steps(loss, state)

    expected = curve(1)  # without tiles: see docs/hosts_jax.md about the gradients of tiles in 0.2.4
    with patch():
        show_steps("maxtext steps", expected, curve(4))
    show("maxtext page", programs=run_page("maxtext"))


def import_levanter() -> Any:
    """Returns the module of levanter's losses, without the rest of it, which needs an older optax than flax_models.

    Block sizes are not measured here, so there is no cache of them.
    """
    found = importlib.util.find_spec("levanter")
    assert found is not None
    hashes = ("combined_content_hash", "directory_content_hash", "file_content_hash", "workspace_lock_hash")
    parts: dict[str, dict[str, Any]] = {
        "levanter": {"__path__": found.submodule_search_locations},
        "levanter.utils": {},
        "levanter.utils.jax_utils": {"multihost_allgather_sync": None},
        "finestore": {},
        "finestore.cache": {"PersistentKvCache": mock.MagicMock()},
        "rigging": {},
        "rigging.cache": dict.fromkeys(hashes),
    }
    sys.modules.update({name: stand_ins.module(name, **contents) for name, contents in parts.items()})
    return importlib.import_module(stand_ins.LEVANTER_API)


def levanter() -> None:
    api = import_levanter()
    from jax_pallas.hosts import levanter as adapter

    name = "fused_cross_entropy_loss_and_logsumexp_penalty"
    x, w = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(((96, 32), (32, VOCAB))))
    target = jax.random.randint(jax.random.key(2), (96,), 0, VOCAB)
    weight = jnp.arange(96) % 3 + 0.5

    def loss(x: Array, w: Array, **more: Any) -> Any:
        fixed = {"weight": weight, "logsumexp_weight": 0.1, "logit_soft_cap": 5.0}
        return getattr(api, name)(x, target, w, **fixed, **more)

    def results() -> Any:
        largest = loss(x, w, reduction=None, return_argmax=True)[1].astype(jnp.float32)
        return jax.value_and_grad(loss, (0, 1))(x, w), largest

    def curve() -> np.ndarray:
        def of_model(parameters: Any) -> Array:
            return loss(jnp.tanh(parameters["embedding"][target] @ parameters["layer"]), parameters["head"])

        shapes = {"embedding": (VOCAB, 32), "layer": (32, 32), "head": (32, VOCAB)}
        keys = jax.random.split(jax.random.key(3), len(shapes))
        arrays = zip(keys, shapes.items(), strict=True)
        return losses_of_steps(of_model, {name: jax.random.normal(key, shape) for key, (name, shape) in arrays})

    expected, steps = results(), curve()
    adapter.register()
    show("levanter", implementations=list(api.IMPLEMENTATIONS), difference=worst(expected, results()))
    show_steps("levanter steps", steps, curve())
    show("levanter page", programs=run_page("jax_pallas.hosts import levanter"))
    adapter.unregister()
    show("levanter default", implementations=list(api._default_implementations()))
    show_interface("levanter", stand_ins.levanter(), [(stand_ins.LEVANTER_API, name)])


if __name__ == "__main__":
    {"tunix": tunix, "maxtext": maxtext, "levanter": levanter}[sys.argv[1]](*sys.argv[2:])
