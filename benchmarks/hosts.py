"""Measures training steps of host libraries with and without the fused loss: `python -m benchmarks.hosts --json FILE`.

Each row runs in its own process (`benchmarks.hosts_process`), because a patch or a compiler may change a library for
good. Within it, the loss of the variant is compared with the library's own before it is timed. how-to-measure.md has
the definitions.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import results
from benchmarks.hosts_process import CONFIGS, VARIANTS, Row, device_name
from benchmarks.methods import installed
from benchmarks.train_process import answer_of

KEY = ("host", "config", "variant", "seq", "batch")
# Tokens of a sequence, and sequences of a step that fit with the library's own loss.
SIZES = {512: 16, 4096: 4}
VERSIONS = ("torch", "triton", "transformers", "liger-kernel")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    published = [name for name in CONFIGS if name != "smoke"]
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=published, metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seq", nargs="+", type=int, choices=SIZES, default=list(SIZES), help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help=f"sequences of a step; default: by --seq, {SIZES}")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the timed steps of a row (default %(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, help="most seconds of a process (default %(default)s)")
    parser.add_argument("--until", type=float, metavar="SECONDS", help="begin no row later than this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the rows into this file after each one")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    return parser.parse_args(arguments)


def line(row: dict[str, object]) -> str:
    """Returns what is printed of a row."""
    name = f"{row['config']}, {row['variant']}, {row['batch']} x {row['seq']}"
    if row["status"] != "ok":
        return f"{name:44} {row['status']}: {row['note']}"
    tokens, peak = row["tokens_per_s"], row["peak_bytes"]
    assert isinstance(tokens, float)
    memory = "" if peak is None else f", {peak / 2**30:.1f} GiB"  # pyright: ignore[reportOperatorIssue]
    return f"{name:44} {tokens:,.0f} tokens/s{memory}, the loss differs by {row['loss_error']:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a row with our loss failed."""
    options, began = parse(arguments), time.monotonic()
    commit = options.commit or results.commit()
    try:
        file = results.ResultFile(options.json, device_name(), installed(*VERSIONS), commit, key=KEY)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"{file.head['device']}, {file.head['versions']}, commit {commit}", flush=True)
    failed = False
    for config in options.configs:
        for seq in options.seq:
            for variant in options.variants:
                row = Row(
                    host="transformers",
                    config=config,
                    variant=variant,
                    seq=seq,
                    batch=options.batch or SIZES[seq],
                    seconds=options.seconds,
                )
                if options.until is not None and time.monotonic() - began > options.until:
                    print(f"{config}, {variant}, {seq}: not begun after {options.until:g} s", flush=True)
                    continue
                request = json.dumps(asdict(row))
                environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
                measured = answer_of("benchmarks.hosts_process", request, options.limit, environment)
                fields = {key: value for key, value in asdict(row).items() if key != "seconds"}
                found = {**fields, "tokens_per_s": None, "peak_bytes": None, **measured}
                file.add(found)
                print(line(found), flush=True)
                failed |= found["status"] == "failed" and variant.startswith("ours")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
