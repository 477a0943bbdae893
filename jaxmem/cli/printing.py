"""What a command leaves on standard output: one JSON object for machines, tables for people."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any


def is_first() -> bool:
    """Of several processes, the one that prints."""
    import jax

    return jax.process_index() == 0


def say(piece: str) -> None:
    if is_first():
        print(piece, end="", flush=True)


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """With --json, what the library says on the way goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def show(result: Any) -> None:
    """A dict as JSON; anything else is for people and printed by rich."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(result, markup=not isinstance(result, str))
