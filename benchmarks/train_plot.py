"""Draws recorded training steps: speed and memory compared with other trainers, and convergence."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.plot import save
from benchmarks.results import RECORDED
from benchmarks.train_rows import GROUPS

COLORS = {"fused": "#c2410c", "unfused": "#f59e0b", "hf": "#94a3b8", "hf+liger": "#475569"}
LABELS = {
    "fused": "flax_models, jax_pallas",
    "unfused": "flax_models, optax's loss on logits",
    "hf": "transformers",
    "hf+liger": "transformers, Liger",
}

GAPS = {
    "repeats": ("a run from its repeat", COLORS["hf"]),
    "pairs": ("fused from unfused, one run of each", COLORS["unfused"]),
    "means": ("fused from unfused, means of all runs", COLORS["fused"]),
}

Recorded = dict[str, Any]


def draw_all(path: Path | None) -> None:
    """Draws train-speed.png and train-convergence.png in the folder of a file of results, from the rows that it has.

    Args:
        path: of the file; None: the recorded one.

    Raises:
        SystemExit: there is no such file, or it has no row for either.
    """
    path = RECORDED / "train.json" if path is None else path
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise SystemExit(f"--json {path}: {error.strerror}") from None
    measured = {row["name"]: row for row in content["rows"] if row["status"] == "ok"}
    groups = ("full", "float32-head", "lora", "lora-peers", "liger")
    rows = [measured[row.name] for group in groups for row in GROUPS[group] if row.name in measured]
    speed = [fastest(rows, shape, loss) for shape in shapes(rows) for loss in COLORS]
    speed = [row for row in speed if row is not None]
    curves = [measured[row.name] for row in GROUPS["converge"] if row.name in measured]
    if not speed and not curves:
        raise SystemExit(f"--json {path}: no row that a picture shows")
    if speed:
        draw_speed(speed, content["device"], path.with_name("train-speed.png"))
    if curves:
        draw_convergence(curves, content["device"], path.with_name("train-convergence.png"))


def shapes(rows: Sequence[Recorded]) -> list[tuple[Any, ...]]:
    """Returns what is trained in the rows, each once."""
    return list(dict.fromkeys((row["config"], row["mode"], row["seq"], row["batch"]) for row in rows))


def fastest(rows: Sequence[Recorded], shape: tuple[Any, ...], loss: str) -> Recorded | None:
    """Returns the fastest of a shape's rows without remat, of its variants (a head in float32, Liger uncompiled)."""
    found = [row for row in rows if row["loss"] == loss and row["remat"] == "none" and shapes([row]) == [shape]]
    return max(found, key=lambda row: row["tokens_per_s"], default=None)


def draw_speed(rows: Sequence[Recorded], device: str, path: Path) -> None:
    """Two panels of bars, tokens a second and peak memory: a group for each shape, a bar for each loss."""
    groups = shapes(rows)
    figure, panels = plt.subplots(2, 1, figsize=(max(7, 1.2 * len(groups)), 7.4), layout="constrained", sharex=True)
    for panel, key, scale, label in (
        (panels[0], "tokens_per_s", 1, "tokens/s"),
        (panels[1], "peak_bytes", 2**30, "peak memory, GiB"),
    ):
        for at, loss in enumerate(COLORS):
            bars = {
                groups.index((r["config"], r["mode"], r["seq"], r["batch"])): r[key] for r in rows if r["loss"] == loss
            }
            bars = {place: value / scale for place, value in bars.items() if value is not None}
            places = np.asarray(list(bars)) + 0.2 * (at - 1.5)
            panel.bar(places, list(bars.values()), 0.19, color=COLORS[loss], label=LABELS[loss], zorder=3)
        _finish(panel, label)
        panel.set_ylim(bottom=0)
    names = [f"{config}\n{mode}\n{seq:,} x {batch}" for config, mode, seq, batch in groups]
    panels[1].set_xticks(range(len(groups)), names, fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    panels[0].set_title(f"training steps, bfloat16, {device}")
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    save(figure, path)


def distances(rows: Sequence[Recorded]) -> dict[str, np.ndarray]:
    """Returns how far losses of runs on text are from each other, (steps,) in nats a token.

    Two runs that differ in nothing drift apart by rounding, and so do a fused and an unfused one. What the loss changes
    besides is left once runs are averaged: by n of each loss the drift shrinks to 1/sqrt(n) of a pair's.

    Args:
        rows: of kind "converge".

    Returns:
        "repeats": from a run to its repeat, mean of all such pairs; "pairs": from a fused run to an unfused one of its
        seed, the same; "means": from the mean of the fused runs to the mean of the unfused ones, of each seed as many.
        What the rows have no pair for is missing.
    """
    runs = defaultdict[tuple[str, int], list[np.ndarray]](list)
    for row in rows:
        runs[row["loss"], row["seed"]].append(np.asarray(row["losses"]))
    seeds = sorted({seed for _, seed in runs})
    both = [(fused, unfused) for seed in seeds if (fused := runs["fused", seed]) and (unfused := runs["unfused", seed])]
    repeats = [abs(one - other) for alike in runs.values() for one, other in combinations(alike, 2)]
    pairs = [abs(one - other) for fused, unfused in both for one, other in product(fused, unfused)]
    means = [np.mean(fused, axis=0) - np.mean(unfused, axis=0) for fused, unfused in both]
    found = {"repeats": repeats, "pairs": pairs, "means": [abs(np.mean(means, axis=0))] if means else []}
    return {name: np.mean(gaps, axis=0) for name, gaps in found.items() if gaps}


def draw_convergence(rows: Sequence[Recorded], device: str, path: Path) -> None:
    """Losses of every step, and below them `distances`."""
    figure, (losses, gaps) = plt.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True, height_ratios=(3, 2))
    steps = np.arange(1, len(rows[0]["losses"]) + 1)
    for loss, style in (("fused", "-"), ("unfused", ":")):
        of_loss = [row for row in rows if row["loss"] == loss]
        for at, row in enumerate(of_loss):
            label = f"{loss}, {len(of_loss)} runs" if at == 0 else None
            losses.plot(steps, row["losses"], color=COLORS[loss], linestyle=style, linewidth=1, label=label)
    for name, gap in distances(rows).items():
        words, color = GAPS[name]
        label = f"{words}: {gap.mean():.4f} on average"
        gaps.plot(steps, np.maximum(gap, 1e-7), color=color, linewidth=1, label=label)
    gaps.set(yscale="log", xlabel="step")
    _finish(losses, "training loss, nats a token")
    _finish(gaps, "distance, nats a token")
    losses.set_title(f"{rows[0]['config']}, {rows[0]['seq']:,} x {rows[0]['batch']} tokens, bfloat16, {device}")
    losses.legend(fontsize=8)
    if gaps.get_legend_handles_labels()[0]:
        gaps.legend(fontsize=8)
    save(figure, path)


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(axis="y", color="#e2e8f0", zorder=0)
