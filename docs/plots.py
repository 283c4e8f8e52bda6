"""Plots of the recorded results for the site, where a page has the comment `<!-- plot: NAME -->`."""

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
GPUS = {"h200": "H200", "h100": "H100"}
MODES = {"train": "512 MiB", "tight": "256 MiB"}
# Of each file the methods that are shown, and their name and color. If two methods have the same name, the faster one
# is shown.
METHODS = {
    "torch": {"triton": ("core_triton", "#ea580c"), "torch.compile": ("torch.compile", "#94a3b8")},
    "jax": {
        "mosaic": ("jax_pallas", "#0d9488"),
        "bf16-logits": ("XLA, its fastest form", "#8b5cf6"),
        "gradient-scan": ("XLA, its fastest form", "#8b5cf6"),
    },
}
COLORS = dict(METHODS["torch"].values()) | dict(METHODS["jax"].values())
WITHOUT_BUDGET = ("torch.compile", "XLA, its fastest form")
N = 8192  # at which every head is measured
MARKS = ("circle", "x-thin-open", "diamond", "cross-thin-open")
TICKS = (0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 5)
GREY = "rgba(128, 128, 128, 0.35)"

Row = dict[str, Any]


def rows_of(gpu: str) -> dict[tuple[str, str], list[Row]]:
    """Returns the timed rows of the grid on a GPU, by method and mode, each with its "head"."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for framework, methods in METHODS.items():
        for row in json.loads((RESULTS / gpu / f"{framework}-grid.json").read_text())["rows"]:
            if row["method"] not in methods or row["ms"] is None:
                continue
            rows = found.setdefault((methods[row["method"]][0], row["mode"]), {})
            if row["shape"] not in rows or row["ms"] < rows[row["shape"]]["ms"]:
                rows[row["shape"]] = row
    heads = {(row["d"], row["v"]): row["shape"] for rows in found.values() for row in rows.values() if row["n"] == N}
    return {key: [{**row, "head": heads[row["d"], row["v"]]} for row in rows.values()] for key, rows in found.items()}


def about(row: Row) -> str:
    """Returns the text that a point shows under the pointer."""
    sizes = f"N {row['n']:,}, D {row['d']:,}, V {row['v']:,}"
    return f"{row['head']}<br>{sizes}<br>{row['ms']:.2f} ms, {row['ratio']:.3f}<br>{row['commit'][:7]}"


def traces_of(rows: list[tuple[str, list[Row]]], x: str, lines: bool) -> list[go.Scatter]:
    """Returns a trace for each method.

    Args:
        rows: of each method.
        x: a key of the rows.
        lines: between the points.
    """
    return [
        go.Scatter(
            name=name,
            x=[row[x] for row in shown],
            y=[row["ratio"] for row in shown],
            text=[about(row) for row in shown],
            hovertemplate="%{text}<extra>" + name + "</extra>",
            mode="lines+markers" if lines else "markers",
            line={"color": COLORS[name]},
            marker={"color": COLORS[name], "symbol": mark, "size": 9, "line": {"width": 2, "color": COLORS[name]}},
            visible=False,
        )
        for (name, shown), mark in zip(rows, MARKS, strict=True)
    ]


def with_menu(parts: dict[str, list[go.Scatter]], title: str, x_axis: dict[str, Any]) -> go.Figure:
    """Returns a figure whose menu chooses what is shown.

    Args:
        parts: traces by their entry in the menu.
        title: of the figure.
        x_axis: its title and type.
    """
    figure = go.Figure([trace for traces in parts.values() for trace in traces])
    buttons, begin = [], 0
    for label, traces in parts.items():
        visible = [begin <= index < begin + len(traces) for index in range(len(figure.data))]
        buttons.append({"label": label, "method": "update", "args": [{"visible": visible}]})
        begin += len(traces)
    for trace in figure.data[: len(next(iter(parts.values())))]:
        trace.visible = True
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.14, "yanchor": "bottom", "bgcolor": "white"}
    figure.update_layout(
        title={"text": title, "x": 0, "y": 0.98, "yanchor": "top", "font": {"size": 15}},
        updatemenus=[menu | {"font": {"color": "black"}}],
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        height=580,
        dragmode=False,  # a swipe scrolls the page
        margin={"l": 55, "r": 10, "t": 140, "b": 40},
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
    )
    figure.update_xaxes(gridcolor=GREY, linecolor=GREY, automargin=True, fixedrange=True, **x_axis)
    figure.update_yaxes(gridcolor=GREY, zeroline=False, title="x the three matmuls", fixedrange=True)
    figure.update_yaxes(type="log", tickvals=TICKS, ticktext=[f"{tick:g}" for tick in TICKS])
    figure.add_hline(y=1, line={"color": GREY, "width": 2})
    return figure


def heads() -> go.Figure:
    """Every head of the grid at N 8,192, in the order of core_triton's ratio."""
    parts: dict[str, list[go.Scatter]] = {}
    for gpu, shown in GPUS.items():
        found = rows_of(gpu)
        for mode, budget in MODES.items():
            ours = {row["head"]: row["ratio"] for row in found["core_triton", mode] if row["n"] == N}
            rows = []
            for name in COLORS:
                of_mode = found[name, "train" if name in WITHOUT_BUDGET else mode]
                of_heads = [row for row in of_mode if row["n"] == N and row["head"] in ours]
                rows.append((name, sorted(of_heads, key=lambda row: ours[row["head"]])))
            parts[f"{shown}, {budget}"] = traces_of(rows, "head", lines=False)
    title = f"Time of the heads of published models, N {N:,}"
    return with_menu(parts, title, {"tickangle": -90, "dtick": 1, "tickfont": {"size": 10}})


def tokens() -> go.Figure:
    """The heads of the grid that are measured from 256 to 65,536 tokens."""
    parts: dict[str, list[go.Scatter]] = {}
    for gpu, shown in GPUS.items():
        found = rows_of(gpu)
        measured = [row["head"] for row in found["core_triton", "train"]]
        for head in (head for head in dict.fromkeys(measured) if measured.count(head) > 3):
            rows = []
            for name in COLORS:
                of_head = [row for row in found[name, "train"] if row["head"] == head]
                rows.append((name, sorted(of_head, key=lambda row: row["n"])))
            parts[f"{shown}, {head}"] = traces_of(rows, "n", lines=True)
    counts = [4**power for power in range(4, 9)]
    x_axis = {"type": "log", "title": "tokens N", "tickvals": counts, "ticktext": [f"{count:,}" for count in counts]}
    return with_menu(parts, "Time against the number of tokens, 512 MiB", x_axis)


PLOTS = {"heads": heads, "tokens": tokens}
CONFIG = {"displayModeBar": False, "responsive": True}


def html(name: str) -> str:
    """Returns a plot as HTML, which needs plotly.js."""
    return PLOTS[name]().to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{name}", config=CONFIG)
