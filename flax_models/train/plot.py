"""Plots loss.png: the training loss of every step, its running mean, the held-out loss and the baselines."""

from pathlib import Path

import numpy as np

from flax_models.train.baselines import Baselines
from flax_models.train.metrics import Row

SMOOTHED_SHARE = 40  # the running mean covers 1/40 of the run: little lag, and most of the noise removed


def running_mean(values: np.ndarray) -> np.ndarray:
    """Returns the running mean over the last 1/SMOOTHED_SHARE of the values."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - max(1, len(values) // SMOOTHED_SHARE), 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot_losses(path: Path, rows: list[Row], baselines: Baselines, title: str) -> None:
    """Plots a run's losses to a PNG file.

    Args:
        path: path of the PNG file.
        rows: rows of metrics.jsonl.
        baselines: held-out losses of the baselines, drawn as horizontal lines.
        title: title of the figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)]
    held_out = [(row["step"], row["held_out_loss"]) for row in rows if isinstance(row.get("held_out_loss"), float)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, which has global state and may need a display
    axes = figure.add_subplot()
    if train:
        steps, losses = np.asarray(train).T
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.6)
        axes.plot(steps, running_mean(losses), color="tab:blue", label="train, running mean")
    if held_out:
        steps, losses = np.asarray(held_out).T
        axes.plot(steps, losses, color="tab:red", marker="o", markersize=4, label=f"held-out (final {losses[-1]:.2f})")
    for name, value in baselines._asdict().items():
        axes.axhline(value, color="0.45", linewidth=0.8, linestyle="--")
        axes.annotate(
            f"{name} {value:.2f}",
            xy=(1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 2),
            textcoords="offset points",
            ha="right",
            fontsize="small",
            color="0.35",
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    figure.suptitle(title, x=0.02, ha="left", fontsize="large")
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    if train or held_out:
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
