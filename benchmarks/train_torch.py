"""PyTorch's side of `benchmarks.train`: Hugging Face transformers, with Liger's kernels or without.

Weights and gradients are bfloat16, with a float32 master copy for the optimizer, which is what JAX's side
does too: it rounds float32 parameters once a step. Autocast over float32 weights would round them for each matmul and
keep the residual stream in float32. On CUDA the model is compiled; where that fails, the row says so and the step runs
uncompiled.

On a mesh there is a process for each GPU, and FSDP2 divides the parameters, which are float32. It gathers them in
bfloat16, and sums the gradients of layers in bfloat16 and that of the head in float32, as JAX's side does.
"""

import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from benchmarks import process_group
from benchmarks.methods import UnavailableError, describe, installed, load, out_of_memory
from benchmarks.timing import WARM_UP, Sensor, host_blocks
from benchmarks.train_process import Request, answer
from benchmarks.train_rows import LORA_RANK, Row, draw, speed_figures
from flax_models.data.batches import Batch
from flax_models.hub.config import values_of
from flax_models.model.config import ModelConfig
from flax_models.train.mesh import mesh_sizes

T = TypeVar("T")

SPLIT_STEPS = 3
FIRST_LOSS = (
    1.5  # most that the loss of random weights may differ from ln V; those of Llama-3 8B begin about 0.8 above it
)
LIGER = {"llama": "apply_liger_kernel_to_llama", "qwen2": "apply_liger_kernel_to_qwen2"}


def versions() -> dict[str, str]:
    return installed("torch", "triton", "transformers", "liger-kernel", "peft")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (times are no results)"


def make_model(row: Row, config: ModelConfig, device: str) -> Any:
    """Returns transformers' model of a row's shape, ready to train: in bfloat16, or on a mesh divided, in float32.

    Raises:
        UnavailableError: what the row needs is not installed, or transformers does not support it.
        ValueError: the model has another number of parameters than ours.
    """
    if row.data != "whole" or row.optimizer != "adamw" or row.remat == "attention" or row.cast_head:
        raise UnavailableError("transformers is measured on whole rows, with AdamW, and remat none or full")
    if row.mesh is not None and (row.compile or row.mode != "full" or row.gpus != mesh_sizes(row.mesh)["fsdp"]):
        raise UnavailableError("transformers is measured on a mesh with fsdp only, not compiled, without adapters")
    transformers = load("transformers")
    if row.loss == "hf+liger":
        if config.family not in LIGER:
            raise UnavailableError(f"Liger is set up for {', '.join(LIGER)} here, not for {config.family}")
        getattr(load("liger_kernel.transformers"), LIGER[config.family])()  # before the model is made
    values = values_of(config)
    shape = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    dtype = torch.bfloat16 if row.mesh is None else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != config.parameter_count():
        raise ValueError(f"transformers' model must have {config.parameter_count():,} parameters, got {count:,}")
    if row.mode == "lora":
        peft = load("peft")
        lora = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear")
        peft.get_peft_model(model, lora, autocast_adapter_dtype=False)  # puts the adapters into the model itself
    if row.remat == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model if row.mesh is None else divided(model, device)


def divided(model: Any, device: str) -> Any:
    """Divides the parameters of a model with FSDP2, and returns it. All processes pass equal models.

    Args:
        model: of transformers, with float32 parameters.
        device: its type.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    of_layers = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # which is then the gradients' as well
    of_others = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=of_layers)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=of_others)
    return fully_shard(model, mesh=mesh, mp_policy=of_others)  # has the head: Liger reads its weight itself


class Step:
    """A training step: loss, gradients, clipping, AdamW on the master copy, or on the weights if they are float32."""

    def __init__(self, model: Any, batches: Iterator[tuple[Tensor, ...]]) -> None:
        self.model, self._batches = model, batches
        self._forward = self._loss
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = self.weights
        if any(weight.dtype != torch.float32 for weight in self.weights):
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
        copied = self._masters is not self.weights
        if copied:
            for master, weight in zip(self._masters, self.weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
                weight.grad = None
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(self._masters, 1.0, norm, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if copied:
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

    On a mesh every process does so with its part of each batch. The peak is that of the timed steps, without what
    compiling took, on the GPU with the highest.
    """
    if row.mesh is not None and not dist.is_initialized():
        figures |= _measured_by_ranks(row, request)
        return
    batch = request.batch
    if request.memory is not None:
        raise UnavailableError("--memory limits JAX's plan of a step, and PyTorch makes none")
    on_gpu = torch.cuda.is_available()
    device, wait = ("cuda", torch.cuda.synchronize) if on_gpu else ("cpu", _no_wait)
    config, drawn = row.model(), draw(row, batch)
    torch.manual_seed(0)
    model = make_model(row, config, device)
    batches = [tuple(_own_rows(array, row.gpus).to(device).long() for array in part[:2]) for part in drawn.batches]
    once = row.kind == "largest"
    checked = 1 if once else WARM_UP
    same_batch = row.mesh is not None
    step = Step(model, itertools.chain(batches[:1] * checked if same_batch else [], itertools.cycle(batches)))
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
    figures |= check_steps(step, checked, config.vocab_size, same_batch=same_batch)
    figures["compile_s"] = time.perf_counter() - start
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = [torch.zeros(())]

    def take_step() -> None:
        losses[0] = step()

    blocks = host_blocks(take_step, wait, 0 if once else request.seconds, Sensor(gpu=on_gpu), _highest)
    adapters = {"blocks.lora_a": sum(weight.numel() for weight in step.weights)} if row.mode == "lora" else None
    figures |= {
        **blocks.figures(),
        **speed_figures(row, drawn, blocks.figures()["step_ms"], adapters, device_name()),
        "gpus": row.gpus,
        "peak_bytes": int(_highest(torch.cuda.max_memory_allocated())) if on_gpu else None,
        "estimate": _estimate(step, batch) if on_gpu and row.mesh is None else None,
        "last_loss": _mean(float(losses[0])),
    }
    if not math.isfinite(figures["last_loss"]):
        raise ValueError(f"the loss became {figures['last_loss']}")
    if request.split:
        figures["split"] = _split(step, wait)


def _measured_by_ranks(row: Row, request: Request) -> dict[str, Any]:
    """Returns the answer of the first of as many processes as the row has GPUs, or of one that failed."""
    on_gpu, there = torch.cuda.is_available(), torch.cuda.device_count()
    if on_gpu and there < row.gpus:
        raise UnavailableError(f"needs {row.gpus} devices, got {there}")
    method = process_group.start_method(cuda=on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        processes = start_processes(_rank, (row.gpus, request, folder), row.gpus, join=False, start_method=method)
        assert processes is not None
        path = Path(folder) / "0.json"
        try:
            while not processes.join():
                pass
        except ProcessException as error:  # the others are ended
            path = Path(folder) / f"{error.error_index}.json"
            if not path.exists():
                raise
        return json.loads(path.read_text())


def _rank(rank: int, ranks: int, request: Request, folder: str) -> None:
    on_gpu = torch.cuda.is_available()
    process_group.join(rank, ranks, f"{folder}/store", cuda=on_gpu)
    found = answer(request)
    Path(folder, f"{rank}.json").write_text(json.dumps(found, default=float))
    if found["status"] != "ok":
        os._exit(1)  # the others may wait for this one
    process_group.leave(cuda=on_gpu)


def _own_rows(array: Any, ranks: int) -> Tensor:
    """Returns this process's rows of a batch, an equal part of them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.from_numpy(array).unflatten(0, (ranks, -1))[rank]


def _highest(value: float) -> float:
    """Returns the highest value of all processes."""
    return _over_ranks(value, max)


def _mean(value: float) -> float:
    """Returns the mean value of all processes."""
    return _over_ranks(value, lambda values: sum(values) / len(values))


def _over_ranks(value: float, combine: Callable[[list[float]], float]) -> float:
    if not dist.is_initialized():
        return value
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return combine(values)


def _no_wait() -> None:
    """Waits for the CPU: a call has finished when it returns."""


def check_steps(step: Step, count: int, vocab: int, *, same_batch: bool = False) -> dict[str, Any]:
    """Takes steps and returns figures of them; raises ValueError if they do not train what is to train.

    Args:
        step: of a model with random weights.
        count: of the steps.
        vocab: V. The first loss is about ln V.
        same_batch: all steps take the same batch, so the loss must fall.
    """
    values: list[float] = []
    norms: list[float] = []
    moved = [False] * len(step.weights)
    for _ in range(count):
        loss = step.forward()
        step.backward(loss)
        for i, weight in enumerate(step.weights):
            moved[i] = moved[i] or _has_gradient(weight)
        norms.append(step.update().item())
        values.append(_mean(loss.item()))
        if not (math.isfinite(values[-1]) and math.isfinite(norms[-1])):
            raise ValueError(f"loss {values[-1]} and gradient norm {norms[-1]} must be finite")
    if not abs(values[0] - math.log(vocab)) < FIRST_LOSS:
        raise ValueError(f"the first loss of random weights must be about {math.log(vocab):.3f}, got {values[0]:.3f}")
    if same_batch and count > 1 and not min(values[1:]) < values[0]:
        raise ValueError(f"the loss of the same batch must fall, got {', '.join(f'{value:.4f}' for value in values)}")
    moved = [bool(_highest(one)) for one in moved]  # of a small array a process may have no part
    if not all(moved):
        raise ValueError(f"{moved.count(False)} of {len(moved)} parameters have no gradient other than zero")
    return {"first_loss": values[0], "first_grad_norm": norms[0]}


def _has_gradient(weight: Tensor) -> bool:
    """Returns whether a gradient, or this process's part of it, is there and not 0."""
    gradient = weight.grad
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own is not None and bool(torch.any(own != 0))


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
