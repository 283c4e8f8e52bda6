"""What the PyTorch hosts of `benchmarks.hosts` have in common: models, the check of a variant, and times."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.hosts_rows import CONFIGS, Row
from benchmarks.methods import load
from benchmarks.timing import WARM_UP, Sensor, host_blocks
from benchmarks.trace import of_row, trace_torch


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def from_nothing() -> Iterator[None]:
    """Begins and ends without what rows of this process left on the device and in the compiler."""
    _forget()
    torch.manual_seed(0)
    torch.compiler.reset()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    # A row's variables still hold its model when the row ends, and a patched model is in a cycle.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_model(config: str, **fields: Any) -> Any:
    """Returns a model of transformers with random bfloat16 weights, in training mode, the same at each call.

    Args:
        config: a key of `CONFIGS`.
        fields: of its configuration, in place of those of `CONFIGS`.
    """
    transformers = load("transformers")
    values = CONFIGS[config] | fields
    shape = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device_type()):
        made = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=torch.bfloat16)
    return made.train()


def loss_and_gradient(model: Any, loss_of: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns a loss and its gradient of a model's head."""
    loss = loss_of()
    loss.backward()
    gradient = model.get_output_embeddings().weight.grad
    model.zero_grad()
    return loss.detach().float(), gradient


def differences(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> list[float]:
    """Returns relative differences of a loss and of a gradient."""
    pairs = [(one.float(), other.to(one.device).float()) for one, other in zip(found, expected, strict=True)]
    return [((one - other).norm() / other.norm()).item() for one, other in pairs]


def time_steps(row: Row, step: Callable[[], None], seconds: float, kernels: bool) -> dict[str, Any]:
    """Returns the figures of steps: tokens per second, the peak of allocated memory, times, and if asked for kernels
    and gaps of a trace."""
    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else _no_wait
    for _ in range(WARM_UP):
        step()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    figures = host_blocks(step, wait, seconds, Sensor(gpu=on_gpu)).figures()
    found = {
        "tokens_per_s": 1000 * row.batch * row.seq / figures["step_ms"],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        **figures,
    }
    return found | (of_row(lambda: trace_torch(step)) if kernels else {})


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def _no_wait() -> None:
    """Waits for the CPU: a call has finished when it returns."""
