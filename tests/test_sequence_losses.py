"""The losses of whole sequences of docs/objectives.md, compared with plain ones that compute the logits.

The tests run the code of the page. The exact values are float64 ones, from the definitions of the papers in PyTorch.
The error may be that of the plain computation in float32: with PyTorch, and with optax for the functions in JAX.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax import Array
from page_code import programs_of
from torch import Tensor

from parity.tolerances import budget, error

OBJECTIVES = Path(__file__).parent.parent / "docs" / "objectives.md"
FRAMEWORKS = ("core_triton", "jax_pallas")
PROMPTS, ENDS = [2, 3, 1, 4, 2, 1], [9, 5, 7, 8, 3, 9]  # the answers have 7, 2, 6, 4, 1 and 8 tokens
LENGTHS = np.subtract(ENDS, PROMPTS)
BETA, WEIGHTS, MARGIN, LOW, HIGH = 0.3, (1.0, 1.5), 0.7, 3e-4, 4e-4


def make_arrays() -> dict[str, np.ndarray]:
    """Returns three chosen answers, then the three rejected ones, and what the losses need besides."""
    rng = np.random.default_rng(0)
    hidden, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 9, 16), (50, 16)))
    head /= 3
    target = rng.integers(0, 50, (6, 9))
    for row, prompt, end in zip(target, PROMPTS, ENDS, strict=True):
        row[:prompt] = row[end:] = -100
    arrays = {"hidden": hidden, "head": head, "target": target}
    total = log_probs_in_torch(torch.tensor(hidden), torch.tensor(head), torch.tensor(target)).sum(1).numpy()
    per_token = np.array([0.3, 0.1, -1e-4, -0.3, 1e-4, -0.2])  # four ratios are outside the bounds
    arrays |= {
        "reference": total + 2 * rng.standard_normal(6),
        "old": total - per_token * LENGTHS,
        "mismatched": rng.standard_normal(6) + 1,
        "advantage": np.array([1.0, -0.3, 0.5, 0.9, -0.2, -0.4]),  # the first and the last ratio are clipped
    }
    arrays |= {name: arrays[name].astype(np.float32) for name in ("reference", "old", "mismatched", "advantage")}
    return arrays | {"desirable": np.array([True, False, False, True, True, False])}


def log_probs_in_torch(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    every = torch.nn.functional.log_softmax(hidden @ head.T, -1)
    return torch.where(target != -100, every.gather(-1, target.clamp(min=0)[..., None])[..., 0], 0.0)


def dpo_in_torch(log_prob: Tensor, reference: Tensor) -> Tensor:
    ratio = log_prob.sum(1) - reference
    return -torch.stack([torch.sigmoid(BETA * (ratio[i] - ratio[i + 3])).log() for i in range(3)]).mean()


def kto_in_torch(log_prob: Tensor, reference: Tensor, desirable: Tensor, mismatched: Tensor) -> Tensor:
    z, loss = max(0.0, float(mismatched.mean())), torch.zeros((), dtype=log_prob.dtype)
    for r, good in zip(log_prob.sum(1) - reference, desirable, strict=True):
        value = torch.sigmoid(BETA * (r - z)) if good else torch.sigmoid(BETA * (z - r))
        loss = loss + WEIGHTS[0 if good else 1] * (1 - value) / 6
    return loss


def orpo_in_torch(log_prob: Tensor) -> Tensor:
    probability = torch.stack([row[a:b].mean() for row, a, b in zip(log_prob, PROMPTS, ENDS, strict=True)]).exp()
    odds = probability / (1 - probability)
    return (-probability[:3].log() - 0.2 * torch.sigmoid((odds[:3] / odds[3:]).log()).log()).mean()


def simpo_in_torch(log_prob: Tensor) -> Tensor:
    reward = 2.5 * torch.stack([row[a:b].mean() for row, a, b in zip(log_prob, PROMPTS, ENDS, strict=True)])
    return -torch.sigmoid(reward[:3] - reward[3:] - MARGIN).log().mean()


def gspo_in_torch(log_prob: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    s = (log_prob.sum(1) - old).exp() ** (1 / torch.tensor(LENGTHS))
    return -torch.minimum(s * advantage, s.clamp(1 - LOW, 1 + HIGH) * advantage).mean()


def log_probs_in_optax(hidden: Array, head: Array, target: Array) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, jnp.maximum(target, 0))
    return -losses * (target != -100)


def preferred(margin: Array) -> Array:
    return optax.sigmoid_binary_cross_entropy(margin, jnp.ones_like(margin)).mean()


def dpo_in_optax(log_prob: Array, reference: Array) -> Array:
    return preferred(BETA * ((log_prob[:3].sum(1) - reference[:3]) - (log_prob[3:].sum(1) - reference[3:])))


def kto_in_optax(log_prob: Array, reference: Array, desirable: Array, mismatched: Array) -> Array:
    r, z = log_prob.sum(1) - reference, mismatched.mean()
    reward = jax.nn.sigmoid(BETA * jnp.where(desirable, r - z * (z > 0), z * (z > 0) - r))
    return jnp.mean(jnp.where(desirable, WEIGHTS[0], WEIGHTS[1]) * (1 - reward))


def orpo_in_optax(log_prob: Array) -> Array:
    average = log_prob.sum(1) / LENGTHS
    log_odds = average - jnp.log(1 - jnp.exp(average))
    return -average[:3].mean() + 0.2 * preferred(log_odds[:3] - log_odds[3:])


def simpo_in_optax(log_prob: Array) -> Array:
    average = log_prob.sum(1) / LENGTHS
    return preferred(2.5 * (average[:3] - average[3:]) - MARGIN)


def gspo_in_optax(log_prob: Array, old: Array, advantage: Array) -> Array:
    s = jnp.exp((log_prob.sum(1) - old) / LENGTHS)
    kept = jnp.where(advantage > 0, s < 1 + HIGH, s > 1 - LOW)
    return -jnp.mean(jnp.where(kept, s, jnp.where(advantage > 0, 1 + HIGH, 1 - LOW)) * advantage)


# For each loss: what it needs besides hidden, head and target, the options of the page's function, and the plain losses
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, Any], Callable[..., Tensor], Callable[..., Array]]] = {
    "dpo": (("reference",), {"beta": BETA}, dpo_in_torch, dpo_in_optax),
    "kto": (
        ("reference", "desirable", "mismatched"),
        {"beta": BETA, "weights": WEIGHTS},
        kto_in_torch,
        kto_in_optax,
    ),
    "orpo": ((), {"weight": 0.2}, orpo_in_torch, orpo_in_optax),
    "simpo": ((), {"beta": 2.5, "gamma": MARGIN}, simpo_in_torch, simpo_in_optax),
    "gspo": (("old", "advantage"), {"epsilon_low": LOW, "epsilon_high": HIGH}, gspo_in_torch, gspo_in_optax),
}


@functools.cache
def of_the_page(framework: str, name: str) -> Callable[..., Any]:
    """Runs the snippet of docs/objectives.md that defines a loss, and returns the loss."""
    (program,) = [
        code for code in programs_of(OBJECTIVES) if f"from {framework} import" in code and f"\ndef {name}(" in code
    ]
    namespace: dict[str, Any] = {}
    exec(compile(program, str(OBJECTIVES), "exec"), namespace)
    return namespace[name]


Results = dict[str, np.ndarray]


def in_torch(loss: Callable[..., Tensor], arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> Results:
    """Returns the loss and the gradients of hidden and head, in the dtype of the arrays."""
    hidden, head, target, *others = (torch.tensor(arrays[name]) for name in ("hidden", "head", "target", *names))
    value = loss(hidden.requires_grad_(), head.requires_grad_(), target, *others)
    value.backward()
    return {"loss": value.detach().numpy(), "d_input": hidden.grad.numpy(), "d_weight": head.grad.numpy()}  # pyright: ignore[reportOptionalMemberAccess]


@functools.cache
def compiled(name: str, plain: bool) -> Callable[..., Any]:
    """Returns a loss and its gradients in JAX as one program, which all tests share: of the page, or the plain one."""
    _, options, _, plain_optax = LOSSES[name]

    def unfused(x: Array, w: Array, y: Array, *others: Array) -> Array:
        return plain_optax(log_probs_in_optax(x, w, y), *others)

    loss = unfused if plain else functools.partial(of_the_page("jax_pallas", name), **options)
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def in_jax(name: str, arrays: dict[str, np.ndarray], *, plain: bool) -> Results:
    """Returns the same from JAX."""
    names = LOSSES[name][0]
    given = (jnp.asarray(arrays[name]) for name in ("hidden", "head", "target", *names))
    value, (d_input, d_weight) = compiled(name, plain)(*given)
    return {"loss": np.asarray(value), "d_input": np.asarray(d_input), "d_weight": np.asarray(d_weight)}


def results_of_the_page(framework: str, name: str, arrays: dict[str, np.ndarray]) -> Results:
    names, options, _, _ = LOSSES[name]
    if framework == "jax_pallas":
        return in_jax(name, arrays, plain=False)
    return in_torch(functools.partial(of_the_page(framework, name), **options), arrays, names)


def exact(name: str, arrays: dict[str, np.ndarray]) -> Results:
    names, _, plain, _ = LOSSES[name]
    wide = {one: array.astype(np.float64) if array.dtype == np.float32 else array for one, array in arrays.items()}
    return in_torch(lambda x, w, y, *others: plain(log_probs_in_torch(x, w, y), *others), wide, names)


def unfused(framework: str, name: str, arrays: dict[str, np.ndarray]) -> Results:
    names, _, plain_torch, _ = LOSSES[name]
    if framework == "jax_pallas":
        return in_jax(name, arrays, plain=True)
    return in_torch(lambda x, w, y, *others: plain_torch(log_probs_in_torch(x, w, y), *others), arrays, names)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_losses_of_the_page_are_those_of_the_papers(framework: str, name: str) -> None:
    arrays = make_arrays()
    assert_is_as_exact_as_unfused(framework, name, arrays)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_negative_estimates_of_the_kl_divergence_are_0(framework: str) -> None:
    arrays = make_arrays()
    arrays["mismatched"] -= 3
    assert arrays["mismatched"].mean() < 0
    assert_is_as_exact_as_unfused(framework, "kto", arrays)


def assert_is_as_exact_as_unfused(framework: str, name: str, arrays: dict[str, np.ndarray]) -> None:
    found, plain = results_of_the_page(framework, name, arrays), unfused(framework, name, arrays)
    want = exact(name, arrays)
    assert all(error(plain[one], want[one]) < 1e-5 for one in want)  # both plain computations have the same definition
    limits = {one: budget(one, "float32", error(plain[one], want[one])) for one in want}
    used = {one: 100 * error(found[one], want[one]) / limit for one, limit in limits.items()}
    assert all(share <= 100 for share in used.values()), ", ".join(f"{one} {s:.0f}%" for one, s in used.items())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_losses_of_kto_near_0_keep_their_digits(framework: str) -> None:
    """1 - sigmoid(x) is 0 in float32 for all these answers, whose x are near 20."""
    arrays = make_arrays()
    arrays["reference"] -= np.where(arrays["desirable"], np.float32(70), np.float32(-70))
    found, want = results_of_the_page(framework, "kto", arrays), exact("kto", arrays)
    assert 0 < want["loss"] < 1e-7
    assert all(error(found[one], want[one]) < 1e-5 for one in want)


def test_the_estimate_of_the_kl_divergence_has_no_gradient() -> None:
    arrays = make_arrays()
    assert arrays["mismatched"].mean() > 0
    first = [arrays[name] for name in ("hidden", "head", "target", "reference", "desirable")]
    mismatched = torch.tensor(arrays["mismatched"], requires_grad=True)
    hidden, *others = map(torch.tensor, first)
    of_the_page("core_triton", "kto")(hidden.requires_grad_(), *others, mismatched).backward()
    assert mismatched.grad is None
    gradient = jax.jit(jax.grad(of_the_page("jax_pallas", "kto"), 5))(
        *map(jnp.asarray, first), jnp.asarray(arrays["mismatched"])
    )
    assert not gradient.any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("row", [1, 4])  # a chosen and a rejected answer
def test_empty_answers_and_answers_of_probability_1_give_finite_results(framework: str, name: str, row: int) -> None:
    arrays = make_arrays()
    arrays["target"][row] = -100
    other = arrays["target"][row - 1]
    other[other != -100] = 7
    arrays["hidden"][row - 1] = 1000 * arrays["head"][7]  # float32 rounds the log-probabilities to 0
    log_prob = log_probs_in_torch(*map(torch.tensor, (arrays["hidden"], arrays["head"], arrays["target"])))
    assert not log_prob[row - 1 : row + 1].any()
    found = results_of_the_page(framework, name, arrays)
    assert all(np.isfinite(result).all() for result in found.values())
    assert not found["d_input"][row].any()
    assert found["d_input"].any()
