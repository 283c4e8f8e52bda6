"""Problems for `core_triton.linear_token_loss`, and the comparison of its results with the float64 reference: the named
losses of parity/token_losses.py, and another one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import core_triton
from core_triton import chunked, token_losses
from core_triton.token_hook import TokenHook
from linear_ce.reference import (
    EXACT,
    Arithmetic,
    TokenLossResult,
    ValueAndDerivatives,
    reference_log_probs,
    reference_token_loss,
    unfused,
)
from linear_ce.rounding import round_to
from linear_ce.spec import LossSpec
from parity.token_losses import FORMS, Form, Values, conditions
from parity.tolerances import budget, error


def custom(p: np.ndarray, u: np.ndarray, v: np.ndarray) -> Values:
    t = np.tanh(v * p / 64)  # of order 1: log-probabilities are near -8
    slope = (1 - t**2) / 64
    return u * np.exp(p / 4) + t, (u / 4 * np.exp(p / 4) + v * slope, np.exp(p / 4), p * slope)


def custom_in_torch(log_prob: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return u * (log_prob / 4).exp() + torch.tanh(v * log_prob / 64)


def custom_with_entropy(p: np.ndarray, h: np.ndarray, u: np.ndarray, v: np.ndarray) -> Values:
    loss, (d_p, d_u, d_v) = custom(p, u, v)
    t = np.tanh(h / 4)
    return loss - v * t * np.exp(p / 8), (
        d_p - v * t * np.exp(p / 8) / 8,
        -v * (1 - t**2) / 4 * np.exp(p / 8),
        d_u,
        d_v - t * np.exp(p / 8),
    )


def custom_with_entropy_in_torch(log_prob: Tensor, entropy: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return custom_in_torch(log_prob, u, v) - v * torch.tanh(entropy / 4) * (log_prob / 8).exp()


NAMED = {name: form.named(token_losses) for name, form in FORMS.items()}
LOSSES: dict[str, Any] = {**NAMED, "custom": custom_in_torch, "custom-entropy": custom_with_entropy_in_torch}
IN_NUMPY = {
    **FORMS,
    "custom": Form(custom, ("advantage", "ref_log_prob"), {}),
    "custom-entropy": Form(custom_with_entropy, ("advantage", "ref_log_prob"), {}, with_entropy=True),
}


class TokenProblem(NamedTuple):
    """A problem in NumPy. All values are values of the dtypes that a call has."""

    token_loss: Any
    form: Form
    arrays: dict[str, np.ndarray]  # input, linear_weight, target, and linear_bias, token_weight, normalizer if any
    per_token: list[np.ndarray]
    spec: LossSpec
    dtype: str
    per_token_dtype: str


def make_problem(
    name: str,
    dtype: str = "float32",
    lead: tuple[int, ...] = (70,),
    *,
    d: int = 24,
    v: int = 300,
    spec: LossSpec | None = None,
    bias: bool = False,
    token_weight: bool = False,
    normalizer: float | None = None,
    out_of_range: bool = False,
    per_token_dtype: str = "float32",
    seed: int = 0,
) -> TokenProblem:
    """Returns a problem in which a third of the tokens is ignored and holds NaN. With `token_weight` some tokens of
    weight 0 hold NaN as well."""
    rng, n = np.random.default_rng(seed), int(np.prod(lead))
    spec = LossSpec() if spec is None else spec
    arrays: dict[str, np.ndarray] = {
        "input": round_to(rng.standard_normal((n, d)).astype(np.float32), dtype),
        "linear_weight": round_to((rng.standard_normal((v, d)) / 4).astype(np.float32), dtype),
        "target": rng.integers(0, spec.classes(v), n),
    }
    if bias:
        arrays["linear_bias"] = round_to(rng.standard_normal(v).astype(np.float32), dtype)
    excluded = np.zeros(n, bool)
    if n:
        excluded[rng.permutation(n)[: n // 3]] = True
        arrays["target"][excluded] = spec.ignore_index
    if token_weight:
        weights = rng.uniform(-1, 2, n).astype(np.float32)
        weights[::5] = 0
        excluded |= weights == 0
        arrays["token_weight"] = weights
    if normalizer is not None:
        arrays["normalizer"] = np.asarray(normalizer, np.float32)
    linear_bias = arrays.get("linear_bias")
    log_prob = reference_log_probs(
        arrays["input"], arrays["linear_weight"], arrays["target"], linear_bias=linear_bias, spec=spec
    ).log_prob
    named = {
        "advantage": rng.standard_normal(n),
        "old_log_prob": log_prob + 0.3 * rng.standard_normal(n),
        "ref_log_prob": log_prob + 0.3 * rng.standard_normal(n),
    }
    form = IN_NUMPY[name]
    per_token = [round_to(named[one].astype(np.float32), per_token_dtype) for one in form.per_token]
    if out_of_range:
        arrays["target"][np.flatnonzero(~excluded)[[1, 4]]] = -1, v
    for array in (arrays["input"], *per_token):
        array[excluded] = np.nan
    arrays["input"] = arrays["input"].reshape(*lead, d)
    for one in ("target", "token_weight"):
        if one in arrays:
            arrays[one] = arrays[one].reshape(lead)
    shaped = [one.reshape(lead) for one in per_token]
    return TokenProblem(LOSSES[name], form, arrays, shaped, spec, dtype, per_token_dtype)


def tensors(problem: TokenProblem, device: str = "cpu") -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns the named arguments and per_token. The matrices, the bias and per_token require grad."""
    dtype = getattr(torch, problem.dtype)
    named = {}
    for name, array in problem.arrays.items():
        tensor = torch.tensor(array, device=device)
        differentiated = name in ("input", "linear_weight", "linear_bias")
        named[name] = tensor.to(dtype).requires_grad_() if differentiated else tensor
    of_tokens = [
        torch.tensor(one, device=device).to(getattr(torch, problem.per_token_dtype)).requires_grad_()
        for one in problem.per_token
    ]
    return named, of_tokens


def options_of(spec: LossSpec) -> dict[str, Any]:
    names = "reduction", "ignore_index", "softcap", "logit_scale", "vocab_size"
    return {name: getattr(spec, name) for name in names}


def call(problem: TokenProblem, named: dict[str, Tensor], per_token: list[Tensor], **options: Any) -> Tensor:
    named = dict(named)
    first = named.pop("input"), named.pop("linear_weight"), named.pop("target")
    if problem.form.with_entropy and problem.token_loss not in NAMED.values():
        options["with_entropy"] = True
    return core_triton.linear_token_loss(
        *first, problem.token_loss, *per_token, **named, **options_of(problem.spec), **options
    )


def upstream_of(problem: TokenProblem) -> np.ndarray:
    """Returns the upstream gradient. For a scalar it is a power of two, so that the gradients are rounded once."""
    if problem.spec.reduction != "none":
        return np.asarray(-2.0, np.float32)
    return np.linspace(-1, 2, problem.arrays["target"].size, dtype=np.float32).reshape(problem.arrays["target"].shape)


GRADIENTS = {"d_input": "input", "d_weight": "linear_weight", "d_bias": "linear_bias"}


def outputs(problem: TokenProblem, device: str = "cpu", **options: Any) -> dict[str, np.ndarray]:
    """Returns the loss and all gradients of a call."""
    named, per_token = tensors(problem, device)
    loss = call(problem, named, per_token, **options)
    assert loss.dtype == torch.float32
    leaves = {name: named[one] for name, one in GRADIENTS.items() if one in named}
    leaves |= {f"d_per_token[{index}]": one for index, one in enumerate(per_token)}
    upstream = torch.tensor(upstream_of(problem), device=device)
    gradients = torch.autograd.grad(loss, list(leaves.values()), upstream, allow_unused=True)
    found = {"loss": loss.detach().cpu().numpy()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)
        found[name] = gradient.float().cpu().numpy()
    return found


def reference(
    problem: TokenProblem, arithmetic: Arithmetic = EXACT, token_loss: ValueAndDerivatives | None = None
) -> TokenLossResult:
    arguments: dict[str, Any] = dict(problem.arrays)
    first = arguments.pop("input"), arguments.pop("linear_weight"), arguments.pop("target")
    return reference_token_loss(
        *first,
        token_loss or problem.form,
        *problem.per_token,
        **arguments,
        with_entropy=problem.form.with_entropy,
        spec=problem.spec,
        d_loss=upstream_of(problem),
        arithmetic=arithmetic,
    )


def used_of_budget(problem: TokenProblem, found: dict[str, np.ndarray], chunks: int = 1) -> dict[str, float]:
    """Returns the percentage of its budget that each output used: `parity.tolerances`. The head's gradients may be
    rounded once for each chunk of rows."""
    exact, same_dtype = (named_outputs(problem, reference(problem, a)) for a in (EXACT, unfused(problem.dtype)))
    rows = problem._replace(spec=replace(problem.spec, reduction="none"))
    found_conditions = conditions(problem.form, lambda token_loss: reference(rows, token_loss=token_loss))
    condition_of = {f"d_per_token[{index}]": one for index, one in enumerate(found_conditions.d_per_token)}
    condition_of["loss"] = found_conditions.rows if exact["loss"].ndim else found_conditions.total
    used = {}
    for name, want in exact.items():
        quantity = "d_input" if name[0] == "d" else name
        dtype = problem.per_token_dtype if name.startswith("d_per_token") else problem.dtype
        extra = chunks - 1 if name in ("d_weight", "d_bias") else 0
        limit = budget(quantity, dtype, error(same_dtype[name], want), extra, condition_of.get(name, 1.0))
        used[name] = 100 * error(found[name], want) / limit
    return used


def named_outputs(problem: TokenProblem, result: TokenLossResult) -> dict[str, np.ndarray]:
    """Returns the outputs by name, rounded to the dtype of a call unless they are exact."""
    exact = result.loss.dtype == np.float64
    found = {"loss": result.loss, "d_input": result.d_input, "d_weight": result.d_weight}
    if result.d_bias is not None:
        found["d_bias"] = result.d_bias
    for index, one in enumerate(result.d_per_token):
        found[f"d_per_token[{index}]"] = one if exact else round_to(one, problem.per_token_dtype)
    return found


def assert_within_budget(problem: TokenProblem, found: dict[str, np.ndarray], chunks: int = 1) -> None:
    used = used_of_budget(problem, found, chunks)
    assert all(share <= 100 for share in used.values()), ", ".join(f"{name} {s:.0f}%" for name, s in used.items())


class Counted(NamedTuple):
    """Functions that are called for each chunk of rows: token losses, and the gradients of `chunked.py`."""

    calls: tuple[mock.MagicMock, ...]

    @property
    def call_count(self) -> int:
        return max(one.call_count for one in self.calls)


@contextmanager
def counted_chunks() -> Iterator[Counted]:
    """Counts the chunks of rows of token losses: `call_count` of what it yields."""
    patched = ((TokenHook, "process"), (chunked, "chunk_gradients"))
    with ExitStack() as stack:
        originals = (
            mock.patch.object(one, name, autospec=True, side_effect=getattr(one, name)) for one, name in patched
        )
        yield Counted(tuple(stack.enter_context(one) for one in originals))
