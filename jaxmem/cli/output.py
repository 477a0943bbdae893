"""Standard output of a command: one JSON object for programs, tables for people."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any


def is_first_process() -> bool:
    """Of several processes only this one prints."""
    import jax

    return jax.process_index() == 0


def print_text(text: str) -> None:
    """A part of a text, without a new line, at once."""
    if is_first_process():
        print(text, end="", flush=True)


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """With --json, sends what the library prints meanwhile to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def show(result: Any) -> None:
    """Prints a dict as JSON, and anything else through rich. A command to paste may be longer than a line."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(result, markup=not isinstance(result, str), crop=False)
