"""What compiling told, kept on disk by content: the config, the target, jax's version and this package's own sources.

In the user's cache directory ($XDG_CACHE_HOME, by default ~/.cache), one small JSON file each, written atomically:
any number of searches share it, and a change of any source makes new names. Deleting it loses only time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem.config import Config
from jaxmem.planning import Target

# Of a run, not of its programs.
_ELSEWHERE = {"name", "output", "seed", "checkpoint"}


def directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxmem" / "fit"


def name_of(question: str, cfg: Config, target: Target, reserve_gib: float | None) -> str:
    """The same for everything that would be answered alike."""
    return _digest(
        {
            "question": question,
            "config": cfg.model_dump(mode="json", exclude=_ELSEWHERE),
            "target": _place(target, reserve_gib),
            "versions": _versions(),
            "sources": _sources(),
        }
    )


def name_of_program(text: str, target: Target, reserve_gib: float | None) -> str:
    """Of what a program is compiled to. Many configs have the same initialiser."""
    return _digest({"program": text, "target": _place(target, reserve_gib), "versions": _versions()})


def read(name: str) -> dict[str, Any] | None:
    try:
        return json.loads((directory() / f"{name}.json").read_text())
    except (OSError, ValueError):  # not there, or not whole: it is made anew
        return None


def write(name: str, answer: dict[str, Any]) -> None:
    place = directory()
    partial = place / f".{name}.{os.getpid()}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(answer))
        partial.replace(place / f"{name}.json")
    except OSError:  # a disk that is full or read-only: the next search compiles again
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _place(target: Target, reserve_gib: float | None) -> list[Any]:
    gpu = target.gpu  # of a CPU no memory is compiled for
    return [repr(gpu), target.count, target.per_host, target.memory if gpu else 0, reserve_gib]


def _versions() -> list[str]:
    return [importlib.metadata.version(package) for package in ("jax", "jaxlib", "flax", "optax")]


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for package in ("jaxmem", "jaxmem.kernels"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for root in spec.submodule_search_locations or ():
            for file in sorted(Path(root).rglob("*.py")):
                digest.update(file.read_bytes())
    return digest.hexdigest()
