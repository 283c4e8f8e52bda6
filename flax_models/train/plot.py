"""loss.png: the loss of every step, its running mean, and the held-out loss beside the baselines."""

from pathlib import Path

import numpy as np

from flax_models.train.baselines import Baselines
from flax_models.train.metrics import Row

SMOOTHED_SHARE = 40  # the running mean looks back over this fraction of the run: little lag, and most of the noise gone


def running_mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each value and those before it, as far back as a 40th of all."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - max(1, len(values) // SMOOTHED_SHARE), 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot_losses(path: Path, rows: list[Row], baselines: Baselines, title: str) -> None:
    """Draws a run's losses into a PNG file.

    Args:
        path: of the picture.
        rows: of metrics.jsonl.
        baselines: held-out losses to draw as lines.
        title: above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)]
    held_out = [(row["step"], row["held_out_loss"]) for row in rows if isinstance(row.get("held_out_loss"), float)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # drawn without pyplot: no global state, no window system
    axes = figure.add_subplot()
    if train:
        steps, losses = np.asarray(train).T
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.6)
        axes.plot(steps, running_mean(losses), color="tab:blue", label="train, running mean")
    if held_out:
        steps, losses = np.asarray(held_out).T
        axes.plot(
            steps, losses, color="tab:red", marker="o", markersize=4, label=f"held-out ({losses[-1]:.2f} at the end)"
        )
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
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    figure.suptitle(title, x=0.02, ha="left", fontsize="large")
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    if train or held_out:
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
