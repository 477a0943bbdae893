"""Paths of checkpoints, local or in a bucket, and renaming of directories that must not be overwritten."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxmem.config import Config
from jaxmem.errors import UserError

BUCKETS = {"gs": "gcsfs", "s3": "s3fs"}  # the packages with which etils opens buckets


def absolute(path: str | Path | epath.Path) -> epath.Path:
    if "://" in str(path):
        return epath.Path(path)
    loop = UserError(f"{path} is a symbolic link to itself; remove it")
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError) as error:  # Python below 3.13 raises a RuntimeError for a loop of links
        raise loop from error
    if resolved.is_symlink():  # Python 3.13 returns the link
        raise loop
    return epath.Path(resolved)


def checkpoint_directory(cfg: Config, directory: str | Path) -> epath.Path:
    """The directory of the checkpoints of a run in `directory`."""
    other = cfg.checkpoint.path
    try:
        path = absolute(Path(directory, "checkpoints") if other is None else epath.Path(other, cfg.name))
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is not a directory; remove it, or set checkpoint.path to another directory")
    except ImportError as error:
        package = BUCKETS.get(str(other).partition("://")[0], error.name)
        raise UserError(f"checkpoint.path={other} requires the package {package}; run pip install {package}") from error
    return path


def move_aside(path: str | Path | epath.Path, *, if_empty: bool = False) -> epath.Path | None:
    """Renames `path` to `NAME.old-1` (or the next free number), so that its files are not overwritten or mixed with new
    ones. Returns the new name, or None if `path` does not exist or is an empty directory (with `if_empty`, empty
    directories are renamed too). All processes call it together; process 0 renames."""
    path = absolute(path)
    target = None
    if path.exists() and (if_empty or path.is_file() or any(path.iterdir())):
        target = free_name(path)
    ocp.multihost.sync_global_processes(f"move aside: looked at {path.name}")
    if target is not None and jax.process_index() == 0:
        path.rename(target)
    ocp.multihost.sync_global_processes(f"move aside: renamed {path.name}")
    return target


def free_name(path: epath.Path) -> epath.Path:
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    numbered = (path.parent / f"{stem}.old-{n}{suffix}" for n in range(1, 1 << 20))
    return next(candidate for candidate in numbered if not candidate.exists())
