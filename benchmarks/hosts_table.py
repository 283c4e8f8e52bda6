"""The tables of `benchmarks.hosts` in docs/hosts.md, and the bars that its rows are compared with."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.hosts_rows import HOSTS, VARIANTS
from benchmarks.page_tables import NOT_YET, Place, source, wrapped
from benchmarks.results import ROOT

PLACE = Place(ROOT / "docs" / "hosts.md", "hosts")
FILE = "hosts.json"  # in the folders of results
NAMES = {
    "plain": "as it is",
    "compiled": "compiled",
    "liger": "Liger",
    "ours": "ours",
    "ours+liger": "ours, Liger's other kernels",
    "ours+compiled": "ours, compiled",
    "tuned": "compiled, tuned",
    "ours+tuned": "ours, compiled, tuned",
}
GIB = 2**30

Rows = Mapping[tuple[Any, ...], Mapping[str, Any]]  # by `_key` and variant


class Bar(NamedTuple):
    """What rows of ours must reach.

    Args:
        text: says it.
        hosts: whose rows count.
        trainer: whose rows count; None: those of all.
        part: of the rows.
        ours: the variant.
        other: the variant that it is compared with.
        speed: least tokens per second, relative to the other.
        memory: most memory, relative to the other; None: any.
        less: whether the memory must be below that, and not the same.
    """

    text: str
    hosts: tuple[str, ...]
    trainer: str | None
    part: str
    ours: str
    other: str
    speed: float
    memory: float | None
    less: bool = False


BARS = (
    Bar(
        text="ours with torch.compile is faster than Liger, at no more memory",
        hosts=("transformers",), trainer=None, part="step", ours="ours+compiled", other="liger", speed=1, memory=1,
    ),
    Bar(
        text="ours with torch.compile, tuned, is faster than Liger, at no more memory",
        hosts=("transformers",), trainer=None, part="step", ours="ours+tuned", other="liger", speed=1, memory=1,
    ),
    Bar(
        text="the loss of GRPO is at least 1.4 times as fast, and its peak memory is lower",
        hosts=("trl",), trainer="GRPO", part="loss", ours="ours", other="plain", speed=1.4, memory=1, less=True,
    ),
    Bar(
        text="the loss of JAX hosts is at least twice as fast",
        hosts=("tunix", "maxtext"), trainer=None, part="loss", ours="ours", other="plain", speed=2, memory=None,
    ),
)  # fmt: skip


def hosts_tables(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the tables.

    Args:
        contents: of files of `benchmarks.hosts`.
    """
    lines: list[str] = []
    for content in contents:
        rows = {(*_key(row), row["variant"]): row for row in content["rows"] if row["config"] != "smoke"}
        if not rows:
            continue
        lines += [*source(content, rows.values()), ""]
        for host in HOSTS:
            found = {key[-1] for key in rows if key[0] == host}
            lines += _table(host, [name for name in VARIANTS if name in found], rows)
        for bar in BARS:
            lines += wrapped(f"- {bar.text}: {_verdict(bar, rows)}.", "  ")
        lines.append("")
    return lines[:-1] or [NOT_YET]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["host"], row["trainer"], row["part"], row["config"], row["seq"], row["batch"]


def _table(host: str, variants: Sequence[str], rows: Rows) -> list[str]:
    """Returns the lines of a host's table, none if it has no rows."""
    keys = dict.fromkeys(key[:-1] for key in rows if key[0] == host)
    if not keys:
        return []
    in_order = sorted(keys, key=lambda key: (HOSTS[host].parts.index((key[1], key[2])), key[3], key[4]))
    lines = [
        f"| {host}, sequences x tokens | {' | '.join(NAMES[name] for name in variants)} |",
        "|---" * (len(variants) + 1) + "|",
    ]
    for key in in_order:
        cells = [_cell(rows.get((*key, name)), rows.get((*key, "plain"))) for name in variants]
        lines.append(f"| {_name(key)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _name(key: tuple[Any, ...], *, with_host: bool = False) -> str:
    host, trainer, part, config, seq, batch = key
    what = [name for name in (host if with_host else None, trainer) if name]
    return ", ".join([*what, *([part] if part == "loss" else []), config, f"{batch} x {seq:,}"])


def _cell(row: Mapping[str, Any] | None, plain: Mapping[str, Any] | None) -> str:
    """Returns tokens per second, their ratio to those of the library as it is, with a range if both were timed in
    turns, and the peak of memory."""
    if row is None or row["status"] == "skipped":
        return "-"
    if row["status"] != "ok":
        return "out of memory" if row["status"] == "oom" else row["status"]
    ratio = ""
    if plain and plain["status"] == "ok":
        spread = f", {row['ratio_p20']:.2f} to {row['ratio_p80']:.2f}" if _in_turns(row, plain) else ""
        ratio = f" ({_speed(row, plain):.2f} x{spread})"
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / GIB:.2f} GiB"
    return f"{row['tokens_per_s']:,.0f}/s{ratio if row is not plain else ''}{memory}"


def _speed(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Returns the speed of a row relative to another one: the median over pairs, if both were timed in turns."""
    return row["ratio"] if _in_turns(row, other) else row["tokens_per_s"] / other["tokens_per_s"]


def _in_turns(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two rows are of one run in turns, which writes the same ratio to both. One of them may have been
    measured again alone."""
    return "ratio" in row and row["ratio"] == other.get("ratio")


def _verdict(bar: Bar, rows: Rows) -> str:
    """Returns whether a bar is met, and where it is not."""
    missed, without_memory, measured = [], [], 0
    for *key, variant in rows:
        host, trainer, part = key[:3]
        if variant != bar.ours or host not in bar.hosts or part != bar.part or bar.trainer not in (None, trainer):
            continue
        ours, other = rows[(*key, variant)], rows.get((*key, bar.other))
        # Where the other runs out of memory, ours need only run.
        if other is None or other["status"] in ("skipped", "failed") or ours["status"] == "skipped":
            continue
        measured += 1
        name = _name(tuple(key), with_host=len(bar.hosts) > 1)
        if ours["status"] != "ok":
            missed.append(f"{name} ({ours['status']})")
        elif other["status"] == "ok":
            missed += _failures(bar, name, ours, other)
            if bar.memory is not None and None in (ours["peak_bytes"], other["peak_bytes"]):
                without_memory.append(name)
    if not measured:
        return "not measured"
    speed = "the speed is " if without_memory else ""
    found = f"missed at {'; '.join(missed)}" if missed else f"{speed}met at all {measured} shapes measured"
    return f"{found}; memory not measured at {'; '.join(without_memory)}" if without_memory else found


def _failures(bar: Bar, name: str, ours: Mapping[str, Any], other: Mapping[str, Any]) -> Iterable[str]:
    speed = _speed(ours, other)
    if speed < bar.speed or (bar.speed == 1 and speed == 1):
        digits = 3 if round(speed, 2) == bar.speed else 2
        yield f"{name} ({speed:.{digits}f} x as fast)"
    if bar.memory is not None and None not in (ours["peak_bytes"], other["peak_bytes"]):
        memory = ours["peak_bytes"] / other["peak_bytes"]
        if memory > bar.memory or (bar.less and memory == bar.memory):
            yield f"{name} ({memory:.2f} x the memory)"
