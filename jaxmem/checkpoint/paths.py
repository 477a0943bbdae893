"""Paths of checkpoints, local or in a bucket, and renaming of directories that must not be overwritten."""

import os
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxmem.errors import UserError

BUCKETS = {"gs": "gcsfs", "s3": "s3fs"}  # the packages with which etils opens buckets


def absolute(path: str | Path | epath.Path) -> epath.Path:
    """Symbolic links stay as they are, so that renaming a link does not rename what it points to."""
    return epath.Path(path if "://" in str(path) else Path(path).absolute())


def refuse_links(directory: str | Path | epath.Path) -> None:
    """Refuses a directory that a run would change if it is, or contains, a symbolic link: the run would write, rename
    or delete files elsewhere. Does not look into finished checkpoints, in which nothing is written, nor into `wandb`,
    where W&B makes links itself."""
    if "://" in str(directory):
        return
    paths = [Path(directory)]
    for folder, directories, files in os.walk(directory):
        paths += [Path(folder, name) for name in (*directories, *files)]
        directories[:] = [name for name in directories if not name[0].isdigit() and name != "wandb"]
    for path in paths:
        if path.is_symlink():
            raise UserError(
                f"{path} is a symbolic link to {path.readlink()}, and a run changes no files elsewhere; put the files"
                " themselves in its place, or set output or checkpoint.path to the directory that the run shall change"
            )


def checkpoint_directory(directory: str | Path, other: str | None, name: str) -> epath.Path:
    """The directory of the checkpoints of a run in `directory`. `other`: the setting `checkpoint.path`, in which they
    have the name of the run."""
    try:
        path = absolute(Path(directory, "checkpoints") if other is None else epath.Path(other, name))
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
