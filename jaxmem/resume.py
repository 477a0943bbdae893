"""Which fields of a config a checkpoint is bound to: changed, they would make it mean something else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from jaxmem.errors import UserError

# Changed, these make a checkpoint mean something else. All other fields may change: what the machine is (mesh, zero,
# memory, batch.accumulate, precision.compute: the state is resharded, the numbers agree to rounding), how long and
# how fast to learn (train, learning rate, betas, dropout, smoothing: what is loaded keeps its meaning),
# what is kept and shown (checkpoint, trackers).
BOUND = (
    "seed",  # orders the data: the saved position would be of other batches
    "objective.name",  # the optimizer's moments are of the old loss, and the best loss is not comparable
    "model",  # the weights' shapes, or what they compute
    "data",  # the position counts rows of exactly this stream
    "batch.global_size",  # the position is at a multiple of it
    "precision.parameters",  # the dtype of the weights
    "optimizer.name",  # the state's arrays
)
FREE = (
    "model.preset",  # a name for the other fields, which are compared one by one
    "model.dropout",
    "data.path",  # files may move; the data's fingerprint inside the position tells whether they are the same
    "data.weight",  # a share of a mixture, and this is not one
    "data.epochs",  # only where the stream ends
)


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Which fields that bind a checkpoint differ, each as `field was X, is Y`.

    >>> changed({"seed": 0, "mesh": {"fsdp": 8}}, {"seed": 1, "mesh": {"fsdp": 4}})
    ['seed was 0, is 1']
    """
    before, after = _flat(old), _flat(new)
    return [
        f"{field} was {json.dumps(before.get(field))}, is {json.dumps(after.get(field))}"
        for field in {**before, **after}
        if _under(field, BOUND) and not _under(field, FREE) and before.get(field) != after.get(field)
    ]


def refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any], directory: str | PathLike[str]) -> None:
    """Stop before a checkpoint is read as something that it is not."""
    differences = changed(old, new)
    if differences:
        raise UserError(
            f"cannot go on from {directory}: {'; '.join(differences)}. Change it back, give the run another `name`,"
            " or start anew with checkpoint.resume=never (what is there is put aside, not deleted)"
        )


def _under(field: str, prefixes: Sequence[str]) -> bool:
    return any(field == prefix or field.startswith(f"{prefix}.") for prefix in prefixes)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted fields. A list is one value, and a tuple is what JSON makes of it; a missing field is as good as None."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.loads(json.dumps(value))
    return flat
