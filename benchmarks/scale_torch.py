"""PyTorch's side of `benchmarks.scale_out`: a process for each GPU, and NCCL between them (gloo on CPUs)."""

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.cuda import nccl
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

import core_triton
from benchmarks import process_group, scale_peers
from benchmarks.methods import UnavailableError, describe
from benchmarks.scale_out import BUDGET, FORMS, Work, in_turns, on_each, row_of
from benchmarks.shapes import Mode
from benchmarks.torch_bench import TorchBench, TorchProblem
from benchmarks.trace import CALLS, by_kernel, trace_torch
from core_triton.vocab_shard import ALL_GATHER

METHODS = {"core_triton": FORMS} | {name: (peer.form,) for name, peer in scale_peers.PEERS.items()}


def measure(works: Sequence[Work], device: str, add: Callable[[dict[str, Any]], None]) -> None:
    """Measures each of `works`, which have the same number of GPUs, and calls `add` with what was measured."""
    gpus = works[0].gpus
    if device == "cuda" and torch.cuda.device_count() < gpus:
        raise RuntimeError(f"--gpus must be at most the number of GPUs, {torch.cuda.device_count()}, got {gpus}")
    method = process_group.start_method(cuda=device == "cuda")
    messages = get_context(method).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = gpus, works, device, f"{folder}/store", messages
        processes = start_processes(_rank, arguments, gpus, join=False, start_method=method)
        assert processes is not None
        while (message := messages.get()) is not None:
            add(message)
        while not processes.join():
            pass


def _rank(rank: int, ranks: int, works: Sequence[Work], device: str, store: str, messages: Any) -> None:
    cuda = device == "cuda"
    process_group.join(rank, ranks, store, cuda=cuda)
    bench = TorchBench(device)
    if rank == 0:
        versions = bench.versions() | ({"nccl": ".".join(map(str, nccl.version()))} if cuda else {})
        messages.put({"device": f"{ranks} x {bench.device}" if cuda else bench.device, "versions": versions})
    for work in works:
        try:
            found = _Measured(work, bench, rank).run()
            message = row_of(work, "torch", found) if rank == 0 else None
        except UnavailableError as error:
            message = work.of_row("torch") | {"status": "skipped", "note": str(error)}
        except Exception as error:
            if rank == 0:
                traceback.print_exc()
            message = work.of_row("torch") | {"status": "failed", "note": describe(error)}
        if rank == 0:
            messages.put(message)
        bench.release()
    if rank == 0:
        messages.put(None)
    process_group.leave(cuda=cuda)


class _Measured:
    """One row, on one rank."""

    def __init__(self, work: Work, bench: TorchBench, rank: int) -> None:
        self.work, self.bench, self.rank, self.ranks = work, bench, rank, work.gpus
        shape = replace(work.shape, n=work.all_tokens)
        self.problem: Any = bench.problem(shape, "bfloat16", "peaked")
        self.whole = self.problem.input, self.problem.weight, self.problem.target
        assert isinstance(self.problem, TorchProblem)

    def run(self) -> dict[str, Any]:
        """Returns what was measured, on rank 0."""
        several, single = self._several(), self._single()
        found: dict[str, Any] = self._memory(several) | self._errors(several, single)
        self.problem.forget()
        self.bench.release()
        if self.work.kernels and self.bench.gpu:
            found["by_kernel"] = by_kernel(trace_torch(several), CALLS)
        every = tuple(range(self.ranks))
        calls = self._calls(several, every), self._calls(single, every[:1])
        found["nccl_max_ctas"] = os.environ.get("NCCL_MAX_CTAS")
        if self.work.method is not None:
            found |= scale_peers.PEERS[self.work.method].about()
            # Megatron asks for 1, which orders its kernels and those of NCCL.
            found["cuda_device_max_connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        alone = [partial(self._block, single, gpus=(rank,)) for rank in every]
        found |= in_turns(self.work, partial(self._block, several, gpus=every), alone[0], calls)
        return found | (on_each(self.work, alone, calls[1]) if self.work.every_gpu else {})

    def _part(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows, an equal part."""
        return whole.tensor_split(self.ranks)[self.rank].clone()

    def _several(self) -> Callable[[], tuple[Tensor, ...]]:
        """Returns the call on all GPUs."""
        x, w, target = self.whole
        options: dict[str, Any] = {"vocab_group": dist.group.WORLD, "vocab_size": len(w), "memory_budget": BUDGET}
        if self.work.form == "tokens":
            options["sequence_parallel"] = True
        elif self.work.form == "head-gathered":
            options = {"gather": "head", "token_group": dist.group.WORLD, "memory_budget": BUDGET}
        own_w = self._part(w).requires_grad_()
        shared = self.work.form == "vocabulary"
        own_x, own_target = (x.detach(), target) if shared else (self._part(x), self._part(target))
        own_x.requires_grad_()
        if self.work.method is not None:
            return scale_peers.call(self.work.method, own_x, own_w, own_target, w)
        head: Tensor = own_w
        if self.work.form == "head-gathered":
            from torch.distributed.tensor import DTensor, Shard

            mesh = init_device_mesh(x.device.type, (self.ranks,))
            head = DTensor.from_local(own_w.detach(), mesh, [Shard(0)]).requires_grad_()

        def run() -> tuple[Tensor, ...]:
            loss = core_triton.linear_cross_entropy(own_x, head, own_target, **options)
            return loss.detach(), *torch.autograd.grad(loss, (own_x, head))

        return run

    def _single(self) -> Callable[[], tuple[Tensor, ...]]:
        """Returns the call on one GPU: N tokens and the whole head."""
        x, w, target = self.whole
        n = self.work.shape.n
        x, w, target = x[:n].detach().requires_grad_(), w.detach().requires_grad_(), target[:n]

        def run() -> tuple[Tensor, ...]:
            loss = core_triton.linear_cross_entropy(x, w, target, memory_budget=BUDGET)
            return loss.detach(), *torch.autograd.grad(loss, (x, w))

        return run

    def _memory(self, run: Callable[[], tuple[Tensor, ...]]) -> dict[str, Any]:
        run()
        if not self.bench.gpu:
            return {"workspace_bytes": 0, "device_bytes": 0}
        self.bench.release()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before - sum(_local(one).nbytes for one in results)
        free, total = torch.cuda.mem_get_info()
        most = torch.tensor([peak, total - free - torch.cuda.memory_reserved()], device="cuda")
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return {"workspace_bytes": int(most[0]), "device_bytes": int(most[1])}

    def _errors(
        self, several: Callable[[], tuple[Tensor, ...]], single: Callable[[], tuple[Tensor, ...]]
    ) -> dict[str, float]:
        """Returns the errors of the gradients of all tokens, and those of one GPU."""
        _, d_input, d_weight = several()
        d_input, d_weight = _local(d_input), _gathered(_local(d_weight), self.ranks)
        if self.work.form != "vocabulary":
            d_input = _gathered(d_input, self.ranks)
        found: dict[str, float] = {}
        mode = Mode("train")
        if self.rank == 0:
            reference = self.problem.reference(mode)
            scale = self.ranks if self.work.form == "head-gathered" else 1  # the mean of the ranks' gradients
            for name, one in (("d_input", d_input.float() / scale), ("d_weight", d_weight)):
                found[f"err_{name}"] = _error(one, getattr(reference, name))
            del d_input, d_weight, reference
            self.problem.forget()
            if self.work.form == "vocabulary":
                reference = self.problem.reference(mode)
                for name, one in zip(("d_input", "d_weight"), single()[1:], strict=True):
                    found[f"one_gpu_err_{name}"] = _error(one, getattr(reference, name))
            else:
                found |= {"one_gpu_err_d_input": float("nan"), "one_gpu_err_d_weight": float("nan")}
        dist.barrier()
        return found

    def _calls(self, run: Callable[[], Any], gpus: Sequence[int]) -> int:
        """Warms up, and returns how many calls take about the seconds of a block."""
        self._block(run, 2, gpus)
        ms = self._block(run, 2, gpus)
        count = torch.tensor(max(1, round(1000 * self.work.warmup / max(ms, 1e-3))))
        ms = self._block(run, int(_from_first(count, self.bench.gpu)), gpus)
        count = torch.tensor(max(1, round(1000 * self.work.seconds / max(ms, 1e-3))))
        return int(_from_first(count, self.bench.gpu))

    def _block(self, run: Callable[[], Any], calls: int, gpus: Sequence[int]) -> float:
        """Runs calls on the ranks of `gpus`; returns the milliseconds of one on the slowest of them."""
        dist.barrier()
        ms = 0.0
        if self.rank in gpus:
            ms = self._time(run, calls)
        most = torch.tensor([ms], device="cuda" if self.bench.gpu else "cpu")
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def _time(self, run: Callable[[], Any], calls: int) -> float:
        if not self.bench.gpu:
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return 1000 * (time.perf_counter() - start) / calls
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        run()  # the device works on this one while the host enqueues the next
        events[0].record()
        for _ in range(calls):
            run()
        events[1].record()
        torch.cuda.synchronize()
        gc.collect(0)
        return events[0].elapsed_time(events[1]) / calls


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def _gathered(part: Tensor, ranks: int) -> Tensor:
    whole = part.new_empty((ranks * len(part), *part.shape[1:]))
    getattr(dist, ALL_GATHER)(whole, part.contiguous())
    return whole


def _from_first(number: Tensor, gpu: bool) -> Tensor:
    number = number.cuda() if gpu else number
    dist.broadcast(number, 0)
    return number


def _error(found: Tensor, exact: Tensor) -> float:
    norm = torch.linalg.vector_norm
    return float(norm(found.float() - exact) / norm(exact))
