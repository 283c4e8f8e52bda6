"""The adapter of verl: log-probabilities, entropies and their gradients are those of its function's interface."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from host_checks import VERL_CHECKS
from programs import Printed, python
from torch import Tensor
from trl_stand_ins import installed, verl

LABELS = torch.tensor([[1, 5, 60], [0, 2, 7]])
KERNEL, MCORE = "verl.utils.kernel.linear_cross_entropy", "verl.models.mcore.model_forward_fused"


@pytest.fixture
def adapter() -> Iterator[Any]:
    with installed(*verl()):
        from core_triton.hosts import verl as adapter

        yield adapter


def arrays() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 16), (61, 16)))
    return hidden.requires_grad_(), weight.requires_grad_()


def results(function: Any, *options: Any) -> list[Tensor]:
    """Returns what a function returns, and the gradients of a loss of both."""
    hidden, weight = arrays()
    log_probs, entropy = function(hidden, weight, LABELS, *options)
    assert log_probs.shape == entropy.shape == (6,)
    (log_probs @ torch.linspace(-1, 1, 6) - 0.1 * entropy.sum()).backward()
    return [log_probs.detach(), entropy.detach(), *(one.grad for one in (hidden, weight) if one.grad is not None)]


@pytest.mark.parametrize("options", [(), (0.7,), (0.7, "none", None)])
def test_results_and_gradients_are_those_of_verl(adapter: Any, options: tuple[Any, ...]) -> None:
    expected = results(sys.modules[KERNEL].linear_cross_entropy, *options)
    with adapter.patch(implementation="chunked"):
        for name in (KERNEL, MCORE):
            assert sys.modules[name].linear_cross_entropy is adapter.linear_cross_entropy
            torch.testing.assert_close(results(sys.modules[name].linear_cross_entropy, *options), expected)


def losses_of_steps(steps: int = 20) -> Tensor:
    """Returns the losses of a policy in training, with the function that verl's models import in each call."""
    torch.manual_seed(0)
    embedding, layer, head = torch.nn.Embedding(61, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 61, bias=False)
    optimizer = torch.optim.Adam([*embedding.parameters(), *layer.parameters(), *head.parameters()], lr=1e-2)
    tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(1))
    advantages, old = torch.linspace(-0.5, 1, 32), None
    losses = []
    for _ in range(steps):
        hidden = torch.tanh(layer(embedding(tokens[:, :-1])))
        log_probs, entropy = sys.modules[KERNEL].linear_cross_entropy(hidden, head.weight, tokens[:, 1:], 0.7, "none")
        old = log_probs.detach() if old is None else old
        ratio = (log_probs - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_20_steps_have_the_losses_of_verl(adapter: Any) -> None:
    expected = losses_of_steps()
    assert expected[-1] < expected[0] - 0.05
    with adapter.patch(saved_budget=2**20):
        torch.testing.assert_close(losses_of_steps(), expected, rtol=1e-4, atol=1e-5)


def test_unpatch_and_what_is_refused(adapter: Any) -> None:
    functions = [sys.modules[name].linear_cross_entropy for name in (KERNEL, MCORE)]
    with pytest.raises(TypeError, match=r"options must be among implementation, .*, got softcap"):
        adapter.patch(softcap=3.0)
    for options, message in (
        ({"saved_budget": -1}, r"saved_budget must not be negative \(bytes\), got -1"),
        ({"saved_budget": 1, "batch_invariant": True}, "batch_invariant=True needs saved_budget 0, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            adapter.patch(**options)
    with pytest.raises(RuntimeError, match="verl is not patched"):
        adapter.unpatch()
    with adapter.patch(), pytest.raises(RuntimeError, match="verl is patched already"):
        adapter.patch()
    assert [sys.modules[name].linear_cross_entropy for name in (KERNEL, MCORE)] == functions
    with pytest.raises(ValueError, match="reduction must be \"none\", got 'mean'"):
        adapter.linear_cross_entropy(*arrays(), LABELS, 1.0, "mean")
    for temperature in (0.0, torch.tensor(0.7)):
        with pytest.raises(
            ValueError, match=f"temperature must be a positive number, got {re.escape(repr(temperature))}"
        ):
            adapter.linear_cross_entropy(*arrays(), LABELS, temperature)
    with (
        mock.patch.object(adapter.verl, "__version__", "0.8.2"),
        pytest.raises(RuntimeError, match=r"^core_triton.hosts.verl was tested with verl 0\.9\.1, found 0\.8\.2$"),
    ):
        adapter.patch()


def test_options_go_to_linear_log_probs_until_unpatch(adapter: Any) -> None:
    with mock.patch.object(adapter, "linear_log_probs", wraps=adapter.linear_log_probs) as called:
        with adapter.patch(memory_budget=2**20, saved_budget=2**20):
            expected = results(sys.modules[KERNEL].linear_cross_entropy)
        torch.testing.assert_close(results(adapter.linear_cross_entropy), expected)
    given = [{name: call.kwargs.get(name) for name in ("memory_budget", "saved_budget")} for call in called.mock_calls]
    assert given == [{"memory_budget": 2**20, "saved_budget": 2**20}, {"memory_budget": None, "saved_budget": None}]


class Group:
    """A process group of this process as far as the adapter asks it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_has_its_part_of_the_gradient_of_hidden(adapter: Any, ranks: int) -> None:
    whole, expected = adapter.linear_log_probs, results(adapter.linear_cross_entropy)
    group = Group(ranks)

    def of_one_rank(*arguments: Any, vocab_group: Any, **options: Any) -> Any:
        assert vocab_group is (None if ranks == 1 else group)
        return whole(*arguments, **options)  # as if this rank had all classes

    with mock.patch.object(adapter, "linear_log_probs", of_one_rank):
        found = results(adapter.linear_cross_entropy, 1.0, "none", group)
    found[2] *= ranks
    torch.testing.assert_close(found, expected)


RANKS = python("torch_ranks.py", "2", "chunked", *(f"check:{name}" for name in VERL_CHECKS))


@pytest.mark.slow
@pytest.mark.programs(RANKS, seconds=20)
@pytest.mark.parametrize("name", VERL_CHECKS)
def test_two_ranks(name: str, printed: Printed) -> None:
    result = printed[f"check:{name}"]
    assert not result["failure"], result["failure"]


def test_the_interface_is_that_of_the_installed_release() -> None:
    """Reads files of verl without importing it, because it needs other versions of some packages."""
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("verl is not installed (`make test-hosts` installs it)")
    assert version("verl") == "0.9.1"
    folder = Path(found.submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("kernel", folder / "utils" / "kernel" / "linear_cross_entropy.py")
    assert spec is not None
    assert spec.loader is not None
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    names = list(inspect.signature(kernel.LinearCrossEntropy.forward).parameters)[1:]
    with installed(*verl()):
        from core_triton.hosts import verl as adapter

        assert names == list(inspect.signature(adapter.linear_cross_entropy).parameters)
    importers = {
        path.relative_to(folder).as_posix(): text
        for path in folder.rglob("*.py")
        if "from verl.utils.kernel.linear_cross_entropy import" in (text := path.read_text(encoding="utf-8"))
    }
    assert "models/mcore/model_forward_fused.py" in importers
    assert "models/transformers/dense_common.py" in importers
    for name, text in importers.items():  # no other name is imported, and the reduction is "none"
        assert "import linear_cross_entropy\n" in text, name
        for call in re.findall(r"[^.\w]linear_cross_entropy\((.*?)\n *\)", text, re.DOTALL):
            assert '"none"' in call, name
