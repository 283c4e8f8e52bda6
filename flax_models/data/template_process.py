"""The process in which chat templates run: a program from elsewhere may loop for ever or fill the memory.

`template_worker` starts this file as a program of its own, which imports Jinja and none of this project. It reads one
JSON object a line and answers each with one. The operating system ends it after CPU_SECONDS of work on one request and
refuses it more than MEMORY_BYTES beyond what it has at its start.

Source: transformers, utils/chat_template_utils.py, for what a template is given.
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
# Around what a {% generation %} block writes, until the places are known. Unicode's noncharacters: no text has them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class _Generation(Extension):
    """Puts marks around what {% generation %} ... {% endgeneration %} writes."""

    tags = {"generation"}  # noqa: RUF012  # the library's own way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
        return nodes.Scope([first, *body, last]).set_lineno(line)


def make_environment(date: str) -> ImmutableSandboxedEnvironment:
    """Returns a sandbox with what transformers gives to templates; `date` is what strftime_now tells, at midnight."""

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
    environment.filters["tojson"] = to_json  # the library's own writes < and & as HTML wants them
    environment.globals |= {"raise_exception": refuse, "strftime_now": midnight.strftime}
    return environment


def literals(source: str, environment: ImmutableSandboxedEnvironment) -> list[str]:
    """Returns the pieces of text that stand in a program itself."""
    tree = environment.parse(source)
    data = [node.data for node in tree.find_all(nodes.TemplateData)]
    return data + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


def answer(request: dict[str, Any], programs: dict[str, jinja2.Template]) -> dict[str, Any]:
    """Returns the answer to a request: a program to compile, or messages to render by one that was compiled."""
    try:
        if "source" in request:
            environment = make_environment(request["date"])
            programs[request["name"]] = environment.from_string(request["source"])
            return {"literals": literals(request["source"], environment)}
        return {"text": programs[request["name"]].render(**request["variables"])}
    except jinja2.TemplateSyntaxError as error:
        return {"fault": error.message, "line": error.lineno}
    except SyntaxError as error:  # of the Python that a program becomes: a break outside of a loop
        return {"fault": str(error.msg)}
    except MemoryError:
        return {"fault": f"takes more than {MEMORY_BYTES // 2**20} MiB of memory", "limit": True}
    except Exception as error:  # a program from elsewhere may fail in any way
        return {"fault": " ".join(str(error).split()) or type(error).__name__}


def main() -> None:
    """Answers the requests of stdin on stdout until stdin ends."""
    if sys.platform == "linux":  # elsewhere the size of a process cannot be limited so
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
