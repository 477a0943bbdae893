"""The API's reference, docs/api.md, from signatures and docstrings: `python scripts/api.py`.

The examples in docstrings are run by the tests.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "docs/api.md"
ROOMS = {  # what a loop of one's own is made of; None: all that it says is public
    "jaxmem": ("load_config", "plan", "fit", "train", "UserError"),
    "jaxmem.optim": None,
    "jaxmem.quant": None,
    "jaxmem.adapters": None,
    "jaxmem.hf": None,
    "jaxmem.kernels": None,
    "jaxmem.models.losses": ("cross_entropy",),
    "jaxmem.lab.parameter_server": ("ParameterServer", "train", "busiest_link"),
    "jaxmem.distributed.communicator": ("Communicator",),
}


def reference() -> str:
    parts = ["# From Python", "What each name takes and does, from its docstring. Made by `python scripts/api.py`."]
    for room, names in ROOMS.items():
        module = importlib.import_module(room)
        parts.append(f"## {room}")
        if names is None:
            parts.append(_prose(module))
        for name in names or module.__all__:
            parts += _entry(name, getattr(module, name))
    return "\n\n".join(part for part in parts if part) + "\n"


def _entry(name: str, thing: Any) -> Iterator[str]:
    if not callable(thing):
        return
    yield f"### `{name}`"
    yield f"```python\n{_signature(name, thing)}\n```"
    yield _prose(thing)
    if inspect.isclass(thing):
        methods = [
            (own, found)
            for own, found in vars(thing).items()
            if not own.startswith("_") and inspect.isfunction(found) and inspect.getdoc(found)
        ]
        if methods:
            yield "\n".join(f"- `{_signature(own, found)}`: {_first(found)}" for own, found in methods)


def _signature(name: str, thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except ValueError:  # a class that only annotates
        return name
    parameters = [_told(one) for one in signature.parameters.values() if one.name != "self"]
    text = (
        f"{name}{signature.replace(parameters=parameters)}".replace("'", "")
        .replace("Ellipsis", "...")
        .replace(" -> None", "")
    )
    if len(text) <= 100:
        return text
    head, _, result = text.rpartition(")")
    lines = textwrap.indent(
        ",\n".join(str(one).replace("'", "").replace("Ellipsis", "...") for one in parameters), "    "
    )
    return f"{head[: head.index('(')]}(\n{lines},\n){result}"


def _told(one: inspect.Parameter) -> inspect.Parameter:
    """A function as a default has an address, which nobody need know."""
    return one.replace(default=...) if inspect.isfunction(one.default) else one


def _prose(thing: Any) -> str:
    """A docstring as Markdown: its examples set apart."""
    own = thing.__doc__ if inspect.ismodule(thing) or inspect.isfunction(thing) else vars(thing).get("__doc__")
    if not own or own.startswith(f"{getattr(thing, '__name__', '')}("):  # a dataclass's own
        return ""
    text = inspect.cleandoc(own)
    prose, mark, example = text.partition(">>> ")
    return "\n\n".join(part for part in (prose.strip(), f"```python\n{mark}{example}\n```" if mark else "") if part)


def _first(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
