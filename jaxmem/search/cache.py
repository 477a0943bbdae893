"""Compiler answers cached on disk by content: the config, the target, jax's version and this package's sources.

They are in the user's cache directory ($XDG_CACHE_HOME, by default ~/.cache), one small JSON file each, written
atomically, so that searches can share them. If a source file of the package changes, the keys change. The directory can
be deleted at any time; configs are then compiled again.
"""

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

_IRRELEVANT = {"name", "output", "seed", "checkpoint"}  # keys that do not change any program


def directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxmem" / "fit"


def config_key(question: str, cfg: Config, target: Target, reserve_gib: float | None) -> str:
    """The key of a question about a config: equal for all configs with the same answer."""
    config = cfg.model_dump(mode="json", exclude=_IRRELEVANT)
    return _digest({"question": question, "config": config, "sources": _sources()} | _machine(target, reserve_gib))


def program_key(text: str, target: Target, reserve_gib: float | None) -> str:
    """The key of a lowered program. Many configs share a program, such as the initialization."""
    return _digest({"program": text} | _machine(target, reserve_gib))


def read(key: str) -> dict[str, Any] | None:
    """The answer; None if the file does not exist or is incomplete."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory() / f"{key}.json").read_text())
    return None


def write(key: str, answer: dict[str, Any]) -> None:
    folder = directory()
    partial = folder / f".{key}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(answer))
        partial.replace(folder / f"{key}.json")
    except OSError:  # the disk is full or read-only: the next search compiles again
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _machine(target: Target, reserve_gib: float | None) -> dict[str, Any]:
    gpu = target.gpu  # programs for CPUs do not depend on the memory
    return {
        "target": [repr(gpu), target.count, target.per_host, target.memory if gpu else 0, reserve_gib],
        "versions": [importlib.metadata.version(package) for package in ("jax", "jaxlib", "flax", "optax")],
    }


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
