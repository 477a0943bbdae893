"""Standard output of a command: one JSON object for programs, tables for people."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any


def is_first_process() -> bool:
    """Whether this process is the only one or the first of several; only the first prints."""
    import jax

    return jax.process_index() == 0


def print_text(text: str) -> None:
    """Prints a part of a text at once, without a line break."""
    if is_first_process():
        print(text, end="", flush=True)


@contextlib.contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """A context for a command with --json: everything that the library prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def show(result: Any) -> None:
    """Prints a dict as JSON, and anything else through rich. A command to paste may be longer than a line."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(result, markup=not isinstance(result, str), crop=False)
