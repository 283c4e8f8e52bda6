"""The process that runs chat templates, with limits: untrusted code may loop forever or fill the memory.

`template_worker` runs this file as a separate program, which imports Jinja and no module of this project. The program
reads one JSON object per line and answers each with one JSON object. The operating system kills it after CPU_SECONDS of
CPU time on one request, and lets it allocate at most MEMORY_BYTES more than at its start.

Source: transformers, utils/chat_template_utils.py, for the variables and functions of a template.
"""

import datetime
import json
import os
import resource
import sys
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2
MEMORY_BYTES = 100 * 2**20
# Marks around the text of a {% generation %} block, removed later. Unicode noncharacters, which do not occur in text.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class _Generation(Extension):
    """Writes marks around the text of {% generation %} ... {% endgeneration %}."""

    tags = {"generation"}  # noqa: RUF012  # Jinja requires a class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
        return nodes.Scope([first, *body, last]).set_lineno(line)


def make_environment(date: str) -> ImmutableSandboxedEnvironment:
    """Returns a sandbox with the functions that transformers provides; strftime_now formats midnight of `date`."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    midnight = datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time())
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json  # Jinja's filter escapes < and & for HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": midnight.strftime}
    return environment


def literals(source: str, environment: ImmutableSandboxedEnvironment) -> list[str]:
    """Returns the string literals and literal text of a program."""
    tree = environment.parse(source)
    data = [node.data for node in tree.find_all(nodes.TemplateData)]
    return data + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


def answer(request: dict[str, Any], programs: dict[str, jinja2.Template]) -> dict[str, Any]:
    """Returns the answer to a request: to compile a program, or to render messages with a compiled program."""
    try:
        if "source" in request:
            environment = make_environment(request["date"])
            programs[request["name"]] = environment.from_string(request["source"])
            return {"literals": literals(request["source"], environment)}
        return {"text": programs[request["name"]].render(**request["variables"])}
    except jinja2.TemplateSyntaxError as error:
        return {"fault": error.message, "line": error.lineno}
    except SyntaxError as error:  # in the Python code that Jinja generates, for example a break outside a loop
        return {"fault": str(error.msg)}
    except MemoryError:
        return {"fault": f"needs more than {MEMORY_BYTES // 2**20} MiB of memory", "limit": True}
    except Exception as error:  # untrusted code may raise anything
        return {"fault": " ".join(str(error).split()) or type(error).__name__}


def main() -> None:
    """Answers requests from stdin on stdout until stdin is closed."""
    if sys.platform == "linux":  # other systems do not enforce RLIMIT_AS
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    programs: dict[str, jinja2.Template] = {}
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        reply = answer(json.loads(line), programs)
        if len(reply.get("text", "")) > MEMORY_BYTES:
            reply = {"fault": f"writes more than {MEMORY_BYTES // 2**20} MiB", "limit": True}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
