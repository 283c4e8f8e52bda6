"""The process of rows of `benchmarks.hosts`.

    python -m benchmarks.hosts_process REQUEST ANSWER

REQUEST is the JSON of a `Request`, whose file gets a line of JSON after each row. ANSWER is the file that says at the
end that all rows were taken.
"""

import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hosts_rows import HOSTS, Request, Row, in_turns
from benchmarks.methods import UnavailableError, describe, out_of_memory

# Of the loss and of a gradient, relative to the library, which rounds logits to bfloat16
MOST_ERRORS = 1e-2, 3e-2
# A gradient's error may be so many times that of the library, where both are relative to a float32 model: Liger's
# kernels round elsewhere.
MOST_TIMES = 1.5


def check_differences(
    variant: str, errors: Sequence[float], most: Sequence[float] = MOST_ERRORS, reference: str = "the library"
) -> dict[str, float]:
    """Returns as keys of a row by how much a variant differs from a reference.

    Args:
        variant: its name, for the message.
        errors: of the loss, and of the gradient of the head, relative.
        most: of both.
        reference: for the message.

    Raises:
        ValueError: they are more than rounding.
    """
    for name, error, limit in zip(("loss", "gradient of the head"), errors, most, strict=True):
        if not error <= limit:
            raise ValueError(f"the {name} of {variant} differs by {error:.1e} from {reference}'s, at most {limit:.1e}")
    return {"loss_error": errors[0], "gradient_error": errors[1]}


def answer(row: Row, request: Request) -> dict[str, Any]:
    """Returns what this process measures of a row, with its "status" and "note". Errors are answers."""
    try:
        module: Any = importlib.import_module(HOSTS[row.host].module)
        if HOSTS[row.host].in_turns:  # no row of these is compiled ahead
            (figures,) = module.measure_in_turns([row], request.seconds, request.kernels)
        else:
            figures = module.measure(row, None if request.ahead else request.seconds, request.kernels)
        return {"status": "ok", "note": None, **figures}
    except UnavailableError as error:
        return {"status": "skipped", "note": str(error)}
    except Exception as error:  # the message of any failure is the result
        traceback.print_exc()
        return {"status": "oom" if out_of_memory(error) else "failed", "note": describe(error)}


def answers(rows: Sequence[Row], request: Request) -> Iterator[dict[str, Any]]:
    """Yields the answers to rows that are timed in turns, or to one row. If rows cannot be timed in turns, each is
    timed alone, and the note of those that can says why."""
    note = None
    if len(rows) > 1:
        try:
            module: Any = importlib.import_module(HOSTS[rows[0].host].module)
            measured = module.measure_in_turns(rows, request.seconds, request.kernels)
        except Exception as error:  # rows that fail alone, too, print it
            note = f"timed alone, because in turns there was an error: {describe(error)}"
        else:
            yield from ({"status": "ok", "note": None, **figures} for figures in measured)
            return
    for row in rows:
        found = answer(row, request)
        yield found | ({"note": note} if found["status"] == "ok" else {})


def main(arguments: Sequence[str] | None = None) -> None:
    text, path = sys.argv[1:] if arguments is None else arguments
    request, began = Request(**json.loads(text)), time.monotonic()
    with Path(request.file).open("w") as file:
        for rows in in_turns([Row(**row) for row in request.rows]):
            if request.until is not None and time.monotonic() - began > request.until:
                break
            for found in answers(rows, request):
                print(json.dumps(found, default=float), file=file, flush=True)
    Path(path).write_text(json.dumps({"status": "ok", "note": None}))


if __name__ == "__main__":
    main()
