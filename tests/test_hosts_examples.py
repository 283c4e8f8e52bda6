"""The examples of docs/hosts.md for trainers without an adapter compute the losses of these trainers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from page_code import programs_of
from torch.nn import functional
from torch_host_stand_ins import torch_hosts

PAGE = Path(__file__).parents[1] / "docs" / "hosts.md"
TARGET = torch.tensor([-100, 3, 5, 0, 9, 2])


@pytest.fixture(autouse=True)
def hosts() -> Iterator[None]:
    with torch_hosts():
        yield


def names_of(text: str) -> dict[str, Any]:
    """Returns what the example that contains a text defines."""
    (code,) = [program for program in programs_of(PAGE) if text in program]
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 16), torch.randn(50, 16)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_olmo_core_gets_the_loss_with_the_z_loss(reduction: Any) -> None:
    """As `cross_entropy_loss` of `olmo_core/nn/functional/cross_entropy_loss.py`: the losses of the default head."""
    names = names_of("olmo_core")
    fused = names["losses"]._fused_linear_cross_entropy_loss
    x, weight = arrays()
    loss, z_loss, _ = fused(x, weight, TARGET, None, None, -100, 1e-3, 0.0, reduction, None, True, torch.float32)
    logits, counts = x @ weight.T, TARGET != -100
    squares = (logits.logsumexp(-1).square() * counts).sum() / (counts.sum() if reduction == "mean" else 1)
    torch.testing.assert_close(z_loss, 1e-3 * squares)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, TARGET, reduction=reduction) + z_loss)
    without, *_ = fused(x, weight, TARGET, None, None, -100, 1e-3, 0.0, reduction, None, False, torch.float32)
    torch.testing.assert_close(without, loss - z_loss)


def test_nemo_automodel_gets_the_sum_over_the_tokens_of_all_ranks() -> None:
    loss_fn, (x, weight) = names_of("nemo_automodel")["FusedLoss"](), arrays()
    losses = functional.cross_entropy(x @ weight.T, TARGET, reduction="none")
    torch.testing.assert_close(loss_fn(x, TARGET, weight, num_label_tokens=11), losses.sum() / 11)
    weights = torch.rand(6)
    torch.testing.assert_close(loss_fn(x, TARGET, weight, loss_weights=weights), (losses * weights).sum())


def test_torchtitan_gets_a_config_of_the_loss() -> None:
    names = names_of("config_registry")
    loss = names["llama3_8b"]().loss.build(compile_config=None)
    assert isinstance(loss, names["LinearCrossEntropyLoss"])


def test_megatron_gets_the_output_processor() -> None:
    names = names_of("pretrain_gpt")
    names |= {"get_batch": lambda _: ("tokens", "labels", "loss_mask", "mask", "positions"), "loss_func": mock.Mock()}
    model = mock.Mock()
    losses, loss_func = names["forward_step"](None, model)
    given = {"labels": "labels", "loss_mask": "loss_mask", "output_processor": names["processor"]}
    model.assert_called_once_with("tokens", "positions", "mask", **given)
    assert losses is model.return_value
    assert loss_func.args == ("loss_mask",)


def test_the_command_that_installs_a_missing_host_installs_a_tested_version() -> None:
    for path in sorted((PAGE.parents[1] / "core_triton" / "hosts").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        tested = {one for names in re.findall(r"^TESTED_\w+ = \((.*)\)$", text, re.MULTILINE) for one in eval(names)}
        installed = re.findall(r"pip install \"?[\w-]+==([\d.]*\d)", text)
        assert len(installed) == text.count("pip install"), path.name
        assert set(installed) <= tested, path.name
        assert bool(installed) == bool(tested), path.name
