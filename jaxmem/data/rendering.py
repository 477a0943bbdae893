"""A process that renders chat templates, and nothing else: `rendering.py SECONDS BYTES`, spoken to over its pipes.

Jinja's sandbox keeps a template from the machine, not from running for ever or asking for all memory (`10 ** 10 ** 10`,
loops in loops, a text doubled a hundred times), and no thread of Python can be stopped from outside. A process can: the
kernel ends it after so many seconds of a processor for one request, refuses it more memory, and lets it write no file.

A request is one line of JSON, {"source"} with {"messages", "answer", "tokens"} if it is to be rendered; the answer is
another: {"text"}, {"refused"} (by the template), {"failed"} or {"invalid"} (the template itself).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What a program of somebody else's may end in.
FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class RefusedError(Exception):
    """What a template says of messages that it does not take."""


class Generation(Extension):
    """`{% generation %}` marks what the model says; here that is found without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    return made


@lru_cache(maxsize=4)
def template(source: str) -> Template:
    return environment().from_string(source)


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        found = template(request["source"])
    except (TemplateError, *FAILURES) as error:
        return {"invalid": _line(error)}
    if "messages" not in request:
        return {}
    try:
        text = found.render(messages=request["messages"], add_generation_prompt=request["answer"], **request["tokens"])
    except RefusedError as error:
        return {"refused": str(error)}
    except (TemplateError, *FAILURES) as error:
        return {"failed": _line(error)}
    return {"text": text}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise RefusedError(message)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(seconds: float, memory: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks, and ends this by closing the pipe
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal, unhandled, ends the process
        try:
            said = json.dumps(answer(json.loads(line)))
        except MemoryError:
            said = json.dumps({"failed": f"it takes more than {memory >> 20} MiB"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(said, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
