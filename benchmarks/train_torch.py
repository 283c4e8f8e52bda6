"""PyTorch's side of `benchmarks.train`: Hugging Face transformers, with Liger's kernels or without.

Weights and gradients are bfloat16, with a float32 master copy for the optimizer, which is what JAX's side
does too: it rounds float32 parameters once a step. Autocast over float32 weights would round them for each matmul and
keep the residual stream in float32. On CUDA the model is compiled; where that fails, the row says so and the step runs
uncompiled.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.methods import UnavailableError, describe, installed, load, out_of_memory
from benchmarks.timing import WARM_UP, Sensor, host_blocks
from benchmarks.train_process import Request
from benchmarks.train_rows import LORA_RANK, Row, draw, speed_figures
from flax_models.data.batches import Batch
from flax_models.hub.config import values_of
from flax_models.model.config import ModelConfig

T = TypeVar("T")

SPLIT_STEPS = 3
LIGER = {"llama": "apply_liger_kernel_to_llama", "qwen2": "apply_liger_kernel_to_qwen2"}


def versions() -> dict[str, str]:
    return installed("torch", "triton", "transformers", "liger-kernel", "peft")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (times are no results)"


def make_model(row: Row, config: ModelConfig, device: str) -> Any:
    """Returns transformers' model of a row's shape, in bfloat16, ready to train.

    Raises:
        UnavailableError: what the row needs is not installed, or transformers does not support it.
        ValueError: the model has another number of parameters than ours.
    """
    transformers = load("transformers")
    if row.data != "whole" or row.optimizer != "adamw" or row.remat == "attention" or row.cast_head:
        raise UnavailableError("transformers is measured on whole rows, with AdamW, and remat none or full")
    if row.loss == "hf+liger":
        if config.family not in LIGER:
            raise UnavailableError(f"Liger is set up for {', '.join(LIGER)} here, not for {config.family}")
        getattr(load("liger_kernel.transformers"), LIGER[config.family])()  # before the model is made
    values = values_of(config)
    shape = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != config.parameter_count():
        raise ValueError(f"transformers' model must have {config.parameter_count():,} parameters, got {count:,}")
    if row.mode == "lora":
        peft = load("peft")
        lora = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear")
        peft.get_peft_model(model, lora, autocast_adapter_dtype=False)  # puts the adapters into the model itself
    if row.remat == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Step:
    """A training step: loss, gradients, clipping, AdamW on the master copy."""

    def __init__(self, model: Any, batches: Iterator[tuple[Tensor, ...]]) -> None:
        self.model, self._batches = model, batches
        self._forward = self._loss
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [weight.detach().float().requires_grad_() for weight in self.weights]
        decayed = [master for master in self._masters if master.ndim > 1]
        vectors = [master for master in self._masters if master.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-4, betas=(0.9, 0.95), fused=True)

    def compile(self) -> None:
        self._forward = torch.compile(self._loss, dynamic=False)

    def do_not_compile(self) -> None:
        self._forward = self._loss

    def forget(self) -> None:
        """Drops gradients that no update has taken."""
        for weight in self.weights:
            weight.grad = None

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # Given shifted labels, transformers and Liger shift none themselves.
        return self.model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss

    def forward(self) -> Tensor:
        return self._forward(*next(self._batches))

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> Tensor:
        """Moves the master copy and the weights; returns the gradient's norm."""
        for master, weight in zip(self._masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, 1.0, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self._masters)  # pyright: ignore[reportPrivateImportUsage]
        return norm

    def __call__(self) -> Tensor:
        loss = self.forward()
        self.backward(loss)
        self.update()
        return loss.detach()


def measure(row: Row, request: Request, figures: dict[str, Any]) -> None:
    """Compiles a row's step, checks its first ones, and times it, as `train_jax.measure` does.

    The peak is that of the timed steps, without what compiling took.
    """
    batch = request.batch
    if request.memory is not None:
        raise UnavailableError("--memory limits JAX's plan of a step, and PyTorch makes none")
    on_gpu = torch.cuda.is_available()
    device, wait = ("cuda", torch.cuda.synchronize) if on_gpu else ("cpu", _no_wait)
    config, drawn = row.model(), draw(row, batch)
    torch.manual_seed(0)
    model = make_model(row, config, device)
    batches = [tuple(torch.from_numpy(array).to(device).long() for array in part[:2]) for part in drawn.batches]
    step = Step(model, itertools.cycle(batches))
    once = row.kind == "largest"
    start = time.perf_counter()
    figures["compiled"] = on_gpu and row.compile
    if figures["compiled"]:
        step.compile()
        try:
            step.backward(step.forward())
        except Exception as error:  # a compiler may fail in any way, and the model is still to be measured
            if out_of_memory(error):
                raise
            figures |= {"compiled": False, "note": f"not compiled: {describe(error)}"}
            step.do_not_compile()
        step.forget()
    figures |= check_steps(step, 1 if once else WARM_UP)
    figures["compile_s"] = time.perf_counter() - start
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = [torch.zeros(())]

    def take_step() -> None:
        losses[0] = step()

    blocks = host_blocks(take_step, wait, 0 if once else request.seconds, Sensor(gpu=on_gpu))
    adapters = {"blocks.lora_a": sum(weight.numel() for weight in step.weights)} if row.mode == "lora" else None
    figures |= {
        **blocks.figures(),
        **speed_figures(row, drawn, blocks.figures()["step_ms"], adapters, device_name()),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "estimate": _estimate(step, batch) if on_gpu else None,
        "last_loss": float(losses[0]),
    }
    if not math.isfinite(figures["last_loss"]):
        raise ValueError(f"the loss became {figures['last_loss']}")
    if request.split:
        figures["split"] = _split(step, wait)


def _no_wait() -> None:
    """Waits for the CPU: a call has finished when it returns."""


def check_steps(step: Step, count: int) -> dict[str, Any]:
    """Takes steps and returns figures of them; raises ValueError if they do not train what is to train."""
    first = None
    moved = [False] * len(step.weights)
    for _ in range(count):
        loss = step.forward()
        step.backward(loss)
        for i, weight in enumerate(step.weights):
            moved[i] = moved[i] or (weight.grad is not None and bool(torch.any(weight.grad != 0)))
        norm, value = step.update().item(), loss.item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise ValueError(f"loss {value} and gradient norm {norm} must be finite")
        first = first or {"first_loss": value, "first_grad_norm": norm}
    if not all(moved):
        raise ValueError(f"{moved.count(False)} of {len(moved)} parameters have no gradient other than zero")
    return first or {}


def _estimate(step: Step, batch: int) -> int:
    """Returns about how many rows fit, where weights, gradients and the optimizer do not grow with them."""
    trained = sum(weight.numel() for weight in step.weights)
    fixed = torch.cuda.memory_allocated() + 6 * trained  # gradients in bfloat16 and in float32
    free = torch.cuda.get_device_properties(0).total_memory - fixed
    return int(0.97 * free * batch / max(torch.cuda.max_memory_allocated() - fixed, 1))


def _split(step: Step, wait: Callable[[], None]) -> dict[str, float]:
    """Returns the milliseconds of a step's parts, each ended by a wait, so their sum is longer than a step."""
    times: dict[str, float] = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)

    def timed(part: str, call: Callable[[], T]) -> T:
        wait()
        start = time.perf_counter()
        result = call()
        wait()
        times[part] += 1000 * (time.perf_counter() - start) / SPLIT_STEPS
        return result

    for _ in range(SPLIT_STEPS):
        loss = timed("forward", step.forward)
        timed("backward", partial(step.backward, loss))
        timed("optimizer", step.update)
    return times


def loss_of(folder: Path, batch: Batch) -> float:
    """Returns the mean loss of a Hugging Face folder's model, in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    tokens, targets = (torch.from_numpy(array).to(device).long() for array in (batch.tokens, batch.targets))
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss)
