"""Tables of the losses other than the mean loss: their ratios and bars in docs/performance.md, and the bars that are
missed in experiments.md.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.page_tables import Place
from benchmarks.results import ROOT

GPUS = {"h200": "H200", "h100": "H100"}  # the folders of results, in the order of a cell
FILES = ("torch-objectives.json", "jax-objectives.json")
PLACE = Place(ROOT / "docs" / "performance.md", "objectives")
MISSED = {gpu: Place(ROOT / "benchmarks" / "experiments.md", f"objectives, {gpu}") for gpu in GPUS}
HEADS = {
    "llama3-8b": "Llama-3 8B",
    "qwen2.5-0.5b": "Qwen2.5-0.5B",
    "gemma2-2b": "Gemma 2 2B",
    "qwen3-8b": "Qwen3 8B",
}
# With float32, jax_pallas runs "chunked". The files have no rows of core_triton's "chunked".
OURS = {"triton": "core_triton", "mosaic": "jax_pallas", "chunked": "jax_pallas"}
PEERS = {
    "trl": "trl",
    "verl": "verl",
    "torch.compile": "torch.compile",
    "eager": "eager",
    "liger-grpo": "Liger",
    "bf16-logits": "JAX, logits in the input's dtype",
    "gradient-scan": "JAX, gradients in a scan",
    "checkpointed-scan": "JAX, checkpointed scan",
}
NAMES = OURS | PEERS
# The matmuls beside float16 rows of this commit multiplied zeros (experiments.md, "Objectives on an H200").
OLD_FLOOR = "0e65212"


class Loss(NamedTuple):
    """A loss that is measured.

    Args:
        name: in the tables.
        mode: of its rows.
        bar: the largest ratio that is within the aim; None if there is none.
        dtype: of its rows.
        other_bars: of heads that have another bar.
    """

    name: str
    mode: str
    bar: float | None
    dtype: str = "bfloat16"
    other_bars: Mapping[str, float] = {}

    def bar_of(self, head: str) -> float | None:
        return self.other_bars.get(head, self.bar)

    def bars(self) -> str:
        """Returns the cell with the bars."""
        others = [f"{HEADS[head]}: {bar:.2f}" for head, bar in self.other_bars.items()]
        return "-" if self.bar is None else "; ".join([f"{self.bar:.2f}", *others])


LOSSES = (
    Loss("GRPO", "token-loss", 1.05),
    Loss("log-probabilities", "log-probs", 1.38, other_bars={"qwen2.5-0.5b": 1.45}),
    Loss("log-probabilities, all rows saved", "log-probs-saved", 1.06),
    Loss("GRPO in 200 MiB", "token-loss-200", None),
    Loss("log-probabilities in 200 MiB", "log-probs-200", None),
    Loss("label smoothing", "smoothing", 1.08),
    Loss("float32", "train", 1.15, "float32"),
    Loss("float16", "train", 1.08, "float16"),
    Loss("float32 head, bfloat16 input", "float32-head", 1.75),
)


def objective_tables(results: Path) -> dict[Place, list[str]]:
    """Returns the lines of each table.

    Args:
        results: the folder with a folder for each GPU.
    """
    rows = {gpu: [row for file in FILES for row in _rows_of(results / gpu / file)] for gpu in GPUS}
    return {PLACE: ratio_table(rows)} | {MISSED[gpu]: missed_table(rows[gpu]) for gpu in GPUS}


def _rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"]


def misses(loss: Loss, row: Mapping[str, Any]) -> bool:
    """Returns whether a row is of one of our methods and above its bar, before rounding."""
    bar = loss.bar_of(row["shape"])
    return row["method"] in OURS and bar is not None and row["ratio"] > bar


def ratio_table(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Returns the lines of the table of ratios, a missed bar in bold. Methods without a row are left out.

    Args:
        rows: of each GPU.
    """
    lines = [
        f"| x the three matmuls, {' / '.join(GPUS.values())} | bar | {' | '.join(HEADS.values())} |",
        "|---" * (2 + len(HEADS)) + "|",
    ]
    for loss in LOSSES:
        found = {(gpu, row["method"], row["shape"]): row for gpu, of_gpu in rows.items() for row in _of(loss, of_gpu)}
        measured = {method for _, method, _ in found}
        for method in (method for method in NAMES if method in measured):
            cells = [
                " / ".join(_ratio(loss, found.get((gpu, method, head))) for gpu in GPUS).replace("- / -", "-")
                for head in HEADS
            ]
            bar = loss.bars() if method in OURS else ""
            lines.append(f"| {loss.name}, {NAMES[method]} | {bar} | {' | '.join(cells)} |")
    return lines


def missed_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the table of our rows above their bars.

    Args:
        rows: of one GPU.
    """
    lines = [
        "| objective | method | head | bar | ratio (p20 to p80) | ms | pairs | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for loss in LOSSES:
        missed = [row for row in _of(loss, rows) if misses(loss, row)]
        for row in sorted(missed, key=lambda row: (list(OURS).index(row["method"]), list(HEADS).index(row["shape"]))):
            cells = (
                *(loss.name, OURS[row["method"]], HEADS[row["shape"]], f"{loss.bar_of(row['shape']):.2f}"),
                f"{row['ratio']:.3f} ({row['ratio_p20']:.3f} to {row['ratio_p80']:.3f})",
                *(f"{row['ms']:.2f}", str(row["pairs"]), row["commit"][:7]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _of(loss: Loss, rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the timed rows of a loss. With all rows saved, the other libraries compute the same as without."""
    for row in rows:
        of_loss = (row["mode"], row["dtype"]) == (loss.mode, loss.dtype) and row["status"] == "ok"
        if of_loss and (loss.mode != "log-probs-saved" or row["method"] in OURS):
            yield row


def _ratio(loss: Loss, row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = f"{row['ratio']:.{3 if row['method'] in OURS else 2}f}"
    if row["dtype"] == "float16" and row["commit"].startswith(OLD_FLOOR):
        text += " (*)"
    return f"**{text}**" if misses(loss, row) else text
