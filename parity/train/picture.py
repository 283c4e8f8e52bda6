"""The picture of the four curves and of what is between them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from parity.backends import FRAMEWORKS
from parity.train.compare import BOUND, differences
from parity.train.run import CURVES, Run

# Curves lie on each other: the first are drawn wide and pale, so that the last do not hide them.
STYLES = {
    "torch-unfused": {"color": "#fdba74", "linewidth": 7.0},
    "torch-fused": {"color": "#c2410c", "linewidth": 3.5},
    "jax-unfused": {"color": "#93c5fd", "linewidth": 1.8},
    "jax-fused": {"color": "#1e3a8a", "linewidth": 1.4, "linestyle": (0, (2, 3))},
}
COLORS = {"torch": "#c2410c", "jax": "#2563eb"}
EQUAL = 2e-8  # where equal losses are drawn: below float32's smallest relative difference, 6e-8


def draw(path: Path, runs: Mapping[str, Run], title: str) -> None:
    """Writes the losses (above) and the relative differences (below, with the bound) as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 7.2), layout="constrained")
    FigureCanvasAgg(figure)  # drawn without pyplot: no global state, no window system
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, style in STYLES.items():
        if name in runs:
            losses = runs[name].losses
            above.plot(np.arange(1, len(losses) + 1), losses, label=f"{name} ({runs[name].implementation})", **style)
    for (label, color), apart in _groups(runs).items():
        shown = np.clip(apart, EQUAL, 1)
        below.plot(np.arange(1, len(shown) + 1), shown, color=color, linewidth=1, marker="o", markersize=3, label=label)
    below.axhline(BOUND, color="#16a34a", linewidth=1.6)
    place = {"xycoords": below.get_yaxis_transform(), "textcoords": "offset points"}
    below.annotate("bound", (0, BOUND), (4, 3), color="#16a34a", fontsize=9, **place)
    above.set_ylabel("loss, nats a token")
    below.set(yscale="log", xlabel="step", ylabel="relative difference")
    below.set_ylim(EQUAL / 1.5, max(10 * BOUND, 2 * below.get_ylim()[1]))
    powers = [10.0**power for power in range(-7, 1) if 10.0**power < below.get_ylim()[1]]
    below.set_yticks([EQUAL, *powers], ["equal", *(f"$10^{{{round(np.log10(tick))}}}$" for tick in powers)])
    below.set_yticks([], minor=True)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(which="major", color="#e2e8f0", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
        axes.legend(frameon=False, fontsize=9, loc="upper right")
    devices = ", ".join(dict.fromkeys(run.device for run in runs.values()))
    figure.suptitle(f"{title}, {devices}", x=0.02, ha="left", fontsize="large")
    figure.savefig(path, dpi=150)


def _groups(runs: Mapping[str, Run]) -> dict[tuple[str, str], np.ndarray]:
    """Returns, under a label and a colour, the largest difference of like pairs at each step."""
    kinds: dict[tuple[str, str], list[np.ndarray]] = {}
    for difference in sorted(differences(runs), key=lambda d: len({CURVES[name].framework for name in d.pair})):
        one, other = (CURVES[name].framework for name in difference.pair)
        if one == other:
            kind = (f"{FRAMEWORKS[one]}, fused and unfused", COLORS[one])
        else:
            kind = ("PyTorch and JAX, largest of all pairs", "#475569")
        kinds.setdefault(kind, []).append(difference.relative)
    return {kind: np.max(apart, axis=0) for kind, apart in kinds.items()}
