"""The reference of the Python API, from signatures and docstrings: an index and one page per public module in docs/api.

python scripts/api.py            # writes the pages
python scripts/api.py --check    # names the pages that are out of date; exit code 1 if there are any
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs/api"
MODULES = {  # the public names of each; None: its `__all__`
    "jaxmem": ("load_config", "plan", "fit", "train", "simulate", "UserError"),
    "jaxmem.optim": None,
    "jaxmem.quant": None,
    "jaxmem.adapters": None,
    "jaxmem.hf": None,
    "jaxmem.kernels": None,
    "jaxmem.models.losses": ("cross_entropy",),
    "jaxmem.distributed.communicator": ("Communicator",),
    "jaxmem.lab.parameter_server": ("ParameterServer", "train", "busiest_link"),
}
HEAD = """# Python API

For training loops of your own. One page per module, from signatures and docstrings (`python scripts/api.py` writes
them; the examples are run by the tests). The config has a reference of its own: `jaxmem schema`.

| module | names |
| --- | --- |
"""


def pages() -> dict[str, str]:
    """The text of each file of docs/api, by its name."""
    index, found = HEAD, {}
    for name, names in MODULES.items():
        module = importlib.import_module(name)
        entries = {one: getattr(module, one) for one in names or module.__all__ if callable(getattr(module, one))}
        file = f"{name.removeprefix('jaxmem.')}.md"
        index += f"| [{name}]({file}) | {', '.join(f'`{one}`' for one in entries)} |\n"
        parts = [f"# {name}", _markdown(module.__doc__)]
        for one, value in entries.items():
            parts += _entry(one, value)
        found[file] = "\n\n".join(part for part in parts if part) + "\n"
    return {"README.md": index, **found}


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"## `{name}`"
    yield f"```python\n{_signature(name, value)}\n```"
    yield _markdown(_docstring(value))
    if inspect.isclass(value):
        members = [(key, one) for key, one in vars(value).items() if not key.startswith("_")]
        methods = [(key, one) for key, one in members if inspect.isfunction(one) and inspect.getdoc(one)]
        yield "\n".join(f"- `{_signature(key, one)}`: {_summary(one)}" for key, one in methods)


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except ValueError:  # a class that only annotates
        return name
    # A function as a default has an address, which differs from run to run.
    parameters = [
        one.replace(default=...) if inspect.isfunction(one.default) else one
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    text = _clean(f"{name}{signature.replace(parameters=parameters)}").replace(" -> None", "")
    if len(text) <= 100:
        return text
    lines = textwrap.indent(",\n".join(_clean(str(one)) for one in parameters), "    ")
    return f"{name}(\n{lines},\n){text.rpartition(')')[2]}"


def _clean(text: str) -> str:
    return text.replace("'", "").replace("Ellipsis", "...")


def _docstring(value: Any) -> str | None:
    """Its own docstring; None where it inherits one, or where dataclasses wrote it."""
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return None if own and own.startswith(f"{getattr(value, '__name__', '')}(") else own


def _markdown(docstring: str | None) -> str:
    """A docstring with its examples in a block of code."""
    prose, mark, example = inspect.cleandoc(docstring or "").partition(">>> ")
    return "\n\n".join(part for part in (prose.strip(), f"```python\n{mark}{example}\n```" if mark else "") if part)


def _summary(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def main(*arguments: str) -> int:
    made = pages()
    here = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    stale = sorted(name for name in made.keys() | here.keys() if made.get(name) != here.get(name))
    if arguments == ("--check",):
        for name in stale:
            print(f"docs/api/{name} is out of date; run python scripts/api.py")
        return int(bool(stale))
    for name in stale:
        (FOLDER / name).unlink() if name not in made else (FOLDER / name).write_text(made[name], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
