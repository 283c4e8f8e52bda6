"""What a vocabulary-parallel loss would take on more GPUs of a host than were measured.

    python -m benchmarks.scale_model compute --ranks 2 4 8 --json FILE     on one GPU
    python -m benchmarks.scale_model collectives --json FILE               on two GPUs
    python -m benchmarks.scale_model predict --json FILE --measured SCALE_OUT_JSON

`compute` times a rank's part of a call of core_triton, V / k rows of the head, with the collectives left out.
`collectives` times the all-reduce and the all-gather of NCCL for 1 KB to 1 GB. `predict` fits a latency and a bandwidth
to them and prints, for each k, a band from all communication hidden to none hidden:

    hidden    compute + (2 chunks + 1) latency
    exposed   hidden + 2 (k - 1) / k bytes of d_input / bandwidth

It prints no k above 2 unless the time that `benchmarks.scale_out` measured on two GPUs is in the band of k = 2, or
within 3% of it. The bandwidth of more GPUs is taken as that of two. A model of more than one host, of slow ranks and of
the clocks of eight hot GPUs is not part of it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.results import ResultFile, commit
from benchmarks.shapes import SHAPES, Shape

BUDGET = 512 * 2**20
TOLERANCE = 0.03
KEY = ("kind", "shape", "ranks", "bytes")
SIZES = [4**power for power in range(5, 16)]  # bytes, 1 KB to 1 GB


class Link(NamedTuple):
    """How long a collective takes: latency_ms + moved bytes / bandwidth."""

    latency_ms: float
    bytes_per_ms: float


def fit(rows: Sequence[tuple[float, float]]) -> Link:
    """Returns the link of (moved bytes, ms): the bandwidth of the largest transfer, and the median of what the small
    ones, below 64 KB, take besides."""
    moved, ms = max(rows)
    bandwidth = moved / ms
    small = [ms - moved / bandwidth for moved, ms in rows if moved < 2**16]
    latency = max(statistics.median(small), 0.0)
    return Link(latency, moved / (ms - latency))


def band(compute_ms: float, chunks: int, reduced_bytes: int, ranks: int, link: Link) -> tuple[float, float]:
    """Returns the milliseconds of a call with all communication hidden, and with none.

    Args:
        compute_ms: of one rank, without communication.
        chunks: of rows; each has two collectives, and the call has one more.
        reduced_bytes: of d_input, all chunks together.
        ranks: k.
        link: of the ranks.
    """
    hidden = compute_ms + (2 * chunks + 1) * link.latency_ms
    return hidden, hidden + 2 * (ranks - 1) / ranks * reduced_bytes / link.bytes_per_ms


def agrees(measured_ms: float, found: tuple[float, float]) -> bool:
    """Whether a time is within a band, or within `TOLERANCE` of it."""
    return found[0] * (1 - TOLERANCE) <= measured_ms <= found[1] * (1 + TOLERANCE)


def predict(rows: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines that `predict` prints, from rows of this module and of `benchmarks.scale_out`."""
    transfers = [(row["bytes"], row["ms"]) for row in rows if row["kind"] == "all-reduce"]  # on two ranks all of it
    if not transfers:
        return ["no row of kind all-reduce: run `collectives` on two GPUs"]
    link = fit(transfers)
    lines = [f"latency {1000 * link.latency_ms:.0f} us, bandwidth {link.bytes_per_ms / 1e6:.0f} GB/s"]
    of_two = {
        row["shape"]: row
        for row in measured
        if (row["framework"], row["form"], row["gpus"], row["status"]) == ("torch", "vocabulary", 2, "ok")
        and "method" not in row
    }
    shapes = dict.fromkeys(row["shape"] for row in rows if row["kind"] == "compute")
    for name in shapes:
        shape, parts = SHAPES[name], {row["ranks"]: row for row in rows if row.get("shape") == name}
        bands = {
            ranks: band(row["ms"], row["chunks"], 4 * shape.n * shape.d, ranks, link) for ranks, row in parts.items()
        }
        if name not in of_two or 2 not in bands:
            lines.append(f"{name}: two GPUs were not measured, so more are not predicted")
            continue
        one, two = of_two[name]["one_gpu_ms"], of_two[name]["ms"]
        low, high = bands.pop(2)
        text = f"{name}: two GPUs {two:.2f} ms, by the model {low:.2f} to {high:.2f} ms"
        if not agrees(two, (low, high)):
            lines.append(f"{text}: they disagree, so more GPUs are not predicted")
            continue
        more = (f"{k} GPUs {a:.2f} to {b:.2f} ms ({one / b:.2f} to {one / a:.2f} x)" for k, (a, b) in bands.items())
        lines.append("; ".join([text, *more]))
    return lines


def rank_call(shape: Shape, ranks: int) -> tuple[Any, int]:
    """Returns a call of a rank's part without collectives, forward and backward, and the number of its chunks."""
    import torch

    from core_triton import vocab_shard
    from core_triton.groups import Arrays, Options, TokenWeights
    from core_triton.ops import plan_for, run_loss_and_gradients
    from core_triton.problem import NeedsGrad, Problem

    rows = -(-shape.v // ranks)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape.n, shape.d, generator=generator, device="cuda").bfloat16()
    w = (torch.randn(rows, shape.d, generator=generator, device="cuda") * shape.d**-0.5).bfloat16()
    target = torch.randint(shape.v, (shape.n,), generator=generator, device="cuda")
    options = Options(
        mean=True,
        ignore_index=-100,
        label_smoothing=0.0,
        z_loss_weight=0.0,
        softcap=None,
        logit_scale=1.0,
        splits_head=False,
        saved_budget=0,
        vocab_size=shape.v,
        memory_budget=BUDGET,
        implementation="triton",
        vocab_group="left out",
        vocab_ranks=ranks,
        shard_rows=rows,
    )
    needs_grad, arrays = NeedsGrad(True, True, False), Arrays(x, w, None, target, None)
    row_weight = torch.ones(shape.n, device="cuda")
    problem = Problem(**arrays._asdict(), row_weight=row_weight, **options.of_problem())
    plan = plan_for(problem, "loss_and_gradients", BUDGET, "triton", needs_grad)
    left_out = {
        "all_sum": lambda tensor, group: tensor,
        "start_all_sum": lambda tensor, group: mock.Mock(),
        "gather": lambda tensor, ranks, group: tensor.repeat(ranks, *[1] * (tensor.ndim - 1)),
    }

    def run() -> None:
        with mock.patch.multiple(vocab_shard, **left_out):
            run_loss_and_gradients(arrays, TokenWeights(None, None), options, 0, True, needs_grad, None)

    return run, len(plan.scaled_exp_config.chunks(shape.n))


def compute(shapes: Sequence[str], every: Sequence[int], seconds: float, file: ResultFile) -> None:
    """Times a rank's part for each number of ranks."""
    import torch

    for name in shapes:
        for ranks in every:
            run, chunks = rank_call(SHAPES[name], ranks)
            ms = _time(run, seconds)
            file.add({"kind": "compute", "shape": name, "ranks": ranks, "chunks": chunks, "ms": ms, "status": "ok"})
            print(f"{name}, 1 of {ranks} ranks, {chunks} chunks: {ms:.3f} ms", flush=True)
            del run
            torch.cuda.empty_cache()


def _time(run: Any, seconds: float) -> float:
    """Returns the median milliseconds of a call in five blocks, after as much time to warm up."""
    import torch

    blocks, calls = [], 2
    for number in range(7):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        run()
        events[0].record()
        for _ in range(calls):
            run()
        events[1].record()
        torch.cuda.synchronize()
        blocks.append(events[0].elapsed_time(events[1]) / calls)
        if number == 0:
            calls = max(2, round(1000 * seconds / blocks[0]))
    return statistics.median(blocks[2:])


def _collectives(rank: int, store: str, seconds: float, messages: Any) -> None:
    import torch
    from torch import distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    for size in SIZES:
        part = torch.ones(size // 4, device="cuda")
        whole = part.new_empty(2 * len(part))
        calls = {
            "all-reduce": lambda part=part: dist.all_reduce(part),
            "all-gather": lambda part=part, whole=whole: dist.all_gather_into_tensor(whole, part),
        }
        for kind, run in calls.items():
            dist.barrier()
            ms = _time_together(run, seconds)
            if rank == 0:
                messages.put({"kind": kind, "bytes": size, "ms": ms, "status": "ok"})
    if rank == 0:
        messages.put(None)
    dist.barrier()
    dist.destroy_process_group()


def _time_together(run: Any, seconds: float) -> float:
    """`_time`, with as many calls on both ranks."""
    import torch
    from torch import distributed as dist

    calls = torch.tensor([max(2, round(1000 * seconds / max(_time(run, 0.0), 1e-3)))], device="cuda")
    dist.broadcast(calls, 0)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(int(calls)):
        run()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / int(calls)


def collectives(seconds: float, file: ResultFile) -> None:
    """Times collectives between two GPUs."""
    import tempfile
    from multiprocessing import get_context

    from torch.multiprocessing.spawn import spawn

    messages = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = spawn(_collectives, (f"{folder}/store", seconds, messages), 2, join=False)
        assert processes is not None
        while (row := messages.get()) is not None:
            file.add(row)
            print(f"{row['kind']} of {row['bytes']:,} bytes: {1000 * row['ms']:.1f} us", flush=True)
        while not processes.join():
            pass


def main(arguments: Sequence[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_model", description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=("compute", "collectives", "predict"))
    parser.add_argument("--json", type=Path, required=True, help="file of rows, added to, or read by predict")
    parser.add_argument("--measured", type=Path, help="predict: rows of benchmarks.scale_out")
    parser.add_argument("--shapes", nargs="+", default=["llama3-8b", "qwen2.5-0.5b", "gemma2-2b"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, default=0.2, help="of a block of calls")
    parser.add_argument("--commit", default=None, help="commit of the code, if git does not know it")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.shapes if name not in SHAPES]
    if unknown:
        parser.error(f"--shapes must be names of benchmarks/shapes.py, got {', '.join(unknown)}")
    if options.command == "predict":
        if options.measured is None:
            parser.error("predict needs --measured")
        rows, measured = (json.loads(path.read_text())["rows"] for path in (options.json, options.measured))
        print("\n".join(predict(rows, measured)))
        return
    from benchmarks.torch_bench import TorchBench

    try:
        bench = TorchBench("cuda")
    except RuntimeError as error:
        sys.exit(str(error))
    file = ResultFile(options.json, bench.device, bench.versions(), options.commit or commit(), key=KEY)
    if options.command == "compute":
        compute(options.shapes, options.ranks, options.seconds, file)
    else:
        collectives(options.seconds, file)


if __name__ == "__main__":
    main()
