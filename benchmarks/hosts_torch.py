"""What the PyTorch hosts of `benchmarks.hosts` have in common: models, the check of a variant, and times."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.hosts_rows import CONFIGS, Row
from benchmarks.hosts_times import Prepared, time_steps
from benchmarks.methods import load
from benchmarks.timing import BATCHES, WARM_UP
from benchmarks.trace import trace_torch


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
        torch._C._cuda_clearCublasWorkspaces()  # the next matmul allocates them again, so each variant counts them
        torch.cuda.empty_cache()


def allocated() -> int:
    """Returns the bytes of the tensors on the GPU, 0 without one."""
    if not torch.cuda.is_available():
        return 0
    _forget()
    return torch.cuda.memory_allocated()


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


def prepared(row: Row, step: Callable[[], None], errors: dict[str, float], others: int = 0) -> Prepared:
    """Takes the first steps of a row and measures the peak of allocated memory.

    Args:
        row: the row.
        step: enqueues one of its steps.
        errors: keys of the row.
        others: bytes that other variants hold meanwhile, which do not count.
    """
    for _ in range(WARM_UP):
        step()
    return Prepared(row, step, lambda: trace_torch(step), {"peak_bytes": peak(step, others), **errors})


def peak(step: Callable[[], None], others: int) -> int | None:
    """Returns the most memory that is allocated during steps, without the bytes of others; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    for _ in range(BATCHES):
        step()
    return torch.cuda.max_memory_allocated() - others


def time_on_device(rows: Sequence[Prepared], seconds: float, kernels: bool) -> list[dict[str, Any]]:
    """Returns `time_steps` of rows of PyTorch."""
    on_gpu = torch.cuda.is_available()
    return time_steps(rows, torch.cuda.synchronize if on_gpu else _no_wait, on_gpu, seconds, kernels)


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def _no_wait() -> None:
    """Waits for the CPU: a call has finished when it returns."""
