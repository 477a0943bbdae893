"""Which fields of a config a checkpoint is bound to: changed, they would make it mean something else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any

from jaxmem.config.renamed import rename
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
    "precision.block_size",  # the shapes of their constants
    "precision.master",  # a part of the optimizer's state
    "optimizer.name",  # the state's arrays
    "optimizer.trainable",  # which weights have a state
    "adapter",  # which weights there are, and what they compute
    "optimizer.rank",  # their shapes
)
FREE = (
    "model.preset",  # a name for the other fields, which are compared one by one
    "model.hf",  # where the first weights came from: these are in the checkpoint
    "adapter.dropout",
    "adapter.lora_plus_ratio",
    "adapter.base_run",  # where the first weights came from: these are in the checkpoint
    "model.dropout",
    "data.reference_logprobs",  # a place; what is there has a fingerprint of its own
    "data.chat_template",  # in the data's fingerprint
    "data.path",  # files may move: the data's fingerprint tells whether they are the same
    "data.mixture.*.path",
    "data.weight",  # a share of a mixture, and this is not one
    "data.epochs",  # only where the stream ends
)


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Which fields that bind a checkpoint differ, each as `field was X, is Y`.

    >>> changed({"seed": 0, "mesh": {"fsdp": 8}}, {"seed": 1, "mesh": {"fsdp": 4}})
    ['seed was 0, is 1']
    """
    before, after = _flat(rename(old)[0]), _flat(new)
    return [
        f"{field} was {json.dumps(before.get(field))}, is {json.dumps(after.get(field))}"
        for field in {**before, **after}
        if _among(field, BOUND) and not _among(field, FREE) and before.get(field) != after.get(field)
    ]


def refuse_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    directory: str | PathLike[str],
    fingerprints: tuple[str, str] | None = None,
) -> None:
    """Stop before a checkpoint is read as something that it is not. `fingerprints` are the data's, then and now."""
    differences = changed(old, new)
    if fingerprints and fingerprints[0] != fingerprints[1] and not differences:
        differences = [
            f"the data's files are not what they were (fingerprint {fingerprints[0]}, now {fingerprints[1]})"
        ]
    if differences:
        raise UserError(
            f"cannot go on from {directory}: {'; '.join(differences)}. Change it back, give the run another `name`,"
            " or start anew with checkpoint.resume=never (what is there is put aside, not deleted)"
        )


def _among(field: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(field, pattern) or fnmatchcase(field, f"{pattern}.*") for pattern in patterns)


def _flat(value: Any, field: str = "") -> dict[str, Any]:
    """Dotted fields, lists of sections numbered. A list of numbers is one value, and a tuple is a list, as in JSON;
    a field that is absent is as good as one that is None or empty."""
    if isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {field: list(value) or None if isinstance(value, tuple | list) else value}
    prefix = f"{field}." if field else ""
    return {name: leaf for key, item in value.items() for name, leaf in _flat(item, f"{prefix}{key}").items()}
