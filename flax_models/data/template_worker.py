"""Starts and calls the process that runs chat templates (template_process.py), and restarts it after a limit."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from flax_models.data.template_process import CPU_SECONDS

PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateFault(Exception):
    """A one-line description of an error in a template or in its input.

    Attributes:
        line: line of the program; None if unknown.
        limit: the program exceeded a limit, which the message names.
    """

    def __init__(self, message: str, *, line: int | None = None, limit: bool = False) -> None:
        super().__init__(message)
        self.line, self.limit = line, limit


class TemplateWorker:
    """A process that compiles and runs chat templates; it is started by the first request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._compiled: dict[tuple[str, str], tuple[str, list[str]]] = {}  # (source, date) -> (name, literals)
        self._lock = threading.Lock()
        atexit.register(self.close)

    def literals(self, source: str, date: str) -> tuple[str, ...]:
        """Compiles a program and returns its string literals and literal text.

        Args:
            source: the Jinja program.
            date: the date for strftime_now, such as 2026-01-31.

        Raises:
            TemplateFault: the program cannot be compiled, or exceeds the time or memory limit.
        """
        with self._lock:
            return tuple(self._compile(source, date)[1])

    def render(self, source: str, date: str, variables: dict[str, Any]) -> str:
        """Returns the output of a program; raises TemplateFault like `literals`, and if the program fails."""
        with self._lock:
            name, _ = self._compile(source, date)
            return self._ask({"name": name, "variables": variables})["text"]

    def _compile(self, source: str, date: str) -> tuple[str, list[str]]:
        if (source, date) not in self._compiled:
            name = str(len(self._compiled))
            reply = self._ask({"name": name, "source": source, "date": date})
            self._compiled[source, date] = name, reply["literals"]
        return self._compiled[source, date]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"},
                start_new_session=True,  # so that Ctrl-C does not kill it: the run still finishes its current step
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self.close()
            if status == -signal.SIGXCPU:
                raise TemplateFault(f"needs more than {CPU_SECONDS} s of CPU time", limit=True)
            raise TemplateFault(f"terminated its process with status {status}", limit=True)
        reply = json.loads(line)
        if "fault" in reply:
            raise TemplateFault(reply["fault"], line=reply.get("line"), limit=reply.get("limit", False))
        return reply

    def close(self) -> int | None:
        """Stops the process, if it is running, and returns its exit status."""
        process, self._process = self._process, None
        self._compiled = {}
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return process.wait()


WORKER = TemplateWorker()  # shared by all templates
