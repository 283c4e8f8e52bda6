"""Tests the loss of arrays of global shape: `jax_pallas.sharded`, and plain functions on arrays of explicit axes; and
what devices gather that divide tokens and classes, within `jax.shard_map`.

The tests need several devices, so they run in a separate process: `host_devices.py`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_devices import failures_in, failures_of, run_named
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_problem import problem
from sharded_cases import assert_within_budget, mesh_of, run_global, run_sharded, small_head

import jax_pallas
from jax_pallas import sharded
from jax_pallas.linear_ce import linear_cross_entropy
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.cases import Case, cases

SHARDED = SimpleNamespace(**vars(sharded), token_losses=jax_pallas.token_losses)


class Form(NamedTuple):
    """A way to run a case: on which mesh, and how the arrays are divided."""

    axes: dict[str, int]
    rows: P
    head: P  # of the classes and of D
    explicit: bool = False
    gather: str | None = None

    def run(self, case: Case, arrays: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
        mesh = mesh_of(AxisType.Explicit if self.explicit else AxisType.Auto, **self.axes)
        options |= {"rows": self.rows, "head": self.head, "gather": self.gather}
        if self.explicit:
            return run_global(case, arrays, mesh, package=jax_pallas, **options)
        names = {"batch_axis_names": "data", "vocab_axis_name": "vocab", "fsdp_axis_name": "fsdp"}
        options |= {argument: name for argument, name in names.items() if name in self.axes}
        return run_global(case, arrays, mesh, package=SHARDED, **options)


DATA, FSDP, NONE = P("data"), P("fsdp"), P(None, None)
BATCH_AND_FSDP = P(("data", "fsdp"))
FORMS = {
    "batch": Form({"data": 4}, DATA, NONE),
    "vocabulary": Form({"vocab": 4}, P(None), P("vocab", None)),
    "batch and vocabulary": Form({"data": 2, "vocab": 2}, DATA, P("vocab", None)),
    "fsdp, tokens": Form({"fsdp": 4}, FSDP, P("fsdp", None), gather="tokens"),
    "fsdp, head": Form({"fsdp": 4}, FSDP, P("fsdp", None), gather="head"),
    "fsdp on D": Form({"fsdp": 4}, FSDP, P(None, "fsdp"), gather="head"),
    "batch and fsdp, head": Form({"data": 2, "fsdp": 2}, BATCH_AND_FSDP, P("fsdp", None), gather="head"),
    "batch and fsdp, tokens": Form({"data": 2, "fsdp": 2}, BATCH_AND_FSDP, P("fsdp", None), gather="tokens"),
    "vocabulary and fsdp, head": Form({"vocab": 2, "fsdp": 2}, FSDP, P(("vocab", "fsdp"), None), gather="head"),
    "vocabulary and fsdp, tokens": Form({"vocab": 2, "fsdp": 2}, FSDP, P(("vocab", "fsdp"), None), gather="tokens"),
    "explicit, batch": Form({"data": 4}, DATA, NONE, True),
    "explicit, fsdp": Form({"fsdp": 4}, FSDP, P("fsdp", None), True, "tokens"),
    "explicit, fsdp on D": Form({"fsdp": 4}, FSDP, P(None, "fsdp"), True, "head"),
    "explicit, both": Form({"vocab": 2, "fsdp": 2}, FSDP, P("vocab", "fsdp"), True, "head"),
}

ROWS: dict[str, Any] = {"lead": (256,), "hidden": 16, "vocab": 320, "has_bias": True, "ignored": "some"}
ROWS |= {"poison": ("ignored_rows",)}
GRPO: dict[str, Any] = {"function": "token_loss", "token_loss": "grpo-k2-entropy"}
CASES = {
    case.name: case
    for case in (
        Case(name="mean", dtype="bfloat16", **ROWS, has_class_weight=True, spec=LossSpec(vocab_size=307)),
        Case(
            name="smoothing",
            dtype="float16",
            **ROWS,
            vocab_axis=1,
            with_stats=True,
            spec=LossSpec("sum", label_smoothing=0.1, z_loss_weight=0.01, softcap=5.0),
            token_weight="signed",
        ),
        Case(name="none", dtype="bfloat16", head_dtype="float32", **ROWS, spec=LossSpec("none", vocab_size=200)),
        Case(name="normalizer", dtype="float16", **ROWS, normalizer=41.5, loss_scale=1024.0, with_stats=True),
        Case(name="float32 sum", dtype="bfloat16", **ROWS, grad_into=True),
        Case(name="float32 sum, none", dtype="bfloat16", **ROWS, grad_into=True, spec=LossSpec("none")),
        Case(name="log-probabilities", dtype="bfloat16", **ROWS, function="log_probs", spec=LossSpec("none")),
        Case(
            name="saved",
            dtype="bfloat16",
            **ROWS,
            spec=LossSpec("none", vocab_size=307, z_loss_weight=0.01),
            upstream="random",
            saved_budget=2**24,
            vocab_axis=1,
        ),
        Case(
            name="saved, entropy",
            dtype="bfloat16",
            **ROWS,
            function="log_probs",
            spec=LossSpec("none"),
            saved_budget=2**24,
        ),
        Case(name="token loss", dtype="bfloat16", **ROWS, **GRPO, token_stats=True),
        Case(name="token loss, none", dtype="float16", **ROWS, **GRPO, spec=LossSpec("none"), vocab_axis=1),
    )
}
# Each form runs some cases, and each case some forms.
QUICK = {
    "batch": ("float32 sum", "log-probabilities"),
    "vocabulary": ("smoothing", "float32 sum, none", "saved, entropy"),
    "batch and vocabulary": ("token loss", "mean"),
    "fsdp, tokens": ("smoothing", "log-probabilities", "float32 sum", "normalizer"),
    "fsdp, head": ("mean", "token loss", "float32 sum, none"),
    "fsdp on D": ("normalizer",),
    "batch and fsdp, head": ("float32 sum", "smoothing", "log-probabilities"),
    "batch and fsdp, tokens": ("float32 sum, none", "token loss, none", "saved"),
    "vocabulary and fsdp, head": ("none", "token loss, none", "saved"),
    "vocabulary and fsdp, tokens": ("mean", "token loss"),
    "explicit, batch": ("token loss, none",),
    "explicit, fsdp": ("none", "token loss"),
    "explicit, fsdp on D": ("float32 sum", "smoothing"),
    "explicit, both": ("log-probabilities",),
}


def of_size(form: Form, case: Case) -> Case:
    """Returns a case of a size with which `small_budget` finds several chunks."""
    spec = case.spec if case.spec.vocab_size is None else replace(case.spec, vocab_size=min(case.spec.vocab_size, 307))
    # A vocabulary that is divided among devices with the same tokens is added up in the dtype of the head.
    tight = form.rows == P(None)
    return replace(case, lead=(64 if tight else 256,), **small_head(case), spec=spec, tight_memory=tight)


def check_form(form: Form, case: Case) -> None:
    case = of_size(form, case)
    arrays = make_arrays(case)
    assert_within_budget(case, arrays, form.run(case, arrays))


def check_every_case(form: Form) -> None:
    """All cases of the parity table."""
    failed: list[str] = []
    for case in cases():
        small = of_size(form, case)
        # Small chunks of the forward pass have other shapes than those of the backward pass, and XLA's matmuls of other
        # shapes round logits of 80 differently.
        options: dict[str, Any] = {"memory_budget": 2**20} if case.logit_std > 8 else {}
        # So do logits of 40 in a call of all 256 tokens, and in float32 in chunks of 64. A logit scale of 0 makes their
        # losses equal, and the smallest chunks round the sums of classes all the same way, also on one device. These
        # are at least three chunks, of 128 tokens in float32.
        if form.gather == "tokens" and (case.logit_std == 8 or case.spec.logit_scale == 0):
            lead, budget = (768, 2**18) if case.dtype == "float32" else (512, 2**17)
            small, options = replace(small, lead=(lead,)), {"memory_budget": budget}
        # The smallest budget has no memory for a float32 sum of d_weight. These have, with at least three chunks.
        if form.gather == "tokens" and case.saved_budget:
            lead, budget = (512, 120_000) if "data" in form.axes else (384, 190_000)
            small, options = replace(small, lead=(lead,)), {"memory_budget": budget}
        arrays = make_arrays(small)
        try:
            assert_within_budget(small, arrays, form.run(small, arrays, **options))
        except Exception as error:  # one failing case must not hide the others
            failed.append(f"{case.name}: {type(error).__name__} {error}"[:300])
    assert not failed, "\n".join(failed)


def check_kernels() -> None:
    """The kernels on a head that is gathered."""
    case = replace(CASES["mean"], has_class_weight=False, spec=LossSpec(), hidden=64, vocab=256)
    arrays, options = make_arrays(case), {"implementation": "pallas_triton", "memory_budget": 2**20}
    assert_within_budget(case, arrays, FORMS["fsdp, head"].run(case, arrays, **options))


def check_within_shard_map(gather: Any, **axes: int) -> None:
    """`gather`, or the rule, with the axes of the caller's `jax.shard_map`."""
    for name in ("float32 sum, none", "smoothing"):
        case, arrays = CASES[name], make_arrays(CASES[name])
        names = tuple(axis for axis in ("vocab", "fsdp") if axis in axes)
        budget = {} if gather else {"memory_budget": 2**17}
        found = run_sharded(case, arrays, mesh_of(**axes), "chunked", gather=gather, vocab_axis_name=names, **budget)
        assert_within_budget(case, arrays, found)


SEVERAL: dict[str, Any] = {"memory_budget": 2**16}  # bytes, so that there are several chunks
AXES = {"batch_axis_names": "data", "fsdp_axis_name": "fsdp"}


def given(dtype: Any = "float32") -> tuple[Array, Array, Array, Array]:
    arrays = problem(192, 8, 320, dtype=dtype)
    return arrays["input"], arrays["linear_weight"], arrays["target"], arrays["linear_bias"]


def whole_loss(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Any:
    return linear_cross_entropy(x, w, y, linear_bias=b, **options)


def sharded_loss(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Any:
    return sharded.linear_cross_entropy(x, w, y, linear_bias=b, **SEVERAL | options)


def assert_close(got: Any, want: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(array, np.float64) for array in (mine, theirs))
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


HEAD = (0, 1, 3)


def check_programs() -> None:
    """An eager call, the mesh of the context, two axes of tokens, and no token."""
    mesh, arrays = mesh_of(data=2, fsdp=2), given()
    want = jax.jit(jax.value_and_grad(whole_loss, HEAD))(*arrays)
    loss = partial(sharded_loss, mesh=mesh, **AXES)
    assert_close(loss(*arrays), want[0])
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(partial(sharded_loss, **AXES), HEAD))
        assert_close(compiled(*arrays), want)
        x, w, y, b = arrays
        nothing = compiled(x, w, jnp.full_like(y, -100), b)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nothing))
    two = partial(sharded_loss, mesh=mesh_of(data=2, context=2), batch_axis_names=P("data", "context"))
    value, (d_x, *of_head) = jax.jit(jax.value_and_grad(two, HEAD))(x.reshape(4, 48, 8), w, y.reshape(4, 48), b)
    assert_close((value, (d_x.reshape(192, 8), *of_head)), want)


def check_transformed_programs() -> None:
    """Scan, checkpoint, vmap, and an empty batch."""
    mesh, arrays = mesh_of(data=2, fsdp=2), given()
    want = jax.jit(jax.value_and_grad(whole_loss, HEAD))(*arrays)
    loss = partial(sharded_loss, mesh=mesh, **AXES)
    assert_close(jax.jit(jax.value_and_grad(jax.checkpoint(loss), HEAD))(*arrays), want)
    x, w, y, b = arrays
    batches = x.reshape(2, 96, 8), y.reshape(2, 96)

    def in_scan(x: Array, w: Array, y: Array, b: Array) -> Array:
        def step(total: Array, batch: Any) -> tuple[Array, None]:
            return total + jax.checkpoint(loss)(batch[0], w, batch[1], b) / 2, None

        return jax.lax.scan(step, jnp.zeros(()), (x, y))[0]

    def in_vmap(x: Array, w: Array, y: Array, b: Array) -> Array:
        return jax.vmap(loss, in_axes=(0, None, 0, None))(x, w, y, b).mean()

    for function in (in_scan, in_vmap):
        value, (d_x, *of_head) = jax.jit(jax.value_and_grad(function, HEAD))(batches[0], w, batches[1], b)
        assert_close((value, (d_x.reshape(192, 8), *of_head)), want)

    def of_tokens(x: Array, w: Array, y: Array) -> Array:
        axes = {"mesh": mesh, "gather": "tokens", **AXES}
        return sharded.linear_log_probs(x, w, y, **axes).log_prob.sum()

    rows = batches[0], w, batches[1]  # only traced
    traced = jax.eval_shape(jax.grad(lambda *rows: jax.vmap(of_tokens, (0, None, 0))(*rows).sum(), (0, 1)), *rows)
    assert [one.shape for one in traced] == [one.shape for one in rows[:2]]
    empty = jax.jit(jax.value_and_grad(loss, HEAD))(x[:0], w, y[:0], b)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(empty))


def check_eager_gradients() -> None:
    loss = partial(sharded_loss, mesh=mesh_of(data=2, fsdp=2), **AXES)
    want = jax.jit(jax.value_and_grad(whole_loss, HEAD))(*given())
    assert_close(jax.value_and_grad(loss, HEAD)(*given()), want)


def check_sums(gather: str, **axes: int) -> None:
    """The sum of grad_into is grad_into, of the size of the gradient, plus the gradient of all tokens."""
    x, w, y, b = given()
    into = jnp.linspace(-1.0, 2.0, w.size).reshape(w.shape) / 100
    loss = partial(sharded_loss, mesh=mesh_of(**axes), gather=gather, fsdp_axis_name="fsdp")
    if "data" in axes:
        loss = partial(loss, batch_axis_names="data")
    want = into + jax.jit(jax.grad(whole_loss, 1))(x, w, y, b)
    assert_close(jax.jit(loss)(x, w, y, b, grad_into=into)[1], want)

    def of_rows(x: Array, into: Array) -> Array:
        return loss(x, w, y, b, grad_into=into, reduction="none").mean()

    assert_close(jax.jit(jax.grad(of_rows, 1))(x, into), want)


def check_closure() -> None:
    """A token loss that closes over numbers that are traced, also on explicit axes."""
    x, w, y, _ = given()

    def loss(run: Any, factor: Array, x: Array, w: Array, y: Array) -> Array:
        scale, sign = jnp.sin(factor), jnp.int32(factor * 10)
        return run(x, w, y, lambda log_prob: -log_prob * scale * (sign > 0), **SEVERAL)

    factor = jnp.float32(0.7)
    whole = partial(loss, jax_pallas.linear_token_loss)
    want = jax.jit(jax.value_and_grad(whole, (0, 1, 2)))(factor, x, w, y)
    divided = partial(sharded.linear_token_loss, mesh=mesh_of(data=2, fsdp=2), **AXES)
    for gather in ("tokens", "head"):
        function = jax.value_and_grad(partial(loss, partial(divided, gather=gather)), (0, 1, 2))
        assert_close(jax.jit(function)(factor, x, w, y), want)
    mesh = mesh_of(AxisType.Explicit, fsdp=4)
    with jax.set_mesh(mesh):
        placed = jax.device_put((x, w, y), NamedSharding(mesh, FSDP))
        function = jax.value_and_grad(partial(loss, jax_pallas.linear_token_loss), (0, 1, 2))
        assert_close(jax.jit(function)(factor, *placed), want)


def check_explicit_axes() -> None:
    """The gradients have the types of the arrays, also without `jax.set_mesh`; V that the devices do not divide."""
    x, w, y, b = given()
    mesh = mesh_of(AxisType.Explicit, data=2, model=2)
    specs = P("data", "model"), P("model", "data"), P("data"), P("model")
    placed = tuple(
        jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip((x, w, y, b), specs, strict=True)
    )
    step = jax.jit(jax.value_and_grad(partial(whole_loss, **SEVERAL), HEAD))
    got = step(*placed)
    assert_close(got, jax.jit(jax.value_and_grad(whole_loss, HEAD))(x, w, y, b))
    assert [array.sharding.spec for array in got[1]] == [specs[0], specs[1], specs[3]]
    gathered = jax.jit(partial(whole_loss, **SEVERAL, token_axis_names=None, gather="head"))
    assert_close(gathered(*placed), got[0])
    with jax.set_mesh(mesh):  # names of explicit axes, over which the arrays are not divided like this
        named = partial(sharded_loss, batch_axis_names="model", vocab_axis_name="data")
        assert_close(jax.jit(jax.value_and_grad(named, HEAD))(*placed), got)
    # Each device has rows of 8 of a head of 322 classes, which 4 do not divide.
    w = jax.device_put(jnp.pad(w, ((0, 2), (0, 0))), NamedSharding(mesh, P("model", "data")))
    b = jnp.pad(b, (0, 2))
    got = jax.jit(partial(whole_loss, **SEVERAL, vocab_size=320))(placed[0], w, placed[2], b)
    assert_close(got, jax.jit(whole_loss)(*given()))


def collectives(function: Callable[..., Any], *arrays: Array) -> list[str]:
    """Returns the collectives of a program with the types of their operands, sorted."""
    text = jax.jit(function).lower(*arrays).as_text()
    found = re.findall(
        r'"?stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)"?\(.*?'
        r"\((tensor<\S+>)\) -> tensor",
        text,
        re.DOTALL,
    )
    return sorted(f"{kind} {operand}" for kind, operand in found)


def check_what_devices_exchange() -> None:
    """The head is gathered once, in its dtype, and its gradient is reduce-scattered in float32; or tokens are gathered,
    and no part of the head is exchanged."""
    arrays = given("bfloat16")
    mesh = mesh_of(fsdp=4)

    def train(gather: str, **options: Any) -> Any:
        loss = partial(sharded_loss, mesh=mesh, fsdp_axis_name="fsdp", gather=gather, **options)
        return jax.value_and_grad(lambda x, w, y, b: loss(x, w, y, b).sum(), (0, 1))

    count, loss = "all_reduce tensor<i32>", "all_reduce tensor<f32>"
    gathers = ["all_gather tensor<80x8xbf16>", "all_gather tensor<80xbf16>"]
    assert collectives(train("head"), *arrays) == sorted([*gathers, loss, count, "reduce_scatter tensor<320x8xf32>"])
    # Between the passes of reduction "none" the gathered head is kept.
    found = collectives(train("head", reduction="none"), *arrays)
    assert found.count(gathers[0]) == 1
    assert found.count("reduce_scatter tensor<320x8xf32>") == 1
    found = collectives(train("tokens"), *arrays)
    assert [one for one in found if "gather" in one or "scatter" in one] == [
        "all_gather tensor<48x8xbf16>",
        "all_gather tensor<48xf32>",
        "all_gather tensor<48xi32>",
    ]
    assert not [one for one in found if "320" in one or "80x8" in one]


def check_rule() -> None:
    """Tokens are gathered if all devices have fewer of them than there are classes."""
    x, w, y, b = given("bfloat16")
    train = partial(sharded_loss, mesh=mesh_of(fsdp=4), fsdp_axis_name="fsdp", memory_budget=2**18)
    assert "all_gather tensor<48x8xbf16>" in collectives(train, x, w, y, b)
    many = [jnp.concatenate([array] * 2) for array in (x, y)]
    assert "all_gather tensor<80x8xbf16>" in collectives(train, many[0], w, many[1], b)


def check_errors() -> None:
    x, w, y, _ = given()
    mesh = mesh_of(data=2, fsdp=2)

    def raises(message: str, error: Any = ValueError, arrays: Any = (x, w, y), **options: Any) -> None:
        options.setdefault("mesh", mesh)
        with pytest.raises(error, match=message):
            sharded.linear_cross_entropy(*arrays, **options)

    raises("mesh must be given where no jax.set_mesh sets one", mesh=None)
    raises("mesh must be a Mesh, an AbstractMesh or None, got tuple", TypeError, mesh=(2, 2))
    raises(r"must name axes of the mesh, \('data', 'fsdp'\), .* got 'model'", batch_axis_names="model")
    raises(
        "vocab_axis_name and fsdp_axis_name must name different axes", batch_axis_names="data", vocab_axis_name="data"
    )
    raises("gather must be None without fsdp_axis_name, got 'head'", batch_axis_names="data", gather="head")
    raises('gather must be "tokens", "head" or None, got \'all\'', gather="all", **AXES)
    raises("fsdp_axis_name must be a name of an axis, names or None, got 3", TypeError, fsdp_axis_name=3)
    raises("sharded.linear_cross_entropy has no argument replicated", TypeError, replicated=True)
    raises("got an unexpected keyword argument 'reductions'", TypeError, reductions="mean")
    odd = x[:190], w, y[:190]
    raises(r"target, \(190,\), must be divisible by the 4 devices of the axes \('data', 'fsdp'\)", arrays=odd, **AXES)
    odd = x, w[:319], y
    raises("linear_weight's 319 classes must be divisible by the 2 devices .* vocab_size=319", arrays=odd, **AXES)
    raises(r"target must have shape \(192,\)", arrays=(x, w, y[:96]), **AXES)
    raises("linear_weight must be an array, got list", TypeError, arrays=(x, [w], y), **AXES)
    raises(
        r"batch_axis_names and fsdp_axis_name must divide axes of target, \(192,\)", batch_axis_names=P(None, "data")
    )
    raises("reduction must be one of", reduction="all", batch_axis_names="data")
    raises("memory_budget must be at least .* bytes for 96 tokens", memory_budget=10, batch_axis_names="data")

    def inside(x: Array, w: Array, y: Array) -> Array:
        return sharded.linear_cross_entropy(x, w, y, batch_axis_names="data")

    body = jax.shard_map(inside, mesh=mesh, in_specs=(DATA, P(), DATA), out_specs=P())
    with pytest.raises(ValueError, match=r"which no jax\.shard_map around the call maps, got 'data'"):
        body(x, w, y)

    def refused(message: str, specs: Any, **options: Any) -> None:
        def call(x: Array, w: Array, y: Array) -> Array:
            return linear_cross_entropy(x, w, y, **options)

        with pytest.raises(ValueError, match=message):
            jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P())).lower(x, w, y)

    divided, both = (FSDP, FSDP, FSDP), ("fsdp", "data")
    refused("gather must be None without vocab_axis_name, got 'head'", divided, gather="head")
    shared = P(), FSDP, P()
    refused(
        "gather must be None where .* have the same tokens, got 'head'", shared, gather="head", vocab_axis_name="fsdp"
    )
    refused("input must not vary over the axis 'fsdp' .* pass gather=", divided, vocab_axis_name="fsdp")
    replicated = FSDP, P(), FSDP
    refused("linear_weight must vary over the axis 'fsdp'", replicated, vocab_axis_name="fsdp", gather="tokens")
    refused(
        r"vocab_axis_name must end in the axes \('fsdp',\)",
        (FSDP, P(("fsdp", "data")), FSDP),
        vocab_axis_name=both,
        gather="head",
    )
    kernels = {"vocab_axis_name": "fsdp", "implementation": "pallas_triton"}
    refused("the kernels take no shard of the vocabulary", divided, **kernels, gather="tokens")


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{form}: {name}": partial(check_form, FORMS[form], CASES[name])
        for form, names in QUICK.items()
        for name in names
    },
    "kernels": check_kernels,
    "shard_map, tokens": partial(check_within_shard_map, "tokens", vocab=2, fsdp=2),
    "shard_map, head": partial(check_within_shard_map, "head", data=2, fsdp=2),
    "shard_map, rule": partial(check_within_shard_map, None, fsdp=4),
    "programs": check_programs,
    "transformed programs": check_transformed_programs,
    "eager gradients": check_eager_gradients,
    "sums, tokens": partial(check_sums, "tokens", data=2, fsdp=2),
    "sums, head": partial(check_sums, "head", fsdp=4),
    "closure": check_closure,
    "explicit axes": check_explicit_axes,
    "exchange": check_what_devices_exchange,
    "rule": check_rule,
    "errors": check_errors,
}
EVERY_CASE = {f"every case, {name}": partial(check_every_case, form) for name, form in FORMS.items()}


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """The failures of the selected tests' CHECKS on several devices."""
    return failures_of(request)


# Each axis, each case and each way in which devices gather remains, but not every pair.
SLOW = (
    "batch: log-probabilities",
    "batch and vocabulary: token loss",
    "fsdp, tokens: smoothing",
    "batch and fsdp, head: smoothing",
    "batch and fsdp, head: log-probabilities",
    "vocabulary and fsdp, head: token loss, none",
    "vocabulary and fsdp, tokens: token loss",
    "explicit, fsdp: token loss",
    "explicit, fsdp on D: smoothing",
    "vocabulary: float32 sum, none",
    "fsdp, tokens: float32 sum",
    "fsdp, head: mean",
    "fsdp, head: float32 sum, none",
    "vocabulary and fsdp, head: none",
    # Meshes of two dimensions have these axes too, and closures on each kind of arrays are token losses.
    "batch: float32 sum",
    "fsdp, head: token loss",
    "fsdp on D: normalizer",
    "explicit, batch: token loss, none",
    # test_jax_pallas_shard_rows.py gathers either within jax.shard_map.
    "shard_map, tokens",
    "shard_map, head",
    # "rule" has arrays of global shape, whose calls run within jax.shard_map.
    "shard_map, rule",
    # "sums" has float32 sums of each kind of loss.
    "batch and fsdp, head: float32 sum",
    "batch and fsdp, tokens: float32 sum, none",
    # test_jax_pallas_scale.py has these within jax.shard_map. "explicit axes" has the mesh of the context.
    "programs",
    "transformed programs",
    "eager gradients",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CHECKS]
)
def test_on_several_devices(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


@pytest.mark.parametrize("gather", ["tokens", "head"])
def test_a_mesh_of_one_device(gather: str) -> None:
    """As of a program for several devices that is tried on one."""
    case, options = CASES["log-probabilities"], {"gather": gather, "vocab_axis_name": "fsdp", "memory_budget": 2**17}
    arrays = make_arrays(case)
    assert_within_budget(case, arrays, run_sharded(case, arrays, mesh_of(fsdp=1), "chunked", **options))


def test_no_tokens_on_a_mesh() -> None:
    """The results of each token vary over the axis as those of a call with tokens do, so the same upstream gradient
    fits. The program is only traced."""
    options: dict[str, Any] = {"token_axis_names": "fsdp", "vocab_axis_name": "fsdp", "gather": "tokens"}

    def loss(log_prob: Array) -> Array:
        return -log_prob

    def results(x: Array, w: Array, y: Array) -> tuple[Array, ...]:
        losses = linear_cross_entropy(x, w, y, reduction="none", **options)
        of_function, stats = jax_pallas.linear_token_loss_with_stats(x, w, y, loss, reduction="none", **options)
        return losses, of_function, *jax_pallas.linear_log_probs(x, w, y, **options), stats.entropy

    def body(x: Array, w: Array, y: Array, upstream: Array) -> Any:
        found, pull_back = jax.vjp(lambda x, w: results(x, w, y), x, w)
        into = jax.lax.pcast(jnp.zeros(w.shape), "fsdp", to="varying")
        _, total = linear_cross_entropy(x, w, y, grad_into=into, **options)
        return *pull_back((upstream,) * len(found)), total

    rows = P("fsdp")
    step = jax.shard_map(body, mesh=mesh_of(fsdp=1), in_specs=(rows,) * 4, out_specs=(rows,) * 3)
    for tokens in (0, 3):
        x, upstream = jnp.ones((tokens, 8)), jnp.ones(tokens)
        d_x, d_w, _ = jax.eval_shape(step, x, jnp.ones((16, 8)), jnp.zeros(tokens, int), upstream)
        assert (d_x.shape, d_w.shape) == ((tokens, 8), (16, 8))


@pytest.mark.parametrize(
    ("given", "name"), [(2**32 + 1, "int64"), (2**63, "uint64"), (-5, "int64"), (-(2**40), "int64")]
)
def test_targets_of_the_host_are_not_wrapped_to_32_bits(given: int, name: str) -> None:
    """JAX would make a class of 2**32 + 1. The last one is ignore_index."""
    x, w, target = jnp.ones((4, 3)), jnp.ones((5, 3)), np.zeros(4, name)
    target[1] = given
    arrays: Any = x, w, target
    options: dict[str, Any] = {} if given > -(2**31) else {"ignore_index": given}
    mesh = mesh_of(AxisType.Explicit, data=1)
    found = [
        linear_cross_entropy(*arrays, reduction="none", **options),
        sharded.linear_cross_entropy(*arrays, reduction="none", mesh=mesh, batch_axis_names="data", **options),
    ]
    placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        found.append(linear_cross_entropy(placed, w, target, reduction="none", **options))
    want = np.full(4, np.log(5))
    want[1] = 0 if options else np.nan
    for one in found:
        np.testing.assert_allclose(np.asarray(one), want, rtol=1e-6)


def test_numbers_of_the_host_on_a_mesh() -> None:
    """A normalizer of NumPy is checked. One token has no axis that devices could divide."""
    arrays: Any = jnp.ones((4, 3)), jnp.ones((5, 3)), jnp.zeros(4, int)
    options: dict[str, Any] = {"mesh": mesh_of(data=1), "vocab_axis_name": "data"}
    with pytest.raises(ValueError, match=r"normalizer must be finite and not negative, got -1\.0"):
        sharded.linear_cross_entropy(*arrays, normalizer=np.asarray(-1.0), **options)
    one = jnp.ones(3), arrays[1], jnp.int32(2)
    np.testing.assert_allclose(np.asarray(sharded.linear_cross_entropy(*one, **options)), np.log(5), rtol=1e-6)


def test_gradients_of_two_programs_do_not_disturb_each_other() -> None:
    """JAX keeps the jaxpr of a jitted function that both use, and one of them needs other gradients."""
    x, w, y = jnp.ones((4, 3)), jnp.ones((5, 3)), jnp.zeros(4, int)
    options: dict[str, Any] = {"mesh": mesh_of(data=1), "batch_axis_names": "data"}

    def lowered(arguments: tuple[int, ...], *, within_jit: bool) -> None:
        def loss(x: Array, w: Array) -> Array:
            return sharded.linear_cross_entropy(x, w, y, **options)

        function = jax.jit(loss) if within_jit else loss
        jax.eval_shape(jax.grad(lambda x, w: function(x, w), argnums=arguments), x, w)

    for arguments in ((0, 1), (1,), (0, 1)):
        lowered(arguments, within_jit=False)
    lowered((0, 1), within_jit=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EVERY_CASE)
def test_every_case(name: str) -> None:
    """In a process for each form, because one takes minutes."""
    failures = failures_in(Path(__file__), [name])
    assert name not in failures, failures[name]


@pytest.mark.slow
def test_the_example_trains_on_four_devices() -> None:
    """Its losses are the same on every grid of devices."""
    root = Path(__file__).parent.parent
    options: dict[str, Any] = {"cwd": root, "capture_output": True, "text": True, "check": False}
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    found = []
    for tensor in ("1", "2", "4"):
        command = [sys.executable, "examples/mesh.py", "--steps", "20", "--tensor", tensor]
        done = subprocess.run(command, env=environment, **options)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append([float(line.split()[-1]) for line in done.stdout.splitlines()])
    first, last = found[0]
    assert abs(first - 6.24) < 0.1
    assert last < 5.0
    assert found == [found[0]] * 3


if __name__ == "__main__":
    run_named(CHECKS | EVERY_CASE)
