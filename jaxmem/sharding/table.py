"""The sharding tables: for each role of an array, the mesh axes that shard each logical axis."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import jax
from jax.tree_util import KeyPath

from jaxmem.config.adapter import LOW_RANK, Adapter, low_rank_layers
from jaxmem.config.mesh import BATCH_AXES, Mesh, Rules, replicated_dims
from jaxmem.config.networks import Decoder, Model
from jaxmem.config.sections import Config


@dataclass(frozen=True)
class Axis:
    """A logical axis with options."""

    name: str
    if_even: bool = False  # replicated, instead of an error, if not divisible by the mesh axes
    like_storage: bool = False  # whether it is also sharded over STORAGE_AXES, if divisible


Axes = tuple[str | Axis | None, ...]  # a logical axis for each dimension; None: never sharded
Table = Mapping[str, tuple[str, ...]]  # logical axis -> the mesh axes that shard it; (): replicated
Role = Literal["weights", "compute", "gradients", "optimizer", "activations"]


def is_axes(x: object) -> bool:
    """Whether x is a tuple of logical axes, as opposed to an optax state tuple."""
    return type(x) is tuple and all(a is None or isinstance(a, str | Axis) for a in x)


def is_stacked(axes: Axes) -> bool:
    """Whether an array with these axes has a first dimension of layers."""
    return axes[:1] == ("layer",)


def path_name(path: KeyPath) -> str:
    """The name of a leaf in a tree, `blocks.attention.q.weight`, from its path. The value of a Flax variable has the
    name of the variable."""
    is_value_of_variable = path and path[-1] == jax.tree_util.GetAttrKey("value")
    return jax.tree_util.keystr(path[:-1] if is_value_of_variable else path, simple=True, separator=".")


def axis_name(axis: str | Axis) -> str:
    """The logical axis without its options."""
    return axis.name if isinstance(axis, Axis) else axis


def if_even(axis: str | Axis | None) -> Axis | None:
    """The axis, replicated where it cannot be sharded evenly."""
    if axis is None:
        return None
    return dataclasses.replace(axis, if_even=True) if isinstance(axis, Axis) else Axis(axis, if_even=True)


DEFAULT = Rules()
KINDS = {
    ("vocab", "embed"): "embedding",
    ("embed", "vocab"): "head",
    ("embed", "heads"): "attention",
    ("embed", "kv_heads"): "attention",
    ("heads", "embed"): "attention",
    ("embed", "mlp"): "gate_up",
    ("mlp", "embed"): "down",
    ("expert", "embed", "mlp"): "experts",
    ("expert", "mlp", "embed"): "experts",
}  # the kind of a weight, from its logical axes without `layer`
STORAGE_AXES = ("fsdp", "expert", "context")  # shard stored weights, which are gathered over them for computation
REPLICATED = (  # logical axes that no mesh axis shards
    "norm", "bias", "head_dim", "router", "rank", "projected", "height", "width", "patch", "kernel", "channels",
    "classes", "token",
)  # fmt: skip


@dataclass(frozen=True)
class ShardingTables:
    """For each role, the mesh axes that shard each logical axis. Every logical axis is listed; `()` is replicated.
    `attention.embed` is the logical axis `embed` of weights of the kind `attention`, if it has a rule of its own."""

    weights: Table  # the weights as they are stored between steps
    compute: Table  # the weights of one layer while it is computed
    gradients: Table
    optimizer: Table
    activations: Table

    def without(self, axes: Collection[str]) -> Self:
        """The tables for code that handles these mesh axes itself."""
        tables = vars(self).items()
        return type(self)(
            **{role: {dim: _without(over, *axes) for dim, over in table.items()} for role, table in tables}
        )


def make_tables(zero: int, indivisible: Collection[str] = (), section: Rules = DEFAULT) -> ShardingTables:
    """The tables of a ZeRO stage, and of the section `rules` of the config.

        zero         0         1         2         3
        optimizer    gathered  sharded   sharded   sharded
        gradients    gathered  gathered  sharded   sharded
        weights      gathered  gathered  gathered  sharded
        compute      gathered  gathered  gathered  gathered

    sharded: over the mesh axes of `section`, by default `embed` over `fsdp`, `expert` and `context`, so weights without
    it (norms, biases) are replicated. gathered: not over these STORAGE_AXES, except for experts. Devices along them
    compute with the same weights, except for experts.

    In the step only `tables_for` also reads the stage, for `rules.optimizer`. Code that depends on it compares tables:
    `optim.in_place.gather_in_place` gathers updated weights (optimizer, weights), `Layout.local_gradient_axes` are
    those over which each device accumulates gradients of its own rows (activations, gradients and compute),
    `gathering._delays` delays the gradient of x until that of the weight is reduce-scattered (gradients, compute), and
    `arrays.row_major_if_gathered` sets the memory layout between two roles.

    `indivisible` names logical axes that are not divisible by `tensor`: key and value heads are then replicated, and a
    vocabulary is stored replicated and padded in the computation. Layers that `tensor` does not shard use replicated
    weights, and each device processes its part of the sequence.
    """
    weight_dims = {dim: _with_expert(over) for dim, over in section.table.items()}
    padded_sharded: Table = {**dict.fromkeys(REPLICATED, ()), "layer": ("stage",), "expert": ("expert",), **weight_dims}
    if "kv_heads" in indivisible:
        padded_sharded = {**padded_sharded, "kv_heads": _without(padded_sharded["kv_heads"], "tensor")}
    sharded = padded_sharded
    if "vocab" in indivisible:  # only the computation pads a vocabulary
        sharded = {**padded_sharded, "vocab": _without(padded_sharded["vocab"], "tensor")}
    gathered = _gathered(sharded)
    # The projected dimension inherits the sharding of the dimension that it replaces.
    state_embed = (*sharded["embed"], *section.optimizer)
    sharded_state = {**sharded, "embed": state_embed, "projected": state_embed}
    replicated_kinds = {f"{kind}.{dim}": gathered[dim] for kind in section.replicated for dim in weight_dims}
    padded_gathered = _gathered(padded_sharded)
    logits = _with_expert(section.logits)
    compute = {**padded_gathered, "vocab": (*padded_gathered["vocab"], *logits)}
    activations: Table = {
        **compute,
        "layer": (),
        "accumulate": (),
        "batch": BATCH_AXES,
        "time": ("context",),
        "stream": ("context", "tensor"),  # the sequence dimension of the residual stream and of norms
        "mlp_time": ("context", *_without(("tensor",), *compute["mlp"])),
        "vocab_batch": _without(BATCH_AXES, *logits),
        "vocab_time": ("context", *_without(("tensor",), *compute["vocab"])),
    }
    return ShardingTables(
        weights={**sharded, **replicated_kinds} if zero >= 3 else gathered,
        compute=compute,
        gradients=sharded if zero >= 2 else gathered,
        optimizer=sharded_state if zero >= 1 else gathered,
        activations=activations,
    )


def _gathered(table: Table) -> dict[str, tuple[str, ...]]:
    """The table of weights that are gathered over STORAGE_AXES. Experts are not: each device computes its own."""
    return {dim: over if dim == "expert" else _without(over, *STORAGE_AXES) for dim, over in table.items()}


def _with_expert(over: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh axes from those in the section `rules`, where `fsdp` stands for `fsdp` and `expert`."""
    return tuple(mesh_axis for axis in over for mesh_axis in ((axis, "expert") if axis == "fsdp" else (axis,)))


def _without(over: tuple[str, ...], *axes: str) -> tuple[str, ...]:
    return tuple(axis for axis in over if axis not in axes)


def assign_mesh_axes(axes: Axes, shape: Sequence[int], table: Table, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The mesh axes that shard each dimension. If two dimensions name the same mesh axis, it shards the first one.

    If an `if_even` dimension is not divisible by an axis of STORAGE_AXES, another dimension is sharded over that axis
    instead, so that block scales are not replicated on many devices. A stack whose number of layers is not divisible by
    that of the pipeline stages is replicated: only the last stack is divided into stages, and it is padded for this.
    """
    if kind := KINDS.get(tuple(axis_name(axis) for axis in axes if axis not in ("layer", None))):
        table = {dim: table.get(f"{kind}.{dim}", over) for dim, over in table.items()}
    exact = {a for axis in axes if axis is not None and not _is_if_even(axis) for a in table[axis_name(axis)]}
    # `expert` shards experts in every role, other weights only where they are stored.
    storage = [a for a in STORAGE_AXES if any(a in over for dim, over in table.items() if dim != "expert")]
    assigned: set[str] = set()
    result = []
    left = []

    def divides(size: int, over: tuple[str, ...]) -> bool:
        return size % math.prod(mesh[a] for a in over) == 0

    for axis, size in zip(axes, shape, strict=True):
        over = () if axis is None else _without(table[axis_name(axis)], *assigned)
        if _is_if_even(axis):
            over = _without(over, *exact)
        if isinstance(axis, Axis) and axis.like_storage:
            combined = (*over, *(a for a in storage if a not in over and a not in exact and a not in assigned))
            over = combined if divides(size, combined) else over
        if _is_if_even(axis) and not divides(size, over):
            left += [a for a in over if a in storage]
            over = ()
        assigned.update(over)
        result.append(over)
    for a in _without(tuple(dict.fromkeys(left)), *assigned):
        dims = (d for d, axis in enumerate(axes) if axis is not None and axis_name(axis) not in ("layer", "vocab"))
        if (d := next((d for d in dims if divides(shape[d], (*result[d], a))), None)) is not None:
            result[d] = (*result[d], a)
    return result


def _is_if_even(axis: str | Axis | None) -> bool:
    return axis == "layer" or (isinstance(axis, Axis) and axis.if_even)


def tables_for(cfg: Config) -> ShardingTables:
    """The sharding tables of a config."""
    rules = cfg.rules
    if has_vocab_on_stages(cfg.model, cfg.mesh, cfg.rules, cfg.adapter):
        rules = rules.replace(vocab=("stage", *rules.vocab))
    if getattr(cfg.model, "tie_embeddings", False) and "head" in rules.replicated:
        rules = rules.replace(replicated=(*rules.replicated, "embedding"))
    tables = make_tables(cfg.zero, replicated_dims(cfg.model, rules, cfg.mesh), rules)
    # With several micro-batches, each of them would be reduced over `replica`.
    if rules.optimizer and cfg.zero >= 2 and cfg.batch.accumulate == 1:
        tables = dataclasses.replace(tables, gradients={**tables.gradients, "embed": tables.optimizer["embed"]})
    return tables


def has_vocab_on_stages(model: Model, mesh: Mesh, rules: Rules, adapter: Adapter) -> bool:
    """Whether pipeline stages share the embedding and output matrices, each with a part of the vocabulary."""
    if not isinstance(model, Decoder) or mesh.stage == 1:
        return False
    shards = math.prod(getattr(mesh, axis) for axis in ("stage", *rules.vocab))
    low_rank = adapter.kind in LOW_RANK
    has_adapter = low_rank and any(low_rank_layers(adapter, name, None)[0] for name in ("embedding", "head"))
    return model.vocab % shards == 0 and not has_adapter


def relax_resized(axes: Axes, shape: Sequence[int], original: Sequence[int]) -> Axes:
    """Axes of an array that may be shorter than the original (packed codes, block scales). Shorter dimensions are
    sharded only if they are divisible."""
    return tuple(
        axis if size == full else if_even(axis) for axis, size, full in zip(axes, shape, original, strict=True)
    )
