"""`python -m linear_ce`, or `linear-ce`: shows what the loss runs on this machine, and checks it against the reference.

Without a command, it runs "doctor".
"""

import argparse
import sys
from collections.abc import Sequence

from linear_ce import __version__, doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default "doctor"; returns the exit status, which is 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="linear-ce", description=__doc__)
    parser.add_argument("--version", action="version", version=f"linear-ce {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    about = "print versions, devices and the plan of a call, and compare a small call with the float64 reference"
    command = commands.add_parser("doctor", help=about, description=f"{about[0].upper()}{about[1:]}.")
    command.add_argument("--packages", nargs="+", choices=doctor.PACKAGES, default=list(doctor.PACKAGES))
    given = list(sys.argv[1:] if arguments is None else arguments)
    packages = parser.parse_args(given or ["doctor"]).packages
    try:
        return doctor.main(packages)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
