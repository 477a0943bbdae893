"""The settings that a search may change: one line per setting, with the `--allow` word that permits it.

A knob returns the values to try for a config and a target, each as dotted overrides; invalid combinations are dropped
later. Values that the type of a setting lists are read from there, so a new recompute policy is tried without a change
here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from jaxmem.config import MESH_AXES, Config, Decoder
from jaxmem.config.devices import meshes
from jaxmem.errors import UserError, nearest
from jaxmem.planning.targets import Target
from jaxmem.typing import JsonView

Change = JsonView  # {dotted key: value}


@dataclass(frozen=True)
class Knob:
    allow: str  # the word of `--allow` that permits the setting
    choices: Callable[[Config, Target], Iterable[Change]]


def values(key: str) -> Sequence[str]:
    """The names that the type of a key lists.

    >>> values("memory.update"), values("memory.remat")[:2]
    (('after', 'during'), ('none', 'full'))
    """
    *sections, last = key.split(".")
    section: Any = Config
    for name in sections:
        section = section.model_fields[name].annotation
    return tuple(dict.fromkeys(_names(section.model_fields[last].annotation)))


def _names(annotation: object) -> Iterable[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is not Annotated:
        for part in get_args(annotation):
            yield from _names(part)


# 1F1B with one and with several groups of layers per stage. GPipe and the circular schedule take as long, with more
# memory.
_SCHEDULES: list[Change] = [{"pipeline.schedule": "auto", "pipeline.rounds": rounds} for rounds in (1, 2, 4)]


def _meshes(cfg: Config, target: Target) -> Iterable[Change]:
    """Every factorization of the device count over the mesh axes; with stages, each with every schedule."""
    axes = [axis for axis in MESH_AXES if axis != "expert" or getattr(cfg.model, "experts", None) is not None]
    for sizes in meshes(target.count, axes):
        mesh = {f"mesh.{axis}": sizes[axis] for axis in axes}
        yield from ({**mesh, **schedule} for schedule in (_SCHEDULES if sizes["stage"] > 1 else _SCHEDULES[:1]))


def _zero(_cfg: Config, _target: Target) -> Iterable[Change]:
    return ({"zero": level} for level in range(4))


def _micro_batches(cfg: Config, _: Target) -> Iterable[Change]:
    """Every number of micro-batches that divides the global batch; its size does not change."""
    size = cfg.batch.global_size
    return ({"batch.accumulate": parts} for parts in range(1, size + 1) if size % parts == 0)


def _policies(_cfg: Config, _target: Target) -> Iterable[Change]:
    """All policies except `auto`, which is itself a search. Of the policies that save the inputs of only some layers,
    `sqrt` is tried: the others need a number, or much more time for slightly less memory."""
    for name in values("memory.remat"):
        if name not in ("recursive", "constant", "auto"):
            yield {"memory.remat": name}


def _updates(_cfg: Config, _target: Target) -> Iterable[Change]:
    return ({"memory.update": name} for name in values("memory.update"))


def _loss_chunks(cfg: Config, _: Target) -> Iterable[Change]:
    """The automatic slices of the vocabulary, or complete logits."""
    if isinstance(cfg.model, Decoder):
        yield from ({"memory.loss_chunk": chunk} for chunk in ("auto", cfg.model.vocab))


def _mlp_chunks(cfg: Config, _: Target) -> Iterable[Change]:
    """The automatic chunks of a sequence, or eighths of a sequence: less activation memory, more time."""
    if isinstance(cfg.model, Decoder) and cfg.data.sequence_length >= 8:
        yield from ({"memory.mlp_chunk": chunk} for chunk in ("auto", cfg.data.sequence_length // 8))


def _offloads(cfg: Config, target: Target) -> Iterable[Change]:
    """Each kind of array that can be offloaded, or two kinds; nothing on CPUs, which have only one memory."""
    both = ("activations", "frozen" if cfg.trainable_patterns else "optimizer")
    single = [name for name in values("memory.offload") if cfg.trainable_patterns or name != "frozen"]
    return () if target.is_cpu else ({"memory.offload": name} for name in (*single, both))


def _everywhere(_: Config, target: Target) -> Iterable[Change]:
    """Weights, gradients and optimizer state sharded over all devices."""
    yield {f"mesh.{axis}": target.count if axis == "fsdp" else 1 for axis in MESH_AXES} | {"zero": 3}


# None of them changes the mathematics; the methods of training do (`config.methods`).
KNOBS = (
    Knob("mesh", _meshes),
    Knob("mesh", _zero),
    Knob("remat", _policies),
    Knob("offload", _offloads),
    Knob("update", _updates),
    Knob("batch", _micro_batches),
    Knob("chunks", _loss_chunks),
    Knob("chunks", _mlp_chunks),
)
DEFAULT_ALLOW = tuple(dict.fromkeys(knob.allow for knob in KNOBS))
# A much smaller search within one training method, used when several methods are compared.
MEMORY_KNOBS = (
    Knob("mesh", _everywhere),
    *(knob for knob in KNOBS if knob.allow in ("remat", "offload", "update", "batch")),
)


def allowed(words: Sequence[str]) -> list[Knob]:
    """The knobs that these words permit."""
    for word in words:
        if word not in DEFAULT_ALLOW:
            raise UserError(f"--allow {word} is unknown{nearest(word, DEFAULT_ALLOW)}")
    return [knob for knob in KNOBS if knob.allow in words]
