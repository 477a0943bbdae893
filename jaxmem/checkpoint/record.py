"""The record that a checkpoint contains besides its arrays: step, data position, config, metrics, and the shape, dtype
and checksum of each array.

The record has its own checksum.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from jaxmem.checkpoint.checksum import checksum
from jaxmem.checkpoint.orbax_errors import FAILURES, root_cause
from jaxmem.errors import UserError, few


class DamagedError(UserError):
    """A checkpoint that does not read back as it was written."""


def damaged(checkpoint: epath.Path, reason: str) -> DamagedError:
    return DamagedError(f"checkpoint {checkpoint} is damaged: {reason}")


def make_record(leaves: Mapping[str, jax.Array], **sections: Any) -> dict[str, Any]:
    saved = {name: [x.shape, str(x.dtype), checksum(x)] for name, x in leaves.items()}
    record = json.loads(json.dumps({**sections, "leaves": saved}))
    return {**record, "crc32": _crc(record)}


def read_record(checkpoint: epath.Path) -> dict[str, Any]:
    try:
        record = json.loads((checkpoint / "run" / "metadata").read_text())  # where Orbax's JsonSave stores `run`
    except FAILURES as error:
        raise damaged(checkpoint, root_cause(error)) from error
    if not isinstance(record, dict) or record.pop("crc32", None) != _crc(record):
        raise damaged(checkpoint, "its data position and config do not match their checksum")
    if record.get("step", int(checkpoint.name)) != int(checkpoint.name):
        raise damaged(checkpoint, f"it is a copy of the checkpoint of step {record['step']}")
    return record


def _crc(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by path, such as params.layers.q.weight."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def check_leaves(checkpoint: epath.Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose arrays have other names, shapes or dtypes than those of the run."""
    if unplaced := [name for name, leaf in expected.items() if leaf.sharding is None]:
        # Orbax would use the sharding that the array was saved with.
        raise ValueError(f"no sharding to restore to: {few(unplaced)}")
    wrong = []
    for name in {**saved, **expected}:
        there = f"{saved[name][1]}{list(saved[name][0])}" if name in saved else "absent"
        here = f"{expected[name].dtype}{list(expected[name].shape)}" if name in expected else "absent"
        if there != here:
            wrong.append(f"{name} is {there} in the checkpoint and {here} in this run")
    if wrong:
        other = f"checkpoint {checkpoint} is from another model or optimizer"
        raise UserError(f"{other}: {few(wrong, 3, '; ')}; use the config with which it was saved")
