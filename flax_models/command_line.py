"""Wrong options of the command lines: one line on stderr and exit status 2, without usage or boxes."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the process, saying what is wrong with which option."""
        self.exit(2, f"error: {message}\n")
