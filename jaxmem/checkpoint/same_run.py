"""The config fields that a checkpoint depends on: a run with other values must not resume from it."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from os import PathLike

from jaxmem.errors import UserError, as_yaml
from jaxmem.typing import JsonDict, JsonView

# All other fields may change: settings of the machine (mesh, zero, memory, batch.accumulate, precision.compute; the
# state is resharded, and losses agree to rounding), of the training (train, learning rate, betas, dropout, smoothing),
# and of what is saved and logged (checkpoint, trackers).
FIXED_KEYS = (
    "seed",  # the order of the data: the saved position would belong to other batches
    "objective.name",  # the optimizer's moments belong to the old loss, and the best loss is not comparable
    "model",  # shapes of the weights, or the function that they compute
    "data",  # the position counts rows of this stream
    "batch.global_size",  # the position in the data is a multiple of this size
    "precision.parameters",  # dtype of the weights
    "precision.block_size",  # shapes of the scales of quantized weights
    "precision.master",  # a part of the optimizer state
    "optimizer.name",  # the arrays of the optimizer state
    "optimizer.trainable",  # the weights that have optimizer state
    "adapter",  # the set of weights, and the function that they compute
    "optimizer.rank",  # shapes of the optimizer state
)
# Other values are supported, but the state has other arrays if these functions of the values differ.
STATE_KEYS = {
    "optimizer.clip": bool,
    "optimizer.clip_by": lambda norm: norm == "previous",
    "optimizer.weight_decay": bool,
    "optimizer.momentum": bool,
    "optimizer.project_embeddings": bool,
    "precision.loss_scale": lambda scale: scale in (None, "none"),
}
SOURCE_KEYS = (  # files may move
    "model.hf",  # source of the initial weights; those that are not in the checkpoint have their own fingerprint
    "adapter.base_run",  # source of the initial weights, which are in the checkpoint
    "data.path",  # the fingerprint of the data shows whether files, tokenizer and template are the same
    "data.mixture.*.path",
    "data.tokenizer",
    "data.chat_template",
    "data.reference_logprobs",  # the file has its own fingerprint
)
CHANGEABLE_KEYS = (
    *SOURCE_KEYS,
    "model.preset",  # a name for other fields, which are compared one by one
    "model.quantization.layers",  # derived from config.json; another version may list the layers in another way
    "model.dropout",
    "adapter.dropout",
    "adapter.lora_plus_ratio",
    "data.weight",  # only used in a mixture
    "data.epochs",  # changes only the end of the stream
    "data.on_invalid",  # a record that is skipped has no tokens, and keeps its number
    "data.documents_per_row",  # changes only later rows; a position is a record and a token
)
PROCESS_KEYS = (  # each process may have other values: paths of the same files on its host, and what observes it
    *SOURCE_KEYS,
    "adapter.hf",
    "output",
    "checkpoint.path",
    "train.trackers",
    "train.profile",
)


def changed(
    old: JsonView,
    new: JsonView,
    fields: Sequence[str] = FIXED_KEYS,
    without: Sequence[str] = CHANGEABLE_KEYS,
    text: str = "{} was {}, is {}",
) -> list[str]:
    """The fields that differ, by default of FIXED_KEYS, each as a text of the field and its two values.

    >>> changed({"seed": 0, "mesh": {"fsdp": 8}}, {"seed": 1, "mesh": {"fsdp": 4}})
    ['seed was 0, is 1']
    """
    before = _flat(old)
    after = _flat(new)
    return [
        text.format(field, as_yaml(before.get(field)), as_yaml(after.get(field)))
        for field in {**before, **after}
        if _is_in(field, fields) and not _is_in(field, without) and _value(before, field) != _value(after, field)
    ]


def refuse_changes(
    old: JsonView,
    new: JsonView,
    directory: str | PathLike[str],
    fingerprints: tuple[str, str] | None = None,
) -> None:
    """Refuses to resume with another config or other data. `fingerprints`: of the data then and now."""
    differences = [*changed(old, new), *_changed_state(old, new)]
    if fingerprints and fingerprints[0] != fingerprints[1] and not differences:
        before, now = fingerprints
        differences = [f"the data files or the tokenizer have changed (fingerprint was {before}, is {now})"]
    if differences:
        raise UserError(
            f"cannot resume from {directory}: {', '.join(differences)}; undo the change, start a new run with name=...,"
            " or start from step 0 with checkpoint.resume=never (the old run is renamed, not deleted)"
        )


def _changed_state(old: JsonView, new: JsonView) -> list[str]:
    """Changed values of STATE_KEYS with which the optimizer state has other arrays."""
    before = _flat(old)
    after = _flat(new)
    fields = [
        field for field, state_of in STATE_KEYS.items() if state_of(before.get(field)) != state_of(after.get(field))
    ]
    return changed(old, new, fields)


def _is_in(field: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(field, pattern) or fnmatchcase(field, f"{pattern}.*") for pattern in patterns)


def _value(fields: JsonView, field: str) -> object:
    """The value of a field; false if it is absent, since configs of earlier versions lack later settings. Of patterns
    the first match applies, so their order is a part of the value."""
    value = fields.get(field)
    return [*value.items()] if isinstance(value, Mapping) else None if value is False else value


def _flat(value: object, field: str = "") -> JsonDict:
    """Values by dotted field; lists of sections are numbered. A list of numbers is one value, and so is a mapping of
    patterns; a tuple is a list, as in JSON; an absent field equals one that is None or empty."""
    if isinstance(value, Mapping) and value and not all(key.isidentifier() for key in value):
        return {field: value}
    if isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {field: list(value) or None if isinstance(value, tuple | list) else value}
    prefix = f"{field}." if field else ""
    return {name: leaf for key, item in value.items() for name, leaf in _flat(item, f"{prefix}{key}").items()}
