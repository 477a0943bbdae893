"""The settings that a search may change: one line per setting, with the `--allow` word that permits it.

A knob returns the values to try for a config and a target, each as dotted overrides; invalid combinations are dropped
later. If the type of a setting in the config lists its values, the knob needs only the key: a new recompute policy or
optimizer is tried without a change here.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Le

from jaxmem.config import LOW_RANK, MESH_AXES, Adapter, Config, Decoder, Optimizer, Precision
from jaxmem.config.check import weight_kinds
from jaxmem.config.devices import meshes
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.errors import UserError, nearest
from jaxmem.planning import Target
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding import RULE_AXES
from jaxmem.typing import JsonView

Change = JsonView  # {dotted key: value}
# Mesh axes to try for a dimension. RULE_AXES have an effect only on the first dimension of a weight that names them.
_FORMS = ((), ("tensor",), RULE_AXES, ("tensor", *RULE_AXES))


@dataclass(frozen=True)
class Knob:
    allow: str  # the word of `--allow` that permits the setting
    choices: Callable[[Config, Target], Iterable[Change]]


def constant(*changes: Change) -> Callable[[Config, Target], Iterable[Change]]:
    """A knob for values that depend on neither the config nor the target."""
    return lambda _cfg, _target: changes


def listed(key: str) -> Callable[[Config, Target], Iterable[Change]]:
    """A knob for every value that the type of a key lists."""
    return lambda _cfg, _target: ({key: value} for value in values(key))


def values(key: str) -> Sequence[Any]:
    """The values that the type of a key lists: names, or a range of integers.

    >>> values("zero"), values("memory.remat")[:2]
    ((0, 1, 2, 3), ('none', 'full'))
    """
    *sections, last = key.split(".")
    section: Any = Config
    for name in sections:
        section = section.model_fields[name].annotation
    field = section.model_fields[last]
    least = next((limit.ge for limit in field.metadata if isinstance(limit, Ge)), None)
    most = next((limit.le for limit in field.metadata if isinstance(limit, Le)), None)
    if isinstance(least, int) and isinstance(most, int):
        return tuple(range(least, most + 1))
    return tuple(dict.fromkeys(_names(field.annotation)))


def _names(annotation: Any) -> Iterable[Any]:
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


def _compute_dtypes(_cfg: Config, target: Target) -> Iterable[Change]:
    """Dtypes to compute in; float16 only with loss scaling. The dtype that `auto` resolves to is tried as `auto`."""
    usual = compute_dtype(Precision(), target.platform).name
    for name in values("precision.compute"):
        if name == usual:
            continue
        yield {"precision.compute": name, "precision.loss_scale": "dynamic" if name == "float16" else "none"}


def _optimizers(cfg: Config, _: Target) -> Iterable[Change]:
    """Each optimizer, with its defaults for fields that only some optimizers have."""
    fields = [field for field, info in Optimizer.model_fields.items() if info.default is None]
    for name in OPTIMIZERS:
        given = cfg.optimizer if name == cfg.optimizer.name else None
        yield {"optimizer.name": name, **{f"optimizer.{field}": getattr(given, field, None) for field in fields}}


def _adapters(cfg: Config, _: Target) -> Iterable[Change]:
    """All weights trainable, LoRA, and QLoRA. Other kinds of adapters train other parameters, so they are not tried."""
    given = cfg.adapter
    low_rank = cfg.adapter.kind in LOW_RANK
    for kind in ("none", "lora", "qlora"):
        base = given.replace(base=None, double_quant=True) if low_rank and kind != "none" else Adapter()
        adapter = given if kind == given.kind else base.replace(kind=kind)
        yield {f"adapter.{field}": value for field, value in adapter}


def _attention_rules(cfg: Config, _: Target) -> Iterable[Change]:
    """Whether `tensor` shards attention, and which dimension of its weights is sharded in storage. Key projections are
    [embed, kv_heads]: `embed` is sharded in storage, so only `tensor` shards `kv_heads`."""
    for form in _FORMS if "heads" in cfg.model.dims() else ():
        tensor = tuple(axis for axis in form if axis == "tensor")
        yield {"rules.embed": RULE_AXES, "rules.heads": form, "rules.kv_heads": tensor}


def _mlp_rules(cfg: Config, _: Target) -> Iterable[Change]:
    """Whether `tensor` shards the MLP, and which dimension of its weights is sharded in storage."""
    return ({"rules.embed": RULE_AXES, "rules.mlp": form} for form in _FORMS if "mlp" in cfg.model.dims())


def _logit_rules(cfg: Config, _: Target) -> Iterable[Change]:
    """The mesh axes that shard logits by vocabulary; the others shard them by token."""
    if isinstance(cfg.model, Decoder):
        for over in itertools.product(((), ("tensor",)), ((), ("fsdp",))):
            yield dict(zip(("rules.vocab", "rules.logits"), over, strict=True))


def _replicated_kinds(cfg: Config, _: Target) -> Iterable[Change]:
    """Every set of kinds of weights that are not gathered for each micro-batch."""
    kinds = weight_kinds(cfg.model)
    sets = itertools.chain.from_iterable(itertools.combinations(kinds, size) for size in range(len(kinds) + 1))
    return ({"rules.replicated": kinds} for kinds in sets)


def _kernels(key: str) -> Callable[[Config, Target], Iterable[Change]]:
    """The implementations of one operation. On CPUs only `auto` is tried."""
    return lambda _, target: () if target.is_cpu else ({key: value} for value in values(key))


def _experts(cfg: Config, target: Target) -> Iterable[Change]:
    """The implementations of a mixture of experts."""
    return _kernels("memory.experts")(cfg, target) if getattr(cfg.model, "experts", None) else ()


def _everywhere(_: Config, target: Target) -> Iterable[Change]:
    """Weights, gradients and optimizer state sharded over all devices."""
    yield {f"mesh.{axis}": target.count if axis == "fsdp" else 1 for axis in MESH_AXES} | {"zero": 3}


KERNELS, RULES = "kernels", "rules"
# Formats below 8 bits lower the accuracy.
_STORED = [{"precision.parameters": name, "precision.block_size": None} for name in ("float32", "bfloat16", "int8")]
# The words of DEFAULT_ALLOW do not change the mathematics.
KNOBS = (
    Knob("mesh", _meshes),
    Knob("mesh", listed("zero")),
    Knob(RULES, _attention_rules),
    Knob(RULES, _mlp_rules),
    Knob(RULES, _logit_rules),
    Knob(RULES, _replicated_kinds),
    Knob(RULES, constant({"rules.optimizer": ()}, {"rules.optimizer": ("replica",)})),
    Knob("remat", _policies),
    Knob("offload", _offloads),
    Knob("update", listed("memory.update")),
    Knob("batch", _micro_batches),
    Knob("chunks", _loss_chunks),
    Knob("chunks", _mlp_chunks),
    Knob(KERNELS, _kernels("memory.attention")),
    Knob(KERNELS, _experts),
    Knob(KERNELS, _kernels("optimizer.kernel")),
    Knob("precision", constant(*_STORED)),
    Knob("precision", listed("precision.master")),
    Knob("precision", _compute_dtypes),
    Knob("optimizer", _optimizers),
    Knob("adapter", _adapters),
)
DEFAULT_ALLOW = ("mesh", "remat", "offload", "update", "batch", "chunks", KERNELS)
# A much smaller search within one training method, used when several methods are compared.
MEMORY_KNOBS = (
    Knob("mesh", _everywhere),
    *(knob for knob in KNOBS if knob.allow in ("remat", "offload", "update", "batch")),
)


def allowed(words: Sequence[str]) -> list[Knob]:
    """The knobs that these words permit."""
    known = list(dict.fromkeys(knob.allow for knob in KNOBS))
    for word in words:
        if word not in known:
            raise UserError(f"--allow {word} is unknown{nearest(word, known)}")
    return [knob for knob in KNOBS if knob.allow in words]
