"""A state's arrays by name, and whether those of a checkpoint are the ones that a run wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from jaxmem.errors import UserError


def named(tree: Any) -> dict[str, Any]:
    """Each array under its path: params.layers.q.weight."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def check_leaves(where: epath.Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if unplaced := [name for name, leaf in wanted.items() if leaf.sharding is None]:
        raise ValueError(f"no sharding to restore to: {few(unplaced)}")  # Orbax would take the one it was saved with
    wrong = []
    for name in {**saved, **wanted}:
        there = f"{saved[name][1]}{list(saved[name][0])}" if name in saved else "absent"
        here = f"{wanted[name].dtype}{list(wanted[name].shape)}" if name in wanted else "absent"
        if there != here:
            wrong.append(f"{name} is {there} in the checkpoint and {here} here")
    if wrong:
        raise UserError(f"checkpoint {where} does not fit this run: {few(wrong)}")


def few(items: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + rest
