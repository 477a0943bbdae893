"""A cache of compiler answers on disk, by config, target, version of jax and the sources of this package.

Each answer is a small JSON file in the user's cache directory ($XDG_CACHE_HOME, by default ~/.cache), written
atomically, so that searches can share it. The directory can be deleted at any time; configs are then compiled again.
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
    """The key of a question about a config; configs with the same answer have the same key."""
    config = cfg.model_dump(mode="json", exclude=_IRRELEVANT)
    return _key({"question": question, "config": config, "sources": _sources()}, target, reserve_gib)


def program_key(text: str, target: Target, reserve_gib: float | None) -> str:
    """The key of a lowered program. Many configs share a program, such as the initialization."""
    return _key({"program": text}, target, reserve_gib)


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


def _key(content: Mapping[str, Any], target: Target, reserve_gib: float | None) -> str:
    gpu = target.gpu  # programs for CPUs do not depend on the memory
    machine = [repr(gpu), target.count, target.per_host, target.memory if gpu else 0, reserve_gib]
    versions = [importlib.metadata.version(package) for package in ("jax", "jaxlib", "flax", "optax")]
    all_content = {**content, "target": machine, "versions": versions}
    return hashlib.sha256(json.dumps(all_content, sort_keys=True).encode()).hexdigest()


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
