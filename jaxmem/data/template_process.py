"""A process that renders chat templates, and nothing else: `template_process.py SECONDS BYTES`.

Jinja's sandbox does not prevent a template from running forever or allocating all memory (`10 ** 10 ** 10`, nested
loops, a text doubled a hundred times), and a thread of Python cannot be stopped from outside. A process can: the kernel
ends it after SECONDS of processor time for one request, limits its memory to BYTES, and lets it write no file.

A request is one line of JSON on stdin: {"source"}, with {"arguments"} to render it. The reply is a line on stdout:
{"text", "marks"}, {"refused"} (by the template), {"failed"}, or {"invalid"} (the template itself). `marks` are the
[start, end] of the characters that the template's `{% generation %}` blocks wrote; null if it has no such block.

The environment is the one of transformers (`utils/chat_template_utils.py`), without a clock (`strftime_now`).
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxmem.typing import JsonDict

# Errors that a template may raise.
FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateRefusedError(Exception):
    """Raised by a template for messages that it does not support."""


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` around the assistant's texts, as in transformers."""

    tags = {"generation"}  # noqa: RUF012
    environment: Any

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.extend(marks=None, written=[])  # marks: a list if the template has such a block

    def parse(self, parser: Parser) -> nodes.Node:
        self.environment.marks = []
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        start = sum(len(part) for part in self.environment.written)
        text = caller()
        self.environment.marks.append((start, start + len(text)))
        return str(text)


@lru_cache(maxsize=4)
def compile_template(source: str) -> Template:
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    return sandbox.from_string(source)


def reply_to(request: JsonDict) -> JsonDict:
    try:
        template = compile_template(request["source"])
    except (TemplateError, *FAILURES) as error:
        return {"invalid": _line(error)}
    if "arguments" not in request:
        return {}
    environment: Any = template.environment
    environment.written = written = []
    if environment.marks is not None:
        environment.marks = []
    try:
        for part in template.generate(**request["arguments"]):
            written.append(part)  # noqa: PERF402, a mark is an offset in `written`
        text = "".join(written)
        text.encode()  # half of a surrogate pair is not text
    except TemplateRefusedError as error:
        return {"refused": str(error)}
    except (TemplateError, *FAILURES) as error:
        return {"failed": _line(error)}
    return {"text": text, "marks": environment.marks}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateRefusedError(message)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(seconds: float, memory: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        try:
            reply = json.dumps(reply_to(json.loads(line)))
        except MemoryError:
            reply = json.dumps({"failed": f"it needs more than {memory >> 20} MiB"})
        except RecursionError:
            reply = json.dumps({"failed": "the conversation is nested too deeply"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
