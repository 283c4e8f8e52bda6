"""The process of one measurement of `benchmarks.train`, with its own memory peak. It may run out of memory.

    python -m benchmarks.train_process REQUEST ANSWER

REQUEST is the JSON of a `Request`, ANSWER the file that gets what was measured.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.methods import UnavailableError, describe, out_of_memory
from benchmarks.results import LAST_LINES, ROOT


@dataclass(frozen=True)
class Request:
    """What a process is to do.

    Args:
        row: the fields of a `benchmarks.train_rows.Row`; none: only say which device there is.
        batch: B.
        in_torch: by PyTorch; otherwise by JAX.
        seconds: of the timed blocks.
        memory: bytes that JAX's plan of a step must not exceed; None: what there is.
        with_weights: have transformers check the loss by the same weights.
        split: divide a step's time over its parts, which compiles JAX's once more.
        whole_device: take all of the device's memory at the start, in one piece.
    """

    row: dict[str, Any] | None = None
    batch: int = 0
    in_torch: bool = False
    seconds: float = 0.0
    memory: int | None = None
    with_weights: bool = False
    split: bool = False
    whole_device: bool = False


def ask(request: Request, limit: float) -> dict[str, Any]:
    """Returns what a separate process measured: `status` is ok, oom, skipped or failed, and `note` says why not ok.

    Args:
        request: what it is to do.
        limit: seconds after which it is ended.
    """
    return answer_of("benchmarks.train_process", json.dumps(asdict(request)), limit, _environment(request))


def answer_of(module: str, request: str, limit: float, environment: dict[str, str]) -> dict[str, Any]:
    """Returns what `python -m module request path` writes to path, with a "status": "failed" if it writes nothing.

    Args:
        module: the program.
        request: its first argument.
        limit: seconds after which it is ended.
        environment: of the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, "-m", module, request, str(path)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(limit)
                end = f"its process ended with status {status} and no answer"
            except subprocess.TimeoutExpired:
                end = f"took longer than {limit:g} s"
            finally:
                _end(process)
        if path.exists():
            found = json.loads(path.read_text())
        else:
            found = {"status": "failed", "note": end}
        if found["status"] == "failed":
            lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            print("\n".join(["", *lines]), file=sys.stderr, flush=True)
        return found


def _environment(request: Request) -> dict[str, str]:
    """Returns the variables of a process: memory is taken as it is needed, or in one piece where all of it counts."""
    whole = request.row is not None and (request.row["kind"] == "largest" or request.whole_device)
    variables = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true" if whole else "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93",
        "HF_HUB_OFFLINE": "1",
    }
    if request.row is not None and request.row["kind"] == "check":  # autotuning matmuls takes it minutes
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    if request.in_torch:
        variables["JAX_PLATFORMS"] = "cpu"  # what PyTorch's side takes of JAX needs no device
    return {**os.environ, **variables}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started, compilers among them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answer(request: Request) -> dict[str, Any]:
    """Returns what this process measures; errors are answers, and figures that were there before them are kept."""
    side: Any = importlib.import_module(f"benchmarks.train_{'torch' if request.in_torch else 'jax'}")
    from benchmarks.train_rows import Row

    figures: dict[str, Any] = {"device": side.device_name(), "versions": side.versions()}
    try:
        if request.row is not None:
            row: Any = Row(**request.row)
            if row.kind == "check":
                side.check(row, request.batch, figures, with_weights=request.with_weights)
            elif row.kind == "converge":
                side.converge(row, request.batch, figures)
            else:
                side.measure(row, request, figures)
    except UnavailableError as error:
        return {**figures, "status": "skipped", "note": str(error)}
    except Exception as error:  # the message of any failure is the result
        traceback.print_exc()
        return {**figures, "status": "oom" if out_of_memory(error) else "failed", "note": describe(error)}
    return {"note": None, "status": "ok", **figures}


def main(arguments: Sequence[str] | None = None) -> None:
    request, path = sys.argv[1:] if arguments is None else arguments
    content = json.dumps(answer(Request(**json.loads(request))), default=float)  # NumPy's numbers
    Path(path).write_text(content)


if __name__ == "__main__":
    main()
