"""Tests the loss on several devices: token_axis_names, vocab_axis_name, and which programs are refused because each
device would compute the whole loss.

The tests need several devices, so they run in a separate process: `host_devices.py`.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_devices import DEVICES, failures_of, run_named
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_problem import gradients, problem, total
from sharded_cases import assert_within_budget, mesh_of, run_sharded, small_head

from jax_pallas.linear_ce import (
    explain,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    linear_log_probs,
    linear_token_loss,
)
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.cases import Case, cases

SPLIT = {"input": P("data"), "linear_weight": P(), "linear_bias": P(), "target": P("data")}
REFUSAL = (
    r"this call is compiled for 4 devices.* jax_pallas\.sharded.* jax\.shard_map.* token_axis_names .*"
    r" vocab_axis_name .* replicated="
)
SEVERAL: dict[str, Any] = {"memory_budget": 2**16}  # bytes, so that there are several chunks


def placed(arrays: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    return {name: jax.device_put(arrays[name], NamedSharding(mesh, SPLIT[name])) for name in SPLIT}


def assert_close(got: Any, want: Any, bound: float = 1e-5) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(array.astype(jnp.float32), np.float64) for array in (mine, theirs))
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def refused(function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(ValueError, match=REFUSAL):
        function(*arguments)


def check_refused(function: str) -> None:
    arrays = placed(problem(48, 8, 300), mesh_of(data=DEVICES))
    refused(jax.jit(partial(total, function, **SEVERAL)), arrays)
    refused(jax.jit(partial(gradients, function, **SEVERAL)), arrays)
    refused(jax.jit(lambda arrays: gradients(function, arrays, **SEVERAL)).lower, arrays)
    got = jax.jit(partial(gradients, function, **SEVERAL, replicated=True))(arrays)
    assert_close(got, gradients(function, problem(48, 8, 300)))


def check_eager_calls() -> None:
    arrays = placed(problem(48, 8, 300), mesh_of(data=DEVICES))
    refused(partial(linear_cross_entropy, **arrays, **SEVERAL))
    refused(partial(linear_log_probs, **arrays, **SEVERAL))
    refused(partial(gradients, "mean", arrays, **SEVERAL))
    one_device = problem(48, 8, 300)
    want = linear_cross_entropy(**one_device, **SEVERAL)
    assert_close(linear_cross_entropy(**arrays, **SEVERAL, replicated=True), want)
    assert_close(linear_cross_entropy(**arrays), want)  # one chunk


def check_other_programs() -> None:
    """vmap, scan, checkpoint, export, saved rows and token losses."""
    mesh = mesh_of(data=DEVICES)
    arrays = placed(problem(48, 8, 300), mesh)
    x, w, y = (arrays[name] for name in ("input", "linear_weight", "target"))

    def loss(x: Array, w: Array, y: Array, **options: Any) -> Array:
        return linear_cross_entropy(x, w, y, **SEVERAL, **options)

    def in_scan(x: Array, w: Array, y: Array) -> Array:
        def step(total: Array, batch: Any) -> tuple[Array, None]:
            x, y = batch
            return total + loss(x, w, y), None

        return jax.lax.scan(step, jnp.zeros(()), (x.reshape(2, 24, 8), y.reshape(2, 24)))[0]

    def of_tokens(x: Array, w: Array, y: Array, **options: Any) -> Array:
        return linear_token_loss(x, w, y, lambda log_prob: -log_prob, **SEVERAL, **options)

    refused(jax.jit(jax.vmap(loss, in_axes=(0, None, 0))), x.reshape(2, 24, 8), w, y.reshape(2, 24))
    refused(jax.jit(in_scan), x, w, y)
    refused(jax.jit(jax.grad(jax.checkpoint(loss))), x, w, y)
    refused(jax.export.export(jax.jit(loss)), x, w, y)
    refused(jax.jit(of_tokens), x, w, y)
    refused(jax.jit(jax.grad(of_tokens, argnums=1)), x, w, y)
    saved = partial(loss, reduction="none", saved_budget=2**20)
    refused(jax.jit(jax.grad(lambda *arrays: saved(*arrays).sum())), x, w, y)
    refused(jax.jit(partial(loss, implementation="pallas_triton")), x, w, y)
    kernels = partial(linear_cross_entropy, implementation="pallas_triton")  # also in one chunk
    refused(jax.jit(kernels), x, w, y)
    few_classes = placed(problem(1000, 8, 20), mesh)  # several chunks of rows, of all classes each
    refused(jax.jit(lambda arrays: linear_cross_entropy(**arrays, memory_budget=2**17)), few_classes)
    # The other axis of the mesh is divided by the compiler.
    one_axis = partial(jax.shard_map, mesh=mesh_of(data=2, other=2), axis_names={"data"})
    data = P("data")
    body = one_axis(lambda x, w, y: jax.lax.psum(loss(x, w, y), "data"), in_specs=(data, P(), data), out_specs=P())
    with pytest.raises(ValueError, match="compiled for 2 devices"):
        jax.jit(body)(*problem_arrays())


def problem_arrays() -> tuple[Array, Array, Array]:
    arrays = problem(48, 8, 300)
    return arrays["input"], arrays["linear_weight"], arrays["target"]


def check_not_refused() -> None:
    """One device, one chunk, and shard_map."""
    x, w, y = problem_arrays()
    want = linear_cross_entropy(x, w, y)
    several = partial(linear_cross_entropy, **SEVERAL)
    assert_close(jax.jit(several)(x, w, y), want)
    assert_close(jax.jit(jax.vmap(several, in_axes=(0, None, 0)))(x[None], w, y[None]), want[None])
    one = mesh_of(data=1)
    body = jax.shard_map(several, mesh=one, in_specs=(P("data"), P(), P("data")), out_specs=P(), check_vma=False)
    assert_close(jax.jit(body)(x, w, y), want)
    arrays = placed(problem(48, 8, 300), mesh_of(data=DEVICES))
    x, w, y = (arrays[name] for name in ("input", "linear_weight", "target"))
    assert_close(jax.jit(linear_cross_entropy)(x, w, y), want)
    kept = jax.jit(linear_cross_entropy).lower(x, w, y).compile().as_text()
    assert kept is not None
    assert "all-gather" not in kept


ROWS: dict[str, Any] = {"lead": (256,), "hidden": 16, "vocab": 300, "has_bias": True, "ignored": "some"}
ROWS |= {"poison": ("ignored_rows",)}
GRPO: dict[str, Any] = {"function": "token_loss", "token_loss": "grpo-k2-entropy"}
TOKEN_CASES = (
    Case(name="mean", dtype="bfloat16", **ROWS, upstream="random"),
    Case(name="sum", dtype="float16", **ROWS, spec=LossSpec("sum", label_smoothing=0.1), token_weight="signed"),
    Case(name="none", dtype="bfloat16", head_dtype="float32", **ROWS, spec=LossSpec("none"), upstream="random"),
    Case(name="class weights", **ROWS, has_class_weight=True, vocab_axis=1, spec=LossSpec(z_loss_weight=0.01)),
    Case(name="normalizer", dtype="float16", **ROWS, normalizer=41.5, spec=LossSpec(softcap=5.0), loss_scale=1024.0),
    Case(name="sum in float32", dtype="bfloat16", **ROWS, grad_into=True),
    Case(name="sum in float32, none", dtype="bfloat16", **ROWS, grad_into=True, spec=LossSpec("none")),
    Case(name="token loss", dtype="float16", **ROWS, **GRPO, token_stats=True),
    Case(name="token loss, none", dtype="bfloat16", **ROWS, **GRPO, spec=LossSpec("none")),
    replace(Case(name="no token", dtype="float16", **ROWS), ignored="all"),
)


def check_tokens(case: Case) -> None:
    """The devices have different numbers of counted tokens, the first one none."""
    arrays = make_arrays(case)
    if case.ignored == "some":
        arrays["target"][:64] = case.spec.ignore_index
    assert_within_budget(case, arrays, run_sharded(case, arrays, mesh_of(data=DEVICES), "chunked"))


def check_two_axes() -> None:
    case = Case(name="two axes", dtype="bfloat16", **ROWS)
    assert_within_budget(case, make_arrays(case), run_sharded(case, make_arrays(case), mesh_of(data=2, host=2)))


def check_token_kernels() -> None:
    case = replace(Case(name="kernels", dtype="bfloat16", **ROWS), hidden=64, vocab=192)
    arrays = make_arrays(case)
    found = run_sharded(case, arrays, mesh_of(data=DEVICES), "pallas_triton", memory_budget=2**20)
    assert_within_budget(case, arrays, found)


def of_tokens(body: Callable[..., Any], out: Any, mesh: Mesh, *others: P) -> Any:
    """Returns body(x, w, y, b, *others) on devices that have different rows."""
    data = P(mesh.axis_names[0])
    return jax.shard_map(body, mesh=mesh, in_specs=(data, P(), data, P(), *others), out_specs=out)


def check_token_programs() -> None:
    """The gradient of the whole program, an eager gradient, and a head that each device has."""
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))
    mesh, head = mesh_of(data=DEVICES), (0, 1, 3)

    def loss(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Array:
        options.setdefault("memory_budget", 2**16)
        return linear_cross_entropy(x, w, y, linear_bias=b, **options)

    want = jax.jit(jax.value_and_grad(loss, head))(*given)
    own = partial(loss, token_axis_names="data")
    grads = (P(), (P("data"), P(), P()))
    assert_close(jax.jit(jax.value_and_grad(of_tokens(own, P(), mesh), head))(*given), want)
    assert_close(of_tokens(jax.value_and_grad(own, head), grads, mesh)(*given), want)

    def each_has_a_head(x: Array, w: Array, y: Array, b: Array) -> Any:
        w = jax.lax.pcast(w, ("data",), to="varying")
        d_w = jax.grad(own, 1)(x, w, y, b)
        return jax.lax.psum(d_w, "data")

    assert_close(jax.jit(of_tokens(each_has_a_head, P(), mesh))(*given), want[1][1])
    # An axis that the call does not name: each device of it has its own loss.
    two = mesh_of(data=2, host=2)
    half = P(("data", "host"))

    def of_host(x: Array, w: Array, y: Array, b: Array) -> Any:
        value, found = jax.value_and_grad(lambda *a: own(*a, reduction="sum"), head)(x, w, y, b)
        return jax.lax.psum(value, "host"), found

    body = jax.shard_map(of_host, mesh=two, in_specs=(half, P(), half, P()), out_specs=(P(), (half, P(), P())))
    whole = jax.jit(jax.value_and_grad(partial(loss, reduction="sum"), head))
    assert_close(jax.jit(body)(*given), whole(*given))


def check_more_token_programs() -> None:
    """An eager call, the gradient of a loss of rows, scan, checkpoint and vmap."""
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))
    mesh, head, grads = mesh_of(data=DEVICES), (0, 1, 3), (P(), (P("data"), P(), P()))

    def own(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Array:
        options |= {"memory_budget": 2**16, "token_axis_names": "data"}
        return linear_cross_entropy(x, w, y, linear_bias=b, **options)

    want = jax.jit(jax.value_and_grad(whole_loss, head))(*given)
    assert_close(of_tokens(own, P(), mesh)(*given), want[0])
    rows = of_tokens(partial(own, reduction="none"), P("data"), mesh)
    assert_close(jax.jit(jax.grad(lambda *a: jax.jit(rows)(*a).mean(), head))(*given), want[1])

    def in_scan(x: Array, w: Array, y: Array, b: Array) -> Any:
        def step(total: Any, batch: Any) -> tuple[Any, Any]:
            value, (d_x, *of_head) = jax.value_and_grad(own, head)(batch[0], w, batch[1], b)
            return jax.tree.map(jnp.add, total, (value, *of_head)), d_x

        start = jnp.zeros(()), jnp.zeros_like(w), jnp.zeros_like(b)
        (value, d_w, d_b), d_x = jax.lax.scan(step, start, (x.reshape(2, 24, 8), y.reshape(2, 24)))
        return jax.tree.map(lambda a: a / 2, (value, (d_x.reshape(48, 8), d_w, d_b)))

    assert_close(jax.jit(of_tokens(in_scan, grads, mesh))(*given), want)
    assert_close(jax.jit(of_tokens(jax.value_and_grad(jax.checkpoint(own), head), grads, mesh))(*given), want)

    def in_vmap(x: Array, w: Array, y: Array, b: Array) -> Array:
        batched = jax.vmap(own, in_axes=(0, None, 0, None))
        return batched(x.reshape(2, 24, 8), w, y.reshape(2, 24), b).mean()

    assert_close(jax.jit(of_tokens(jax.value_and_grad(in_vmap, head), grads, mesh))(*given), want)


def check_closure() -> None:
    """A learned factor of the token loss, which the devices share, and one that each device computes from its rows."""
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))
    mesh, factor = mesh_of(data=DEVICES), jnp.bfloat16(0.7)

    def loss(x: Array, w: Array, y: Array, b: Array, factor: Array, **options: Any) -> Array:
        def token_loss(log_prob: Array) -> Array:
            return jax.nn.softplus(-log_prob) * factor

        return linear_token_loss(x, w, y, token_loss, linear_bias=b, memory_budget=2**16, **options)

    own = partial(loss, token_axis_names="data")
    for options in ({}, {"reduction": "none"}):
        whole = jax.jit(jax.value_and_grad(lambda *a, o=options: loss(*a, **o).sum(), (0, 1, 4)))
        none = bool(options)

        def of_device(*a: Array, o: Any = options, none: bool = none) -> Array:
            found = own(*a, **o).sum()
            return jax.lax.psum(found, "data") if none else found

        found = of_tokens(jax.value_and_grad(of_device, (0, 1, 4)), (P(), (P("data"), P(), P())), mesh, P())
        assert_close(jax.jit(found)(*given, factor), whole(*given, factor), 1e-2 if none else 1e-5)


def check_stats_of_all_tokens() -> None:
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))

    def stats(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Any:
        found = linear_cross_entropy_with_stats(x, w, y, linear_bias=b, z_loss_weight=0.1, ignore_index=3, **options)
        return found[1]

    mesh = mesh_of(data=DEVICES)
    data = P("data")
    own = of_tokens(partial(stats, token_axis_names="data"), type(stats(*given))(data, data, P(), P(), P()), mesh)
    assert_close(jax.jit(own)(*given), stats(*given))


def check_sums_are_float32() -> None:
    """The compiled program sums the gradient of a bfloat16 head in float32."""
    arrays = problem(192, 8, 300, dtype="bfloat16")
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))

    def loss(x: Array, w: Array, y: Array, b: Array) -> Array:
        return linear_cross_entropy(x, w, y, linear_bias=b, memory_budget=2**16, token_axis_names="data")

    body = of_tokens(jax.grad(loss, (1, 3)), (P(), P()), mesh_of(data=DEVICES))
    text = jax.jit(body).lower(*given).as_text()
    sums = [line for line in text.splitlines() if "stablehlo.all_reduce" in line]
    assert len(sums) == 3  # d_weight, d_bias and the number of tokens
    assert "tensor<300x8xbf16>) -> tensor<300x8xbf16>" not in text


def check_token_errors() -> None:
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))
    mesh, data = mesh_of(data=DEVICES), P("data")

    def call(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Array:
        options.setdefault("token_axis_names", "data")
        return linear_cross_entropy(x, w, y, linear_bias=b, **options)

    def raises(message: str, body: Callable[..., Any], error: Any = ValueError) -> None:
        with pytest.raises(error, match=message):
            body(*given)

    raises("token_axis_names must name axes of the mesh of a jax.shard_map around the call, got 'data'", call)
    raises("token_axis_names must name axes", jax.jit(call))
    body = partial(call, token_axis_names=("data", "hosts"))
    raises("got 'hosts', which is none", jax.jit(of_tokens(body, P(), mesh)))
    unchecked = jax.shard_map(call, mesh=mesh, in_specs=(data, P(), data, P()), out_specs=P(), check_vma=False)
    raises("token_axis_names needs jax.shard_map with check_vma=True", jax.jit(unchecked))
    same = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P())
    raises("input must vary over the axis 'data' of token_axis_names", jax.jit(same))

    def own_count(x: Array, w: Array, y: Array, b: Array) -> Array:
        return call(x, w, y, b, normalizer=(y != 3).sum())

    body = jax.jit(of_tokens(own_count, P(), mesh))
    raises("normalizer must not vary over the axis 'data' of token_axis_names", body)
    raises("token_axis_names must be a name of an axis, names or None", partial(call, token_axis_names=3), TypeError)
    raises("replicated must be a bool", partial(call, replicated=1), TypeError)


TIGHT: dict[str, Any] = ROWS | {"lead": (64,), "vocab": 320, "tight_memory": True}
BOTH: dict[str, Any] = ROWS | {"lead": (128,), "vocab": 320}
PADDED = LossSpec("sum", vocab_size=307, softcap=5.0, logit_scale=0.7)
VOCAB_CASES = (
    Case(name="mean", **TIGHT),
    replace(Case(name="padded", dtype="bfloat16", **TIGHT, spec=PADDED), poison=("ignored_rows", "padding")),
    Case(
        name="smoothing",
        dtype="float16",
        **TIGHT,
        has_class_weight=True,
        spec=LossSpec(label_smoothing=0.1, vocab_size=307, z_loss_weight=0.01),
        vocab_axis=1,
    ),
    # The last shard has no class.
    Case(name="none", dtype="bfloat16", head_dtype="float32", **TIGHT, spec=LossSpec("none", vocab_size=200)),
    Case(name="float32 sum", dtype="bfloat16", **TIGHT, grad_into=True, token_weight="signed"),
    Case(name="float32 head", dtype="bfloat16", head_dtype="float32", **TIGHT, spec=LossSpec(head_precision="float32")),
    Case(
        name="log-probabilities", dtype="bfloat16", **TIGHT, function="log_probs", spec=LossSpec("none", vocab_size=307)
    ),
    Case(name="token loss", dtype="bfloat16", **TIGHT, **GRPO, spec=LossSpec("none", vocab_size=307)),
)
BOTH_PART: dict[str, Any] = BOTH | {"lead": (1280,)}
BOTH_CASES = (
    Case(
        name="both", dtype="bfloat16", **BOTH, has_class_weight=True, spec=LossSpec(vocab_size=307), upstream="random"
    ),
    Case(name="both, float32 sum, none", dtype="bfloat16", **BOTH, grad_into=True, spec=LossSpec("none")),
    Case(name="both, token loss", dtype="float16", **BOTH, **GRPO, token_stats=True),
    replace(Case(name="both, out of range", **BOTH, spec=LossSpec("none", vocab_size=307)), poison=("target_range",)),
    # Of 640 rows of a device 512 are saved: d_logits of 160 classes, and d_input.
    Case(
        name="both, part is saved",
        dtype="bfloat16",
        **BOTH_PART,
        spec=LossSpec("none", z_loss_weight=0.01),
        upstream="random",
        saved_budget=4096 + 512 * (32 + 2 * (16 + 192)),
    ),
)


def check_vocab(case: Case, **axes: int) -> None:
    """There are targets in each shard."""
    arrays = make_arrays(case)
    shard = case.vocab // axes["vocab"]
    assert {*range(-(-case.classes // shard))} <= {*(arrays["target"] // shard).tolist()}
    assert_within_budget(case, arrays, run_sharded(case, arrays, mesh_of(**axes), vocab_axis_name="vocab"))


def of_shards(body: Callable[..., Any], out: Any, mesh: Mesh, *others: P) -> Any:
    """Returns body(x, w, y, b, *others) on devices that have different classes."""
    vocab = P("vocab")
    return jax.shard_map(body, mesh=mesh, in_specs=(P(), vocab, P(), vocab, *others), out_specs=out)


def sharded_loss(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Array:
    options = {"memory_budget": 2**15, "vocab_axis_name": "vocab"} | options
    return linear_cross_entropy(x, w, y, linear_bias=b, **options)


def whole_loss(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Array:
    return linear_cross_entropy(x, w, y, linear_bias=b, **options)


def vocab_problem(dtype: str = "float32") -> tuple[Array, Array, Array, Array]:
    arrays = problem(64, 8, 320, dtype=dtype)
    return arrays["input"], arrays["linear_weight"], arrays["target"], arrays["linear_bias"]


def check_same_bits() -> None:
    """Results that are typed as the same on all devices are, bit for bit."""
    given = vocab_problem("bfloat16")

    def of_device(x: Array, w: Array, y: Array, b: Array) -> Any:
        def loss(x: Array) -> Any:
            found = linear_log_probs(x, w, y, linear_bias=b, memory_budget=2**15, vocab_axis_name="vocab")
            return (found.log_prob - found.entropy).sum() + sharded_loss(x, w, y, b), found

        found = jax.value_and_grad(loss, has_aux=True)(x)
        return jax.tree.map(lambda a: jax.lax.pcast(a, ("vocab",), to="varying")[None], found)

    found = jax.jit(of_shards(of_device, P("vocab"), mesh_of(vocab=DEVICES)))(*given)
    for array in jax.tree.leaves(found):
        of_devices = np.asarray(array.astype(jnp.float32))
        assert np.isfinite(of_devices).all()
        assert (of_devices == of_devices[:1]).all()


def check_vocab_programs() -> None:
    """Checkpoint, the gradient of a whole program with vmap, an axis of one device, reduce_dtype."""
    given, mesh, head = vocab_problem(), mesh_of(vocab=DEVICES), (0, 1, 3)
    want, vocab = jax.jit(jax.value_and_grad(whole_loss, head))(*given), P("vocab")
    grads = P(), (P(), vocab, vocab)
    kept = jax.value_and_grad(jax.checkpoint(sharded_loss), head)
    assert_close(jax.jit(of_shards(kept, grads, mesh))(*given), want)
    rows = of_shards(partial(sharded_loss, reduction="none"), P(), mesh)
    assert_close(jax.jit(jax.grad(lambda *a: jax.jit(rows)(*a).mean(), head))(*given), want[1])

    def in_vmap(x: Array, w: Array, y: Array, b: Array) -> Array:
        batched = jax.vmap(partial(sharded_loss), in_axes=(0, None, 0, None))
        return batched(x.reshape(2, 32, 8), w, y.reshape(2, 32), b).mean()

    assert_close(jax.jit(of_shards(jax.value_and_grad(in_vmap, head), grads, mesh))(*given), want)
    one = of_shards(jax.value_and_grad(partial(sharded_loss, vocab_size=307), head), grads, mesh_of(vocab=1))
    classes = (given[0], given[1], given[2] % 307, given[3])
    whole = jax.jit(jax.value_and_grad(partial(whole_loss, vocab_size=307), head))
    assert_close(jax.jit(one)(*classes), whole(*classes))
    short = jax.jit(of_shards(jax.grad(partial(sharded_loss, reduce_dtype=jnp.bfloat16)), P(), mesh))
    assert_close(short(*given), want[1][0], 2**-7)
    text = short.lower(*given).as_text()
    assert re.search(r"\(tensor<16x8xbf16>\) -> tensor<16x8xbf16>", text)


def check_more_vocab_programs() -> None:
    """The gradient of the whole program, an eager call and scan."""
    given, mesh, head = vocab_problem(), mesh_of(vocab=DEVICES), (0, 1, 3)
    want = jax.jit(jax.value_and_grad(whole_loss, head))(*given)
    assert_close(jax.jit(jax.value_and_grad(of_shards(sharded_loss, P(), mesh), head))(*given), want)
    assert_close(of_shards(sharded_loss, P(), mesh)(*given), want[0])

    def in_scan(x: Array, w: Array, y: Array, b: Array) -> Any:
        def step(total: Array, batch: Any) -> tuple[Array, Any]:
            value, d_x = jax.value_and_grad(sharded_loss)(batch[0], w, batch[1], b)
            return total + value / 2, d_x / 2

        value, d_x = jax.lax.scan(step, jnp.zeros(()), (x.reshape(2, 32, 8), y.reshape(2, 32)))
        return value, d_x.reshape(64, 8)

    assert_close(jax.jit(of_shards(in_scan, (P(), P()), mesh))(*given), (want[0], want[1][0]))


def check_eager_gradients() -> None:
    given, head, vocab = vocab_problem(), (0, 1, 3), P("vocab")
    grads = of_shards(jax.value_and_grad(sharded_loss, head), (P(), (P(), vocab, vocab)), mesh_of(vocab=DEVICES))
    assert_close(grads(*given), jax.jit(jax.value_and_grad(whole_loss, head))(*given))


def check_what_shards_exchange() -> None:
    """Sums of some numbers for each row, and of d_input of a chunk in float32: no logits, and no part of the head."""
    given = vocab_problem("bfloat16")
    body = of_shards(jax.value_and_grad(sharded_loss, (0, 1)), (P(), (P(), P("vocab"))), mesh_of(vocab=DEVICES))
    text = jax.jit(body).lower(*given).as_text()
    assert not re.search("all_gather|all_to_all|reduce_scatter|collective_permute", text)
    sums = re.findall(r"all_reduce.*?\}\) : \((tensor<\S+>)\)", text, re.DOTALL)
    assert sorted(sums) == ["tensor<16x8xf32>", "tensor<4x4x16xf32>"]

    def saved(x: Array, w: Array, y: Array, b: Array) -> Any:
        options = {"reduction": "none", "saved_budget": 2**20, "memory_budget": 2**18}
        losses, pull_back = jax.vjp(lambda x, w: sharded_loss(x, w, y, b, **options), x, w)
        return losses, pull_back(losses)

    text = jax.jit(of_shards(saved, (P(), (P(), P("vocab"))), mesh_of(vocab=DEVICES))).lower(*given).as_text()
    assert text.count("all_reduce") == 2  # of the forward pass
    assert text.count("dot_general") == 3


def check_vocab_errors() -> None:
    given, mesh, vocab = vocab_problem(), mesh_of(vocab=DEVICES), P("vocab")

    def raises(message: str, body: Callable[..., Any], error: Any = ValueError) -> None:
        with pytest.raises(error, match=message):
            jax.jit(body).lower(*given)  # eagerly, each operation would be compiled

    def refused_call(message: str, **options: Any) -> None:
        raises(message, of_shards(partial(sharded_loss, **options), P(), mesh))

    raises("vocab_axis_name must name axes of the mesh of a jax.shard_map around the call", sharded_loss)
    unchecked = jax.shard_map(
        sharded_loss, mesh=mesh, in_specs=(P(), vocab, P(), vocab), out_specs=P(), check_vma=False
    )
    raises("vocab_axis_name needs jax.shard_map with check_vma=True", unchecked)
    for index, name in enumerate(("input", "linear_weight", "target", "linear_bias")):
        specs = [P(), vocab, P(), vocab]
        specs[index] = P() if specs[index] == vocab else vocab
        message = f"{name} must {'vary' if specs[index] == P() else 'not vary'} over the axis 'vocab'"
        if name in ("linear_weight", "linear_bias"):
            body = jax.shard_map(sharded_loss, mesh=mesh, in_specs=tuple(specs), out_specs=P())
            whole = (given[0], given[1][:80], given[2], given[3][:80])
            part = tuple(w if spec == P() else g for g, w, spec in zip(given, whole, specs, strict=True))
            with pytest.raises(ValueError, match=message):
                jax.jit(body).lower(*part)
            continue
        varied = [lambda a: a] * 4
        varied[index] = lambda a: jax.lax.pcast(a, ("vocab",), to="varying")
        raises(
            message, of_shards(lambda *a, v=varied: sharded_loss(*(f(x) for f, x in zip(v, a, strict=True))), P(), mesh)
        )
    refused_call(
        "implementation 'pallas_triton' cannot serve this call: the kernels take no shard of the vocabulary",
        implementation="pallas_triton",
    )
    refused_call("batch_invariant=True needs the kernels, got implementation 'chunked'", batch_invariant=True)
    refused_call("vocab_size must not exceed linear_weight's 320 rows, got 321", vocab_size=321)
    refused_call(
        r"weight must have shape \(320,\) \(a number for each class of linear_weight, padding included\), got \(80,\)",
        weight=jnp.ones(80),
    )
    refused_call("input must vary over the axis 'vocab' of token_axis_names", token_axis_names="vocab")
    refused_call("reduce_dtype must be one of 'float32', 'bfloat16', got 'float16'", reduce_dtype=jnp.float16)
    refused_call("reduce_dtype must be one of 'float32', 'bfloat16', got 'bf16'", reduce_dtype="bf16")
    raises("reduce_dtype must be float32 without", partial(whole_loss, reduce_dtype=jnp.bfloat16))
    raises(
        "vocab_axis_name must be a name of an axis, names or None", partial(whole_loss, vocab_axis_name=0), TypeError
    )

    def token_loss(x: Array, w: Array, y: Array, b: Array) -> Array:
        own = w.sum()
        return linear_token_loss(x, w, y, lambda log_prob: log_prob * own, vocab_axis_name="vocab")

    raises("array 0 that token_loss closes over must not vary over the axis 'vocab'", of_shards(token_loss, P(), mesh))
    explained = explain(given[0], given[1][:80], vocab_axis_name="vocab", vocab_size=307)
    assert (explained.name, explained.reason) == ("chunked", "no kernel for cpu devices")


MESHES: tuple[dict[str, int], ...] = ({"vocab": 4}, {"data": 2, "vocab": 2}, {"data": 4})


def check_every_case(part: int) -> None:
    """A third of the cases of the parity table, each on another mesh."""
    failed: list[str] = []
    for index, case in enumerate(cases()):
        axes = MESHES[0] if case.function == "log_probs" else MESHES[index % len(MESHES)]
        if index % len(MESHES) != part:
            continue
        spec = case.spec if case.spec.vocab_size is None else replace(case.spec, vocab_size=307)
        rows = 64 * (DEVICES // axes.get("vocab", 1))
        small = replace(case, lead=(rows,), **small_head(case), spec=spec, tight_memory="data" not in axes)
        options: dict[str, Any] = {"vocab_axis_name": "vocab"} if "vocab" in axes else {}
        if case.logit_std > 8:
            # Small chunks of the forward pass have other shapes than those of the backward pass, and XLA's matmuls of
            # other shapes round logits of 80 differently.
            options["memory_budget"] = 2**20
        arrays = make_arrays(small)
        try:
            assert_within_budget(small, arrays, run_sharded(small, arrays, mesh_of(**axes), "chunked", **options))
        except Exception as error:  # one failing case must not hide the others
            failed.append(f"{case.name} on {axes}: {error}"[:300])
    assert not failed, "\n".join(failed)


CHECKS: dict[str, Callable[[], None]] = {
    **{f"refused, {function}": partial(check_refused, function) for function in ("mean", "none", "log_probs")},
    "refused, eager": check_eager_calls,
    "refused, other programs": check_other_programs,
    "not refused": check_not_refused,
    **{f"tokens, {case.name}": partial(check_tokens, case) for case in TOKEN_CASES},
    "tokens, two axes": check_two_axes,
    "tokens, kernels": check_token_kernels,
    "tokens, programs": check_token_programs,
    "tokens, more programs": check_more_token_programs,
    "tokens, closure": check_closure,
    "tokens, stats": check_stats_of_all_tokens,
    "tokens, float32": check_sums_are_float32,
    "tokens, errors": check_token_errors,
    **{f"vocabulary, {case.name}": partial(check_vocab, case, vocab=DEVICES) for case in VOCAB_CASES},
    **{case.name: partial(check_vocab, case, data=2, vocab=2) for case in BOTH_CASES},
    "vocabulary, bits": check_same_bits,
    "vocabulary, programs": check_vocab_programs,
    "vocabulary, more programs": check_more_vocab_programs,
    "vocabulary, eager gradients": check_eager_gradients,
    "vocabulary, exchange": check_what_shards_exchange,
    "vocabulary, errors": check_vocab_errors,
    **{f"every case, {part}": partial(check_every_case, part) for part in range(len(MESHES))},
}


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """The failures of the selected tests' CHECKS on several devices."""
    return failures_of(request)


SLOW = (
    "refused, log_probs",
    # Cases of a vocabulary that is divided too, and test_jax_pallas_sharded.py, have the same function and options.
    "tokens, sum in float32",
    "tokens, token loss",
    "tokens, token loss, none",
    # A closure on arrays of global shape is one of tokens that are divided.
    "tokens, closure",
    "tokens, none",
    "vocabulary, mean",
    "vocabulary, log-probabilities",
    # Both axes have these functions.
    "vocabulary, token loss",
    # A mean is refused by the same line.
    "refused, none",
    # test_jax_pallas_sharded.py runs the kernels on tokens that are divided.
    "tokens, kernels",
    # The other programs of tokens and those of a vocabulary have each transformation once.
    "tokens, more programs",
    "vocabulary, more programs",
    # Tokens that are divided: an eager gradient is among their programs.
    "vocabulary, eager gradients",
    # test_jax_pallas_sharded.py has these options of tokens that are divided.
    "tokens, sum in float32, none",
    "tokens, sum",
    # The other programs are refused by the same line as a mean.
    "refused, eager",
    # Both axes are divided in the cases of saved rows, and test_jax_pallas_sharded.py has float32 heads and sums.
    "both, float32 sum, none",
    # Both axes have a float32 sum, and a vocabulary that is not padded has smoothing.
    "vocabulary, float32 sum",
    *(f"every case, {part}" for part in range(len(MESHES))),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CHECKS]
)
def test_on_several_devices(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


if __name__ == "__main__":
    run_named(CHECKS)
