"""How arrays lie on devices: one table from logical axes to mesh axes.

A weight names its dimensions once, where it is declared (`("embed", "mlp")`). A `Rules` object
says, for each role an array plays, which mesh axes split which logical axis. Data parallelism,
ZeRO 1-3 (Rajbhandari et al., arXiv:1910.02054), hybrid sharding and tensor parallelism
(Shoeybi et al., arXiv:1909.08053) are different tables, not different code; XLA's partitioner
derives the collectives. With P parameters over F devices of `fsdp`, the bytes of an array in
a role fall by F exactly where its table names `fsdp`.

This is the only file that mentions PartitionSpec. Models call `constrain` and `gather`; both do
nothing outside `with layout:`, so a model also runs in anyone's own loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as InMemory
from jax.experimental.layout import with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxmem import config, host
from jaxmem.config import Config, undivided
from jaxmem.errors import UserError, nearest
from jaxmem.quant import QTensor
from jaxmem.weights import Point, Weight, is_quantized

Axes = tuple[str | None, ...]  # a logical name for each dimension; None: nothing may split it
Table = Mapping[str, tuple[str, ...]]  # logical axis -> the mesh axes that split it; (): whole
Role = Literal["weights", "computing", "gradients", "optimizer", "activations"]


def is_axes(x: Any) -> bool:
    """A tuple of axis names, not one of optax's tuples of states."""
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


# Outermost first: neighbours along the last axis share the fastest links.
MESH_AXES = ("stage", "replica", "fsdp", "context", "tensor")

USUAL: Table = config.Rules().table
RESTING = ("fsdp", "context")  # split what rests; where it is computed with it is whole over them

ALSO = "+"  # ends the name of an axis that rests split over `RESTING` too, where that comes out even
IF_EVEN = "?"  # ends the name of an axis that is split where that comes out even, and whole otherwise

GATHERED = "gathered_weight"  # the checkpoint name of a weight as it is computed with


@dataclass(frozen=True)
class Rules:
    """For each role, which mesh axes split which logical axis. Every axis is listed: `()` is whole."""

    weights: Table  # as they rest between steps
    computing: Table  # one layer's weights while it runs
    gradients: Table
    optimizer: Table
    activations: Table


def rules(zero: int, undivided: Collection[str] = (), dims: Table = USUAL) -> Rules:
    """The table of a ZeRO stage: 1 splits the optimizer's state over `fsdp`, 2 also gradients, 3 also weights.

    Devices along `context` compute with the same weights as those along `fsdp`, so what is split lies over both.
    `undivided`: axes that `tensor` does not divide. Key and value heads are then whole on each of its devices; a
    vocabulary is whole where it rests, and padded where it is computed with. `dims`: the config's own table. What
    `tensor` does not split is computed with whole, each device on its own part of the time.
    """
    own = "norm", "head_dim", "rank", "projected", "height", "width", "patch", "kernel", "channels", "classes"
    split: Table = {**dict.fromkeys(own, ()), "layer": ("stage",), **dims}
    if "kv_heads" in undivided:
        split = {**split, "kv_heads": _without(split["kv_heads"], "tensor")}
    padded = {axis: _without(over, *RESTING) for axis, over in split.items()}
    if "vocab" in undivided:
        split = {**split, "vocab": _without(split["vocab"], "tensor")}
    tensor = {axis: _without(over, *RESTING) for axis, over in split.items()}
    # What a gradient is projected to takes the place of what was projected away.
    state: Table = {**split, "projected": split["embed"]}
    activations: Table = {
        **padded,
        "layer": (),
        "accumulate": (),
        "batch": ("replica", "fsdp"),
        "time": ("context",),
        "stream": ("context", "tensor"),  # the time of what runs from layer to layer, and of its norms
        "mlp_time": ("context", *_without(("tensor",), *padded["mlp"])),
        "vocab_time": ("context", *_without(("tensor",), *padded["vocab"])),
    }
    return Rules(
        weights=split if zero >= 3 else tensor,
        computing=padded,
        gradients=split if zero >= 2 else tensor,
        optimizer=state if zero >= 1 else tensor,
        activations=activations,
    )


def _without(over: tuple[str, ...], *axes: str) -> tuple[str, ...]:
    return tuple(axis for axis in over if axis not in axes)


def named(axis: str) -> str:
    """
    >>> named("mlp"), named("mlp+"), named("mlp+?")
    ('mlp', 'mlp', 'mlp')
    """
    return axis.removesuffix(IF_EVEN).removesuffix(ALSO)


def splits(axes: Axes, shape: Sequence[int], table: Table, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The mesh axes that split each dimension, as the table says and `+` and `?` allow. What two dimensions name, the
    first of them has."""
    taken = {a for axis in axes if axis is not None and not axis.endswith(IF_EVEN) for a in table[named(axis)]}
    resting = [a for a in RESTING if any(a in over for over in table.values())]
    given: set[str] = set()
    found = []

    def even(size: int, over: tuple[str, ...]) -> bool:
        return size % math.prod(mesh[a] for a in over) == 0

    for axis, size in zip(axes, shape, strict=True):
        over = () if axis is None else _without(table[named(axis)], *given)
        if axis is not None and axis.endswith(IF_EVEN):
            over = _without(over, *taken)
        if axis is not None and ALSO in axis:
            more = (*over, *(a for a in resting if a not in over and a not in taken and a not in given))
            over = more if even(size, more) else over
        if axis is not None and axis.endswith(IF_EVEN):
            over = over if even(size, over) else ()
        given.update(over)
        found.append(over)
    return found


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules on it. `with layout:` makes `constrain` and `gather` act."""

    mesh: Mesh
    rules: Rules
    vmapped: tuple[str, ...] = ()  # mesh axes that `jax.vmap` around this code goes over

    def __enter__(self) -> Self:
        _stack.set((*_stack.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _stack.set(_stack.get()[:-1])

    def sharding(self, role: Role, axes: Axes, shape: Sequence[int], name: str = "array") -> NamedSharding:
        """Where an array in this role lies. What cannot be split as the table says is an error that names it.

        A name that ends in `?` asks for less: its dimension takes those mesh axes of the table that no other
        dimension has, where its size divides over them, and is whole where not. One with `+` asks for more: its
        dimension takes also those that split resting weights, and no other dimension has.
        """
        table: Table = getattr(self.rules, role)
        if len(axes) != len(shape):
            raise UserError(
                f"{name}: shape {tuple(shape)} has {len(shape)} dimensions but axes {axes} name {len(axes)}"
            )
        known = [None if axis is None else named(axis) for axis in axes]
        for axis in known:
            if axis is not None and axis not in table:
                raise UserError(f"{name}: no rule for logical axis {axis!r} among {role}{nearest(axis, table)}")
        spec: list[tuple[str, ...] | None] = []
        split = splits(axes, shape, table, self.mesh.shape)
        for dim, (axis, over, size) in enumerate(zip(known, split, shape, strict=True)):
            parts = math.prod(self.mesh.shape[a] for a in over)
            if size % parts:
                mesh = " x ".join(f"mesh.{a}" for a in over)
                raise UserError(
                    f"{name}: dimension {dim} ({axis}) of size {size} does not divide over {mesh} = {parts}"
                )
            spec.append(over or None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def over(self, role: Role, axis: str | None) -> tuple[str, ...]:
        """The mesh axes of more than one device that split a logical axis."""
        table: Table = getattr(self.rules, role)
        return tuple(a for a in table[named(axis)] if self.mesh.shape[a] > 1) if axis else ()

    def parts(self, role: Role, axis: str | None) -> int:
        """Into how many parts a logical axis is split."""
        return math.prod(self.mesh.shape[a] for a in self.over(role, axis))

    def over_each(self, role: Role, axes: Axes) -> list[tuple[str, ...]]:
        """The mesh axes of more than one device that split each dimension of an array that divides."""
        table: Table = getattr(self.rules, role)
        split = splits(axes, [0] * len(axes), table, self.mesh.shape)
        return [tuple(a for a in over if self.mesh.shape[a] > 1) for over in split]

    def spec(self, role: Role, axes: Axes) -> PartitionSpec:
        """What `jax.shard_map` wants to know of it."""
        return PartitionSpec(*(over or None for over in self.over_each(role, axes)))

    def padded(self, role: Role, axes: Axes, shape: Sequence[int]) -> tuple[int, ...]:
        """The next shape that divides."""
        counts = [self.parts(role, axis) for axis in axes]
        return tuple(-(-size // count) * count for size, count in zip(shape, counts, strict=True))

    def with_whole_layers(self, role: Role, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        """Where a stack of layers lies that no stage may part: another dimension is split over `stage`, where one
        divides."""
        whole = dataclasses.replace(self.rules, **{role: {**getattr(self.rules, role), "layer": ()}})
        placed = Layout(self.mesh, whole).sharding(role, axes, shape)
        parts, spec = placed.shard_shape(tuple(shape)), list(placed.spec)
        for dim in range(1, len(shape)):
            if parts[dim] % self.mesh.shape["stage"] == 0:
                over = spec[dim] or ()
                spec[dim] = (*((over,) if isinstance(over, str) else over), "stage")
                break
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def apart(self) -> tuple[str, ...]:
        """The mesh axes that split the batch and no gradient: their devices may add up gradients of their own rows, and
        reduce them when they like."""
        taken = {axis for over in self.rules.gradients.values() for axis in over}
        return tuple(axis for axis in self.over("activations", "batch") if axis not in taken)

    def within(self, vmapped: tuple[str, ...]) -> Layout:
        """For code under `jax.vmap(..., spmd_axis_name=vmapped)` over groups of rows."""
        batch = tuple(axis for axis in self.rules.activations["batch"] if axis not in vmapped)
        activations = {**self.rules.activations, "batch": batch}
        return Layout(self.mesh, dataclasses.replace(self.rules, activations=activations), vmapped)

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def of_texts(self, rows: int) -> Layout:
        """For texts that grow, of any length, which nothing can split; so many as divide lie over the devices."""
        batch = () if rows % self.parts("activations", "batch") else self.rules.activations["batch"]
        whole = dict.fromkeys(("time", "stream", "mlp_time", "vocab_time"), ())
        activations = {**self.rules.activations, **whole, "batch": batch}
        return Layout(self.mesh, dataclasses.replace(self.rules, activations=activations))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


_stack: ContextVar[tuple[Layout, ...]] = ContextVar("layouts", default=())


def current() -> Layout | None:
    layouts = _stack.get()
    return layouts[-1] if layouts else None


def layout_for(cfg: Config, devices: Sequence[Any]) -> Layout:
    """The mesh of a config whose `-1` is resolved, over these devices in order."""
    shape = tuple(getattr(cfg.mesh, axis) for axis in MESH_AXES)
    grid = np.asarray(devices, dtype=object).reshape(shape)
    mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    return Layout(mesh, rules_of(cfg))


def rules_of(cfg: Config) -> Rules:
    return rules(cfg.zero, undivided(cfg), cfg.rules.table)


def along(mesh: Mesh, axis: str | None) -> NamedSharding:
    """The first dimension split over one axis of any mesh; None: whole on each device."""
    return NamedSharding(mesh, PartitionSpec(axis) if axis else PartitionSpec())


def constrain(x: jax.Array, *axes: str | None, role: Role = "activations") -> jax.Array:
    """Pin an array to its place. Nothing happens outside a layout."""
    layout = current()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(role, axes, x.shape))


def row_major(x: jax.Array, *axes: str | None, role: Role = "activations") -> jax.Array:
    """In memory row after row, as arrays come and go. Another order, if products like it, XLA would give to all that
    this array is cut out of: of what stages keep of their layers it would hold a copy. The partitioner cannot cut what
    says it, so each device says it of its own part."""
    layout = current()
    if layout is None:
        return x
    spec = layout.sharding(role, axes, x.shape).spec

    def pinned(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, InMemory(tuple(range(x.ndim))))

    # Differentiated by jax it would add up over all axes that are not named here, of which some are mapped over later.
    @jax.custom_vjp
    def laid(x: jax.Array) -> jax.Array:
        return jax.shard_map(pinned, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    laid.defvjp(lambda x: (laid(x), None), lambda _, g: (laid(g),))
    return laid(x)


def kept_by_stages(x: jax.Array, *axes: str | None) -> jax.Array:
    """A layer's input, which stages keep in a stack: as that lies. Elsewhere XLA is free to order it."""
    layout = current()
    return row_major(x, *axes) if layout and layout.size(("stage",)) > 1 else x


def groups() -> tuple[int, ...]:
    """What the vmap of `Layout.within` puts before an array's shape."""
    layout = current()
    return (layout.size(layout.vmapped),) if layout and layout.vmapped else ()


def split_first(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Split the first dimension over a mesh axis, or several; how the others lie is left to the partitioner."""
    layout = current()
    if layout is None:
        return x
    spec = PartitionSpec(axis, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def rotate(x: jax.Array, axis: str, by: int) -> jax.Array:
    """`jnp.roll` along the first dimension, which has one place for each device along a mesh axis: one message to
    the neighbour. Left to the partitioner, a roll becomes three all-to-alls."""
    layout = current()
    if layout is None:
        return jnp.roll(x, by, axis=0)
    size = layout.mesh.shape[axis]
    pairs = [(i, (i + by) % size) for i in range(size)]
    spec = PartitionSpec(axis)

    def send(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, axis, pairs)

    return jax.shard_map(send, mesh=layout.mesh, in_specs=spec, out_specs=spec, axis_names={axis, *layout.vmapped})(x)


def each_part(function: Callable[..., Any], over: tuple[str, ...], *arrays: Any) -> Any:
    """`function(*arrays)` of each part of their first dimension, which these mesh axes split. Along the other axes the
    partitioner cuts what it does; along these nothing is sent, so each part may take another branch of a `cond`."""
    layout = current()
    if layout is None:
        return function(*arrays)
    spec = PartitionSpec(over)
    run = jax.shard_map(
        function, mesh=layout.mesh, in_specs=spec, out_specs=spec, axis_names=set(over), check_vma=False
    )
    return run(*arrays)


def on_each_device(function: Callable[..., Any], arrays: Any, axes: Axes, shape: Sequence[int]) -> Any:
    """`function(*arrays)` of each device's own part, for what XLA's partitioner cannot cut. Arrays of the rank of one
    with these axes and this shape lie as it does among the optimizer's, whole along a dimension in which one of them
    (constants of blocks) would be cut in the midst; others are whole."""
    layout = current()
    if layout is None:
        return function(*arrays)
    alike = [x.shape for x in jax.tree.leaves(arrays) if x.ndim == len(shape)]
    least = [min(sizes) for sizes in zip(*alike, strict=True)]
    own = layout.sharding("optimizer", _as_even(axes, least, shape), least).spec

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda x: own if x.ndim == len(shape) else PartitionSpec(), tree)

    made = specs(jax.eval_shape(function, *arrays))
    run = jax.shard_map(function, mesh=layout.mesh, in_specs=specs(arrays), out_specs=made, check_vma=False)
    return run(*arrays)


def axes_at_rest(axes: Any, weights: Any) -> Any:
    """The axes of each array of a tree of weights, or of one layer of them, from those of each weight. Codes and
    constants of a quantized one lie as it would where that comes out even, and are whole along what a mesh cuts
    between."""

    def one(axes: Axes, w: Any) -> Any:
        if not is_quantized(w):
            return axes
        return jax.tree.map(lambda x: _as_even(axes[len(axes) - x.ndim :], x.shape, w.shape), w)

    return jax.tree.map(one, axes, weights, is_leaf=is_axes)


def _as_even(axes: Axes, shape: Sequence[int], whole: Sequence[int]) -> Axes:
    return tuple(
        axis if axis is None or size == full else axis + IF_EVEN
        for axis, size, full in zip(axes, shape, whole, strict=True)
    )


def gather(weight: Weight, axes: Axes, dtype: DTypeLike, role: Role = "computing") -> jax.Array:
    """A weight as it is computed with: in the compute dtype, whole over `fsdp`, with zeros added where `tensor` does
    not divide it. It is cast before it travels, so that fewer bytes do; codes travel as they are and are decoded
    where they are used. What lies in host memory comes from there. Its gradient goes back to where gradients lie, which
    makes XLA reduce-scatter it."""
    layout = current()
    shape = weight.shape if layout is None else layout.padded(role, axes, weight.shape)
    if isinstance(weight, Point) and weight.at is not None and groups():
        weight = dataclasses.replace(weight, rest=_mapped_as(weight.at, weight.rest))
    at, rest = (weight.at, weight.rest) if isinstance(weight, Point) else (weight, None)

    @jax.custom_vjp
    def brought(at: Any, rest: Any) -> jax.Array:
        w = host.brought(at if rest is None else rest)
        if is_quantized(w):
            w = _decoded(whole(w, axes), np.dtype(dtype))
        else:
            # Pinned on both sides, or XLA gathers first and casts after.
            w = constrain(w.astype(dtype), *axes, role="weights")
            w = _as_it_rests(w, axes, "weights", role)
        if shape != w.shape:
            w = jnp.pad(w, [(0, more - size) for more, size in zip(shape, w.shape, strict=True)])
        return constrain(w, *axes, role=role)

    def back(_: None, g: jax.Array) -> tuple[jax.Array | None, None]:
        if at is None:
            return None, None
        # Partial sums first, or XLA may gather what they are made of to make each part of them in one go.
        g = constrain(g, *axes, role=role)
        g = jax.lax.slice(g, (0,) * g.ndim, weight.shape)
        g = _as_it_rests(constrain(g, *axes, role="gradients"), axes, "gradients", role)
        return g.astype(at.dtype), None

    brought.defvjp(lambda at, rest: (brought(at, rest), None), back)
    return checkpoint_name(brought(at, rest), GATHERED)


def _as_it_rests(x: jax.Array, axes: Axes, role: Role, computing: Role) -> jax.Array:
    """Row after row on each device, as arrays rest, where the other role is not split alike. What is gathered or
    scattered along a dimension lies best with that one outermost, and XLA would turn not this array but all that it
    is cut out of or written into: a whole stack of layers, twice there."""
    layout = current()
    if layout is None or x.ndim < 2 or layout.over_each(role, axes) == layout.over_each(computing, axes):
        return x
    return row_major(x, *axes, role=role)


def _mapped_as(at: jax.Array, rest: Any) -> Any:
    """`rest`, which groups of rows share, as each group's own, as `at` is; XLA drops what says so. Shared values would
    have one gradient, the sum over the groups, and each group's `at` would be given all of it."""
    one = jax.lax.stop_gradient(at)[(0,) * at.ndim]
    return jax.tree.map(lambda x: jnp.where(False, one.astype(x.dtype), x), rest)


def whole(q: QTensor, axes: Axes) -> QTensor:
    """Codes and constants where the weight is computed with."""
    even = tuple(axis and axis + IF_EVEN for axis in axes)  # what is padded to be split is whole until it is decoded

    def one(x: jax.Array) -> jax.Array:
        return constrain(_as_it_rests(x, even, "weights", "computing"), *even, role="computing")

    return jax.tree.map(one, host.brought(q))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _decoded(q: QTensor, dtype: np.dtype) -> jax.Array:
    """One operation for those who say what is kept for the backward pass: codes are, their values are not."""
    return q.dequantize(dtype)


def _never(*_: Any) -> Any:
    raise TypeError("codes have no gradient: differentiate by the `at` of a `weights.Point`")


_decoded.defvjp(_never, _never)
