"""Tests the loss by three matmuls where devices divide the vocabulary, with the kernels of Pallas' Triton backend in
its interpreter: `jax_pallas/shard_rows.py`; and where they divide the tokens too: `jax_pallas/token_slices.py`, and
`jax_head_checks.py` for a gathered head.

The tests need several devices, so they run in a separate process: `host_devices.py`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import least_budget
from compiling import kernels_of_zeros
from host_devices import failures_of, run_named
from jax.sharding import PartitionSpec as P
from jax_head_checks import HEAD_CHECKS
from sharded_cases import assert_within_budget, mesh_of, run_sharded

from jax_pallas import head_rows, vocab_shard
from jax_pallas.devices import Devices
from jax_pallas.launch import device_info
from jax_pallas.linear_ce import explain, linear_cross_entropy, linear_log_probs, linear_token_loss_with_stats
from jax_pallas.plan import MatrixLayout, PlanKey, make_plan
from jax_pallas.primitives import varying
from jax_pallas.problem import float32_matmul
from jax_pallas.row_kernels import leaves_range
from jax_pallas.slicing import over_chunks
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.cases import Case

pytestmark = pytest.mark.timeout(900)  # one process runs all cases
SHARDS = 2
KERNELS: dict[str, Any] = {"implementation": "pallas_triton", "vocab_axis_name": "vocab"}
ROWS: dict[str, Any] = {"lead": (96,), "hidden": 32, "vocab": 256, "dtype": "bfloat16", "has_bias": True}
ROWS |= {"ignored": "some", "poison": ("ignored_rows",), "tight_memory": True}
PADDED: dict[str, Any] = ROWS | {"poison": ("ignored_rows", "padding")}
TARGETS = ("target_range",)
LOG_PROBS: dict[str, Any] = {"function": "log_probs", "unused": ("entropy", "lse")}
CAPPED = LossSpec("none", softcap=5.0, logit_scale=0.7, z_loss_weight=0.01)
POLICY: dict[str, Any] = {"function": "token_loss", "token_loss": "ppo_clip", "token_stats": True}
CASES = (
    Case(name="class weights", **ROWS, has_class_weight=True, token_weight="signed", spec=LossSpec("sum")),
    Case(name="token loss", **ROWS, **POLICY, logit_std=40.0),
    Case(name="mean", **ROWS),
    Case(name="softcap, none", **ROWS, spec=CAPPED, upstream="random", vocab_axis=1),
    Case(name="far logits", **ROWS, logit_std=60.0, spec=LossSpec("none"), upstream="random"),
    Case(name="log-probabilities", **ROWS, **LOG_PROBS, spec=LossSpec("none")),
    Case(name="token loss, none", **ROWS, **POLICY, spec=LossSpec("none")),
    replace(Case(name="no token", **ROWS), ignored="all"),
    Case(name="frozen head", **ROWS, frozen=("linear_weight", "linear_bias"), spec=LossSpec("none")),
    Case(name="padded", **PADDED, has_class_weight=True, spec=LossSpec(vocab_size=201), logit_std=8.0),
    Case(name="padded, softcap", **PADDED, spec=replace(CAPPED, vocab_size=129), vocab_axis=1),
    Case(name="padded, token loss", **PADDED, **POLICY, spec=LossSpec(vocab_size=201), logit_std=40.0),
    # The last shard has no class.
    Case(name="padded, log-probabilities", **PADDED, **LOG_PROBS, spec=LossSpec("none", vocab_size=90)),
    replace(Case(name="padded, out of range", **PADDED, spec=LossSpec("none", vocab_size=100)), poison=TARGETS),
    replace(Case(name="out of range", **ROWS, spec=LossSpec("none")), poison=TARGETS),
)
IN_FLOAT16 = ("class weights", "token loss", "softcap, none", "far logits", "log-probabilities", "no token")
IN_FLOAT16 += ("frozen head", "padded, log-probabilities", "padded, token loss", "out of range")
CASES += tuple(
    replace(case, name=f"float16, {case.name}", dtype="float16") for case in CASES if case.name in IN_FLOAT16
)
# 256 classes on a device. For less there is no smoothing, and float16 estimates the lse of a row from all of them. Some
# rows of large logits are shifted, and some computed again.
MORE: dict[str, Any] = {"vocab": 512}
SHIFTED: dict[str, Any] = PADDED | MORE | {"dtype": "float16", "logit_std": 40.0}
CASES += (
    Case(name="float16, padded", **SHIFTED, spec=LossSpec(vocab_size=401)),
    Case(name="float16, shifted, token loss", **SHIFTED, **POLICY, spec=LossSpec(vocab_size=401)),
)
CASES += (
    Case(
        name="smoothing",
        **ROWS | MORE,
        has_class_weight=True,
        token_weight="signed",
        spec=LossSpec("sum", label_smoothing=0.1),
    ),
    Case(
        name="smoothing, none",
        **ROWS | MORE,
        spec=LossSpec("none", label_smoothing=0.2, logit_scale=0.7, z_loss_weight=0.01),
        upstream="random",
        vocab_axis=1,
    ),
    Case(
        name="smoothing, padded",
        **PADDED | MORE,
        spec=LossSpec(label_smoothing=0.3, vocab_size=401),
    ),
    Case(
        name="smoothing, padded, class weights",
        **PADDED | MORE,
        has_class_weight=True,
        spec=LossSpec(label_smoothing=0.1, vocab_size=401),
        logit_std=40.0,
    ),
    # The last shard has no class.
    Case(name="smoothing, one shard", **PADDED | MORE, spec=LossSpec(label_smoothing=0.1, vocab_size=256)),
    Case(
        name="smoothing, frozen head",
        **ROWS | MORE,
        frozen=("linear_weight", "linear_bias"),
        spec=LossSpec("none", label_smoothing=0.1),
    ),
)
# Rows that are saved for the backward pass.
SAVED: dict[str, Any] = {"upstream": "random", "saved_budget": 2**24}
WEIGHTED: dict[str, Any] = ROWS | SAVED | {"has_class_weight": True, "token_weight": "signed"}
CASES += (
    Case(name="saved", **WEIGHTED, spec=replace(CAPPED, softcap=None)),
    Case(name="saved, padded", **PADDED | SAVED, spec=replace(CAPPED, vocab_size=201), logit_std=8.0, vocab_axis=1),
    Case(name="saved, one shard", **PADDED | SAVED, spec=LossSpec("none", vocab_size=90)),
    Case(name="saved, far logits", **ROWS | SAVED, logit_std=60.0, spec=LossSpec("none")),
    Case(name="saved, log-probabilities", **ROWS | SAVED, **LOG_PROBS, spec=LossSpec("none")),
    Case(name="saved, frozen input", **ROWS | SAVED, frozen=("input",), spec=LossSpec("none")),
    replace(Case(name="saved, out of range", **ROWS | SAVED, spec=LossSpec("none")), poison=TARGETS),
)
CASES += tuple(
    replace(case, name=f"float16, {case.name}", dtype="float16", upstream="wide")
    for case in CASES
    if case.saved_budget and case.name != "saved, frozen input"
)
# Of 640 rows 512 are saved: the exponentials of a device's 128 classes, and d_input.
PART: dict[str, Any] = {"lead": (640,), "saved_budget": 4096 + 512 * (32 + 2 * (32 + 128))}
CASES += (Case(name="saved, part", **WEIGHTED | PART, spec=LossSpec("none")),)
# A float32 head that is split, or rounded.
IN_FLOAT32 = ("mean", "token loss", "softcap, none", "far logits", "no token", "frozen head", "padded")
IN_FLOAT32 += ("padded, softcap", "padded, log-probabilities", "smoothing", "smoothing, padded", "out of range")
IN_FLOAT32 += ("padded, token loss",)


ROUNDED = ("softcap, none", "far logits", "token loss", "padded", "padded, log-probabilities", "smoothing, padded")


def float32_heads(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Returns the cases of IN_FLOAT32 with a float32 head that is split, and those of ROUNDED with one that is not."""
    found = [replace(case, head_dtype="float32") for case in cases if case.name in {*IN_FLOAT32, *ROUNDED}]
    split = (
        replace(case, name=f"split head, {case.name}", spec=replace(case.spec, head_precision="float32"))
        for case in found
        if case.name in IN_FLOAT32
    )
    rounded = (replace(case, name=f"rounded head, {case.name}") for case in found if case.name in ROUNDED)
    return (*split, *rounded)


CASES += float32_heads(CASES)
# Padding, token losses and float32 heads run in the quick suite, where one case has several of them. Saved rows and a
# gathered head have class weights, and devices that divide the tokens too have batch_invariant in bfloat16 and the same
# bits on devices with the same tokens.
QUICK = ("float16, shifted, token loss", "confident", "errors")
QUICK += ("invariant, sums", "saved, exchange", "float16, saved, confident")
# Devices that divide the tokens. They have chunks of 48, 48 and 18 rows. At the end they gather 57 rows of each device
# in two pieces, which overlap.
SIZES: dict[str, Any] = {"lead": (114,), "hidden": 64}
TOKENS, TOKENS_PADDED = ROWS | SIZES, PADDED | SIZES
TOKEN_CASES = (
    Case(name="mean", **TOKENS, has_class_weight=True),
    Case(name="token loss", **TOKENS, **POLICY, logit_std=40.0),
    Case(name="signed weights", **TOKENS, token_weight="signed", spec=LossSpec("sum")),
    Case(name="softcap, none", **TOKENS, spec=CAPPED, upstream="random", vocab_axis=1),
    Case(name="far logits", **TOKENS, logit_std=60.0, spec=LossSpec("none"), upstream="random"),
    Case(name="log-probabilities", **TOKENS, **LOG_PROBS, spec=LossSpec("none")),
    replace(Case(name="no token", **TOKENS), ignored="all"),
    Case(name="frozen head", **TOKENS, frozen=("linear_weight", "linear_bias"), spec=LossSpec("none")),
    Case(name="frozen input", **TOKENS, frozen=("input",)),
    Case(name="saved", **TOKENS | SAVED, spec=LossSpec("none")),
    Case(name="padded", **TOKENS_PADDED, spec=LossSpec(vocab_size=201), logit_std=8.0, with_stats=True),
    Case(name="padded, token loss", **TOKENS_PADDED, **POLICY, spec=LossSpec(vocab_size=201), logit_std=40.0),
    replace(Case(name="out of range", **TOKENS, spec=LossSpec("none")), poison=TARGETS),
)
MOST: dict[str, Any] = TOKENS | {"vocab": 1024}  # 256 on each of four
TOKEN_CASES += (
    Case(  # with less smoothing, an error of its terms would be within the budget of d_weight
        name="smoothing",
        **TOKENS | MORE,
        has_class_weight=True,
        token_weight="signed",
        spec=LossSpec("sum", label_smoothing=0.3),
    ),
    Case(
        name="smoothing, none",
        **MOST,
        spec=LossSpec("none", label_smoothing=0.2),
        upstream="random",
    ),
    Case(name="smoothing, padded", **TOKENS_PADDED | MORE, spec=LossSpec("sum", label_smoothing=0.3, vocab_size=401)),
)
IN_FLOAT16 = ("mean", "token loss", "signed weights", "softcap, none", "far logits", "log-probabilities", "no token")
IN_FLOAT16 += ("frozen head", "frozen input", "out of range")
TOKEN_CASES += tuple(
    replace(case, name=f"float16, {case.name}", dtype="float16") for case in TOKEN_CASES if case.name in IN_FLOAT16
)
OF_SAMPLE: dict[str, Any] = SHIFTED | SIZES
TOKEN_CASES += (
    Case(name="float16, padded", **OF_SAMPLE, has_class_weight=True, spec=LossSpec(vocab_size=401)),
    Case(name="float16, padded, none", **OF_SAMPLE, spec=LossSpec("none", vocab_size=401), upstream="random"),
)
TOKEN_CASES += float32_heads(TOKEN_CASES)
QUICK_TOKENS = (
    # One case has a split head, smoothing and padding. Devices with the same tokens have a padded token loss.
    "tokens, split head, smoothing, padded",
    "tokens, exchange",
    "tokens, small probabilities",
    "tokens, invariant, chunks",
)
EVERY_DAY = {*QUICK, *QUICK_TOKENS, "head, parts", "head, two chunks"}


def budget_of(case: Case) -> int:
    """Returns a memory budget with which a call has three chunks of rows."""
    w = (case.vocab // SHARDS, case.hidden)[:: 1 - 2 * case.vocab_axis]
    x = jax.ShapeDtypeStruct((case.n, case.hidden), case.dtype)
    arrays: Any = x, jax.ShapeDtypeStruct(w, case.weight_dtype)
    options: dict[str, Any] = KERNELS | {"vocab_axis": case.vocab_axis, "softcap": case.spec.softcap}
    options |= {"label_smoothing": case.spec.label_smoothing, "head_precision": case.spec.head_precision}
    if case.saved_budget:
        options |= {"reduction": "none", "saved_budget": case.saved_budget}

    def planned(budget: int) -> Any:
        return explain(*arrays, **options, memory_budget=budget).plan

    least = least_budget(planned)
    assert planned(least).path == "scaled_exp"

    def has_three_chunks(plan: Any) -> bool:
        rows = plan.chunks.rows
        return case.n == 3 * rows if plan.saved is None else -(-plan.saved.rows // rows) == 3

    # The largest, because statistics and numbers of the tokens take more than `explain` knows.
    return max(one for one in range(least, 4 * least, 2**12) if has_three_chunks(planned(one)))


def check_case(case: Case) -> None:
    arrays = make_arrays(case)
    found = run_sharded(case, arrays, mesh_of(vocab=SHARDS), **KERNELS, memory_budget=budget_of(case))
    assert_within_budget(case, arrays, found)


def check_tokens(case: Case, **axes: int) -> None:
    arrays = make_arrays(case)
    options = {"implementation": "pallas_triton", "vocab_axis_name": tuple(axes), "gather": "tokens"}
    found = run_sharded(case, arrays, mesh_of(**axes), **options, memory_budget=budget_of_tokens(case, **axes))
    assert_within_budget(case, arrays, found)


def check_unrolled() -> None:
    """The chunks are unrolled, as those of the Hopper kernels are."""

    def unrolled(*arguments: Any, unrolls: bool, **options: Any) -> Any:
        assert not unrolls
        return over_chunks(*arguments, unrolls=True, **options)

    with mock.patch("jax_pallas.scaled_exp.over_chunks", unrolled):
        check_tokens(TOKEN_CASES[0], fsdp=SHARDS)


def budget_of_tokens(case: Case, **axes: int) -> int:
    """Returns a memory budget with which a call has chunks of 48 rows."""
    shards = math.prod(axes.values())
    classes = case.vocab // shards
    w = (case.hidden, classes) if case.vocab_axis else (classes, case.hidden)
    key = PlanKey(
        stage="loss_and_gradients",
        input=MatrixLayout((case.n, case.hidden), 2, case.dtype),
        linear_weight=MatrixLayout(w, jnp.dtype(case.weight_dtype).itemsize, case.weight_dtype),
        vocab_axis=case.vocab_axis,
        classes=classes,
        label_smoothing=case.spec.label_smoothing,
        softcap=case.spec.softcap is not None,
        entropy=False,
        d_input=True,
        d_weight=True,
        d_bias=True,
        statistics=0,
        memory_budget=0,
        implementation="pallas_triton",
        device=device_info("pallas_triton", "cpu"),
        splits_head=case.spec.splits_head,
        shards=shards,
        pads_shards=case.spec.vocab_size is not None,
        token_parts=axes["fsdp"],
    )
    least = least_budget(lambda one: make_plan(key._replace(memory_budget=one)))
    budgets = range(least, 8 * least, 2**10)
    return next(one for one in budgets if make_plan(key._replace(memory_budget=one)).scaled_exp_config.rows == 48)


def exchanges_of(call: Any, *arrays: Any) -> str:
    """Returns the program of a call without the bodies of its kernels, which exchange nothing."""
    with kernels_of_zeros():
        return call.lower(*arrays).as_text()


def check_exchange_of_tokens() -> None:
    """The rows of the input of a chunk are gathered, and its d_input is reduce-scattered. At the end the memory of the
    exponentials holds all rows of this input."""
    case, axes = replace(TOKEN_CASES[0], lead=(112,), hidden=32), {"fsdp": SHARDS}
    x, w, y = given_arrays()
    x, y = (jnp.concatenate([array, array[:16]]) for array in (x, y))
    options = {"implementation": "pallas_triton", "vocab_axis_name": "fsdp", "gather": "tokens"}
    loss = partial(linear_cross_entropy, **options, memory_budget=budget_of_tokens(case, **axes))
    fsdp = P("fsdp")
    body = jax.shard_map(
        lambda *arrays: jax.value_and_grad(loss, (0, 1))(*arrays),
        mesh=mesh_of(**axes),
        in_specs=(fsdp, fsdp, fsdp),
        out_specs=(P(), (fsdp, fsdp)),
    )
    text = exchanges_of(jax.jit(body), x, w, y)
    assert "112x32xf32" not in text
    pattern = r'"stablehlo\.(all_gather|reduce_scatter)".*?\(tensor<(\d+)x32x(\w+)>\) -> tensor'
    found = re.findall(pattern, text, re.DOTALL)
    assert sorted(found) == [
        ("all_gather", "24", "bf16"),
        ("all_gather", "24", "bf16"),
        ("all_gather", "56", "bf16"),
        ("all_gather", "8", "bf16"),
        ("reduce_scatter", "16", "f32"),
        ("reduce_scatter", "48", "f32"),
    ]


def given_arrays(dtype: Any = jnp.bfloat16, classes: int = 256) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((96, 32)), random.standard_normal((classes, 32)) / 3
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(random.integers(0, classes, 96))


def of_shards(body: Callable[..., Any], out: Any) -> Any:
    return jax.jit(jax.shard_map(body, mesh=mesh_of(vocab=SHARDS), in_specs=(P(), P("vocab"), P()), out_specs=out))


def as_varying(results: Any) -> Any:
    """Returns results with an axis for the devices, each of which has its own."""
    return jax.tree.map(lambda one: jax.lax.pcast(one, ("vocab",), to="varying")[None], results)


def check_bits(dtype: Any = jnp.bfloat16) -> None:
    """Both devices have the same results, and a token loss the log-probabilities of `linear_log_probs`, bit for bit.

    Of one row the target's logit is far below the others, so its block of rows is computed again on one device.
    """
    x, w, y = given_arrays(dtype)
    w = w.at[200].mul(40).at[30].mul(-40)
    y = y.at[5].set(30)

    def body(x: Any, w: Any, y: Any) -> Any:
        def loss(x: Any) -> Any:
            return linear_token_loss_with_stats(x, w, y, lambda log_prob: -log_prob, **KERNELS)

        (value, stats), d_x = jax.value_and_grad(loss, has_aux=True)(x)
        log_prob = linear_log_probs(x, w, y, **KERNELS).log_prob
        return as_varying((value, stats.log_prob, log_prob, d_x.astype(jnp.float32)))

    _, stats, log_prob, _ = found = of_shards(body, P("vocab"))(x, w, y)
    for one in found:
        assert np.array_equal(one[0], one[1])
        assert np.isfinite(one).all()
    assert np.array_equal(stats, log_prob)
    assert stats.min() < -60


def check_small_probabilities() -> None:
    """float16 in chunks of 48, 48 and 18 gathered rows whose lse differ by up to 48. Some classes have probabilities of
    about 2**-24, and the entries of x are small. So only rows that are placed by estimates of their own lse keep the
    bits of these classes' gradients, with factors by the largest entries of their own. Of one of the two devices that
    divide the tokens, most are ignored. Two devices have the same tokens, and the same results, bit for bit."""
    axes, few = {"vocab": 2, "fsdp": 2}, slice(7, None, 32)
    case = replace(Case(name="", **TOKENS | MORE), dtype="float16")
    random = np.random.default_rng(0)
    x, w = random.standard_normal((case.n, case.hidden)), random.standard_normal((case.vocab, case.hidden)) / 2
    w[few] /= 5
    x[:, 0], w[:, 0], x[:, 1], w[:, 1] = random.permutation(np.linspace(-3, 3, case.n)), 8, 1, 0
    w[few, 1] = -3
    x, w = (jnp.asarray(array * 2.0**exponent, jnp.float16) for array, exponent in ((x, -6), (w, 6)))
    exact_x, exact_w = (np.asarray(array, np.float64) for array in (x, w))
    logits = exact_x @ exact_w.T
    target, counts = logits.argmax(1), np.ones(case.n)
    counts[5:40] = 0
    token_weight = jnp.asarray(2.0**32 * counts, jnp.float32)
    options: dict[str, Any] = {"implementation": "pallas_triton", "token_axis_names": "fsdp", "gather": "tokens"}
    options |= {"vocab_axis_name": ("vocab", "fsdp"), "memory_budget": budget_of_tokens(case, **axes)}

    def body(x: Any, w: Any, y: Any, token_weight: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return linear_cross_entropy(x, w, y, token_weight=token_weight, reduction="sum", **options)

        value, pull_back = jax.vjp(loss, x, w)
        d_x, d_w = pull_back(jnp.float32(2.0**-32))[0], pull_back(jnp.float32(2.0**-16))[1]
        found = value[None], d_x.astype(jnp.float32)
        found = (jax.lax.pcast(one, tuple({*axes} - varying(one)), to="varying") for one in found)
        return tuple(one[None] for one in found), d_w

    rows, head = P("fsdp"), P(("vocab", "fsdp"))
    specs: dict[str, Any] = {"in_specs": (rows, head, rows, rows), "out_specs": (P("vocab", "fsdp"), head)}
    arrays = x, w, jnp.asarray(target), token_weight
    found, d_w = jax.jit(jax.shard_map(body, mesh=mesh_of(**axes), **specs))(*arrays)
    for one in map(np.asarray, found):
        assert np.array_equal(one[0], one[1])
    loss, d_x = (np.asarray(one[0], np.float64) for one in found)
    assert loss[0] == loss[1]
    lse = np.log(np.exp(logits).sum(1))
    assert np.ptp(lse) > 40
    np.testing.assert_allclose(loss, 2.0**32 * ((lse - logits.max(1)) * counts).sum(), rtol=1e-6)
    p = np.exp(logits - lse[:, None])
    assert 2.0**-24 < p[:, few].mean() < 2.0**-21
    p[range(case.n), target] -= 1
    d_logits = p * counts[:, None]
    for one, exact in (d_x, d_logits @ exact_w), (d_w, 2.0**16 * d_logits.T @ exact_x):
        errors = np.abs(np.asarray(one, np.float64) - exact).max(1)  # of each row of x and of the head
        assert (errors <= 2e-3 * np.abs(exact).max(1)).all()
    assert (errors <= 1e-3 * np.abs(exact).max(1))[few].all()


def check_invariant(in_chunks: bool = False, gathers: bool = False) -> None:
    """With batch_invariant a row has the same bits among any rows, some of which are computed again, and the right
    gradient. Of one row the other device's sum is 0, which is no reason to compute it again. No kernel of this machine
    computes d_input, so here each row is multiplied by itself. With `gathers` the devices have different rows. With
    `in_chunks` alone both passes of log-probabilities run, otherwise the one of a token loss."""

    def row_by_row(e: Any, w: Any, contract: tuple[int, int]) -> Any:
        return jax.lax.map(lambda row: float32_matmul(row[None], w, contract)[0], e)

    x, w, y = given_arrays()
    x, upstream = x.at[5].mul(40).at[60].mul(40), np.random.default_rng(0).standard_normal(len(x))
    x, w, y = x.at[:, 0].set(0).at[0, 0].set(256), w.at[:, 0].set(0).at[7, 0].set(1), y.at[0].set(7)
    of_rows, other_sum = P(), "own_sum_of_d_input"
    if gathers:
        of_rows, other_sum = P("vocab"), "sum_of_d_input"

    def results_with(**options: Any) -> Callable[[list[int]], tuple[np.ndarray, ...]]:
        def body(x: Any, w: Any, y: Any, upstream: Any) -> Any:
            def loss(x: Any) -> Any:
                invariant = KERNELS | options | {"batch_invariant": True}
                if gathers or not in_chunks:
                    arguments = x, w, y, lambda log_prob, upstream: log_prob * upstream, upstream
                    value, found = linear_token_loss_with_stats(
                        *arguments, stats=("log_prob", "lse"), reduction="sum", **invariant
                    )
                    return value, (found.log_prob, found.lse)
                found = linear_log_probs(x, w, y, **invariant)
                return (found.log_prob * upstream).sum(), (found.log_prob, found.lse)

            (_, found), d_x = jax.value_and_grad(loss, has_aux=True)(x)
            return *found, d_x.astype(jnp.float32)

        specs: dict[str, Any] = {"in_specs": (of_rows, P("vocab"), of_rows, of_rows), "out_specs": of_rows}
        compiled = jax.jit(jax.shard_map(body, mesh=mesh_of(vocab=SHARDS), **specs))

        def results(rows: list[int]) -> tuple[np.ndarray, ...]:
            places = np.asarray(rows)
            return jax.tree.map(np.asarray, compiled(x[places], w, y[places], upstream[places]))

        return results

    with (
        mock.patch("jax_pallas.plan.why_variant", return_value=None),
        mock.patch.object(head_rows, "float32_matmul", row_by_row),
        mock.patch.object(vocab_shard, other_sum, None),
    ):
        everything = [*range(len(x))]
        others = [60, 0, *range(40, 20, -1)] * 5  # as many, which the same program computes
        others = others[: len(x)]
        budget = 120_000 if gathers and in_chunks else None
        results = results_with(memory_budget=budget, **({"gather": "tokens"} if gathers else {}))
        want = results(everything)
        if in_chunks and not gathers:  # here XLA multiplies the head piece by piece
            least = least_budget(lambda budget: results_with(memory_budget=budget)(everything))  # of one of both passes
            found = results_with(memory_budget=least * 9 // 8)(everything)[:2]
            assert all(np.array_equal(one, whole) for one, whole in zip(found, want[:2], strict=True))
        for name, one, whole in zip(("log_prob", "lse", "d_x"), results(others), want, strict=True):
            assert np.array_equal(one, whole[others]), name
    exact_x, exact_w = (np.asarray(array, np.float64) for array in (x, w))
    logits = exact_x @ exact_w.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    exact = exact_w[y] - p / p.sum(1, keepdims=True) @ exact_w
    assert (np.abs(want[2] / upstream[:, None] - exact).max(1) <= 0.01 * np.abs(exact_w[y]).max(1)).all()
    make_plan.cache_clear()  # of calls that were not checked


def check_order_of_sums() -> None:
    """With batch_invariant the devices add their parts in their order."""
    parts = np.random.default_rng(0).standard_normal((4, 7, 3)).astype(np.float32)
    devices, mesh = Devices(vocab_axes=("vocab",), shards=4), mesh_of(vocab=4)
    specs: dict[str, Any] = {"in_specs": P("vocab"), "out_specs": P("vocab"), "check_vma": False}
    total = jax.shard_map(lambda part: vocab_shard.ordered_sum(devices, part[0])[None], mesh=mesh, **specs)
    for found in np.asarray(jax.jit(total)(parts)):
        assert np.array_equal(found, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    parts = np.concatenate([parts, parts[:, :1]], 1)  # as many rows on each device
    dividing = devices._replace(gather="tokens", gather_axes=("vocab",))
    own = partial(vocab_shard.own_sum_of_d_input, dividing, ordered=True)
    found = jax.jit(jax.shard_map(lambda part: own(part[0]), mesh=mesh, **specs))(parts)
    assert np.array_equal(found, ((parts[0] + parts[1]) + parts[2]) + parts[3])


def check_bits_of_smoothing() -> None:
    x, w, y = given_arrays(classes=512)

    def body(x: Any, w: Any, y: Any) -> Any:
        def loss(x: Any) -> Any:
            return linear_cross_entropy(x, w, y, reduction="none", label_smoothing=0.1, **KERNELS)

        values, pull_back = jax.vjp(loss, x)
        return as_varying((values, pull_back(jnp.ones(len(y)))[0].astype(jnp.float32)))

    for one in of_shards(body, P("vocab"))(x, w, y):
        assert np.array_equal(one[0], one[1])
        assert np.isfinite(one).all()


def check_confident(dtype: Any = jnp.bfloat16) -> None:
    """Where the target's logit is far above the others, the other device's sums are tiny, which is no reason to compute
    them again, and the loss is exact."""
    x, w, y = given_arrays(dtype)
    w = w.at[7].set(12 * jnp.sign(x[0]))
    y = jnp.full_like(y, 7)
    x = jnp.tile(x[:1], (96, 1))

    def loss(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, reduction="none", **KERNELS)

    found = of_shards(loss, P())(x, w, y)
    logits = x[0].astype(jnp.float32) @ w.T.astype(jnp.float32)
    logits = np.asarray(logits, np.float64)
    others = np.delete(logits, 7) - logits[7]
    assert others.max() < -150
    np.testing.assert_allclose(found, np.log1p(np.exp(others).sum()), rtol=1e-5, atol=1e-38)
    total = jnp.asarray([0.0, 0.0, 2.0**60])
    assert leaves_range(total, jnp.asarray([5.0, 0.0, 5.0])).tolist() == [False, True, True]


def check_exchange(dtype: Any = jnp.bfloat16, classes: int = 256, **options: Any) -> None:
    """One sum before the first chunk and two for each chunk, none of them of logits or of the head. With smoothing one
    more, of the mean row of the head and the mean bias."""
    x, w, y = given_arrays(dtype, classes)
    grads = jax.value_and_grad(partial(linear_cross_entropy, **KERNELS, **options), (0, 1))
    text = exchanges_of(of_shards(lambda *arrays: grads(*arrays), (P(), (P(), P("vocab")))), x, w, y)
    assert not re.search("all_gather|all_to_all|reduce_scatter|collective_permute", text)
    sums = re.findall(r"all_reduce.*?\}\) : \((tensor<\S+>)\)", text, re.DOTALL)
    of_smoothing = ["tensor<33xf32>"] * bool(options)
    assert sorted(sums) == ["tensor<128xf32>", *of_smoothing, "tensor<4x2x96xf32>", "tensor<96x32xf32>"]


def check_saved_with_confident_targets() -> None:
    """A confident target has the larger factor with a z-loss: theta, which only the device of the target has."""
    case = Case(name="confident", **ROWS | SAVED, spec=LossSpec("none", z_loss_weight=0.1), logit_std=8.0)
    case = replace(case, dtype="float16", has_bias=False, has_class_weight=True, poison=())
    arrays = make_arrays(case)
    logits = arrays["input"].astype(np.float64) @ arrays["linear_weight"].astype(np.float64).T
    arrays["target"] = np.where(arrays["target"] < 0, arrays["target"], logits.argmax(1))
    found = run_sharded(case, arrays, mesh_of(vocab=SHARDS), **KERNELS, memory_budget=budget_of(case))
    assert_within_budget(case, arrays, found)


def check_exchange_of_saved() -> None:
    """The same, in three chunks. Nothing is exchanged in the backward pass."""
    x, w, y = given_arrays()
    case = next(case for case in CASES if case.name == "saved")
    options = KERNELS | {"reduction": "none", "saved_budget": 2**24, "memory_budget": budget_of(case)}

    def pull_back(x: Any, w: Any, y: Any) -> Any:
        losses, back = jax.vjp(lambda x, w: linear_cross_entropy(x, w, y, **options), x, w)
        return losses, back(losses)

    text = exchanges_of(of_shards(pull_back, (P(), (P(), P("vocab")))), x, w, y)
    assert not re.search("all_gather|all_to_all|reduce_scatter|collective_permute", text)
    sums = re.findall(r"all_reduce.*?\}\) : \((tensor<\S+>)\)", text, re.DOTALL)
    of_chunks = ["tensor<32x32xf32>"] * 3 + ["tensor<4x2x32xf32>"] * 3
    assert sorted(sums) == sorted(["tensor<192xf32>", *of_chunks])  # of whole blocks of rows


def check_errors() -> None:
    x, w, y = given_arrays()

    def refused(message: str, *arrays: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=f"'pallas_triton' cannot serve this call: {message}"):
            of_shards(lambda *a: linear_cross_entropy(*a, **KERNELS, **options), P())(*arrays)

    none = "the kernels take no shard of the vocabulary \\(vocab_axis_name\\) with "
    refused(none + "float32 input", x.astype(jnp.float32), w.astype(jnp.float32), y)
    refused(none + "float32 linear_weight and float16 input", x.astype(jnp.float16), w.astype(jnp.float32), y)
    few = "label_smoothing 0.1 and fewer than 256 classes on a device"
    refused(none + few, x, w, y, label_smoothing=0.1)
    x16, w16, _ = given_arrays(jnp.float16, 512)
    refused(none + "label_smoothing 0.1 and float16 input", x16, w16, y, label_smoothing=0.1)
    _, more, _ = given_arrays(classes=512)
    refused(none + "label_smoothing 0.1 and softcap", x, more, y, label_smoothing=0.1, softcap=30.0)
    refused(none + "label_smoothing 0.4, which is above 0.3", x, more, y, label_smoothing=0.4)
    h200: dict[str, Any] = {"device": "h200", "vocab_axis_name": "vocab"}
    found = explain(x, w[:128], **h200, label_smoothing=0.1)
    assert (found.name, found.plan.path) == ("chunked", "chunked")
    assert found.reason == re.sub(r"\\", "", none) + few
    big: Any = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((16032, 4096), jnp.bfloat16)
    found = explain(*big, **h200)
    assert (found.name, found.plan.path) == ("mosaic", "scaled_exp")
    assert not found.plan.scaled_exp_config.first_rows
    in_float32 = big[0], big[1].update(dtype=jnp.float32)
    precision: dict[str, Any] = {"head_precision": "float32"}
    for options, matmuls in (precision, 5), ({}, 3):
        found = explain(*in_float32, **h200, **options)
        assert (found.name, found.plan.path, len(found.plan.matmuls)) == ("mosaic", "scaled_exp", matmuls)
        assert not found.plan.scaled_exp_config.first_rows


CHECKS: dict[str, Callable[[], None]] = {
    **{case.name: partial(check_case, case) for case in CASES},
    "bits": check_bits,
    "invariant": check_invariant,
    "invariant, chunks": partial(check_invariant, in_chunks=True),
    "tokens, invariant": partial(check_invariant, gathers=True),
    "tokens, invariant, chunks": partial(check_invariant, gathers=True, in_chunks=True),
    "invariant, sums": check_order_of_sums,
    "float16, bits": partial(check_bits, jnp.float16),
    "smoothing, bits": check_bits_of_smoothing,
    "confident": check_confident,
    "float16, confident": partial(check_confident, jnp.float16),
    "exchange": check_exchange,
    "float16, exchange": partial(check_exchange, jnp.float16),
    "smoothing, exchange": partial(check_exchange, classes=512, label_smoothing=0.1),
    "saved, exchange": check_exchange_of_saved,
    "float16, saved, confident": check_saved_with_confident_targets,
    "errors": check_errors,
    **{f"tokens, {case.name}": partial(check_tokens, case, fsdp=SHARDS) for case in TOKEN_CASES},
    **{
        f"tokens and classes, {case.name}": partial(check_tokens, case, vocab=2, fsdp=2)
        for case in TOKEN_CASES
        if case.name in ("token loss", "padded", "smoothing, none")
    },
    "tokens, small probabilities": check_small_probabilities,
    "tokens, unrolled": check_unrolled,
    "tokens, exchange": check_exchange_of_tokens,
    **HEAD_CHECKS,
}


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """The failures of the selected tests' CHECKS on several devices."""
    return failures_of(request)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in CHECKS],
)
def test_shards_by_the_kernels(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


if __name__ == "__main__":
    run_named(CHECKS)
