"""The one exception that the command line shows as a line instead of a traceback."""


class RunError(Exception):
    """Something the person who started the run can mend: a path, an option, a name already taken, a diverged loss."""
