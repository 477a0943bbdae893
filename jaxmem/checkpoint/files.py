"""Paths, local or in a bucket, and moving out of the way what must not be lost."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from etils import epath


def absolute(path: str | Path | epath.Path) -> epath.Path:
    return epath.Path(path) if "://" in str(path) else epath.Path(Path(path).resolve())


def put_aside(path: str | Path | epath.Path) -> epath.Path | None:
    """Rename what lies at `path` to `NAME.old-1` (or the next free number), so that nothing of it is mixed with what
    comes, and nothing is lost. None if there is nothing. `checkpoint.resume=never` starts with this."""
    path = absolute(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        target = None
    else:
        stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
        numbered = (path.parent / f"{stem}.old-{n}{suffix}" for n in range(1, 1 << 20))
        target = next(candidate for candidate in numbered if not candidate.exists())
    ocp.multihost.sync_global_processes(f"put aside: looked at {path.name}")
    if target is not None and jax.process_index() == 0:
        path.rename(target)
    ocp.multihost.sync_global_processes(f"put aside: moved {path.name}")
    return target
