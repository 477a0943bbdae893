"""What waits in host memory between steps: the optimizer's state, and weights that do not learn.

State of a layer comes to the device when its weights are updated, and goes back. With P parameters in N layers and s
bytes of state each, the device holds s P / N of one layer, and during an update what was brought ahead, in place of
s P; the host holds s P, and its link carries 2 s P a step (Ren et al., arXiv:2101.06840). That of tables comes in
slices (`in_slices.py`). Frozen weights come a layer ahead of each pass (`stack`), tables in slices, and none goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.mlir import ir

from jaxmem.errors import UserError
from jaxmem.models.vocab_slices import Slices
from jaxmem.optim import remember
from jaxmem.optim.parts import Part, Write, layer_at, pinned, put, select, with_layer
from jaxmem.quant.precision import Params
from jaxmem.sharding import Axes, axes_at_rest, is_axes, named
from jaxmem.sharding.host import HOST, to_device, to_host
from jaxmem.sharding.weights import is_quantized
from jaxmem.stack import layer_of
from jaxmem.step.segments import OfSlice
from jaxmem.step.vocab_update import Table

Tree = Any


def state_waits(axes: Tree) -> Tree:
    """Of each array of the optimizer's state, whether it waits there."""
    return jax.tree.map(_waits, axes, is_leaf=is_axes)


def _waits(axes: Axes) -> bool:
    return axes[:1] == ("layer",) or "vocab" in (axis and named(axis) for axis in axes)


def frozen_waits(axes: Tree, learning: Tree, at_rest: Tree) -> Tree:
    """Of each array that parameters rest in, whether it waits there: `learning` is None where they do not learn.
    Vectors stay."""

    def of(axes: Axes, learns: Axes | None, at_rest: Tree) -> Tree:
        frozen = learns is None and len(axes) - (axes[:1] == ("layer",)) > 1
        return jax.tree.map(lambda _: frozen, at_rest, is_leaf=is_axes)

    return jax.tree.map(of, axes, learning, at_rest, is_leaf=is_axes)


def sent(tree: Tree, away: Tree) -> Tree:
    """Arrays as they rest; `away` says of each whether it is on the host."""
    return jax.tree.map(lambda own, x: to_host(x) if own else x, away, tree)


def fetched(state: Tree, axes: Tree, layer: jax.Array, rest: Tree) -> Tree:
    """One layer of it on the device; what is not stacked from `rest`."""
    return to_device(layer_at(state, axes, layer, rest))


def stored(state: Tree, axes: Tree, layer: jax.Array, new: Tree) -> Tree:
    """And back."""

    def one(own: Axes, x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, to_host(new), layer, 0) if own[:1] == ("layer",) else new

    return jax.tree.map(one, axes, state, pinned(new, axes, "optimizer"), is_leaf=is_axes)


@dataclass(frozen=True)
class InLayers:
    """An update of all weights whose gradients are there: one weight after the other, of a stack layer after layer,
    with the next one's state on its way."""

    axes: Tree
    opt_axes: Tree
    optimizer_for: Callable[[Tree], optax.GradientTransformationExtraArgs]  # of some of the parameters' axes

    def __call__(
        self, params: Params, grads: Params, opt_state: Any, write: Write, norm: jax.Array
    ) -> tuple[Params, Any]:
        """`params` are those that learn; `norm` is the length of all gradients."""
        done, states = [], []
        for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
            weights = select(params, _alone(path), is_leaf=is_axes)
            part = Part.of(weights, self.optimizer_for, self.axes, self.opt_axes)
            own, state = select(grads, part.axes, is_leaf=is_axes), part.state(opt_state)
            (names,) = jax.tree.leaves(part.axes, is_leaf=is_axes)
            if names[:1] == ("layer",):
                new, state = _in_layers(part, own, state, weights, write, norm)
            elif "vocab" in names:
                new, state, _ = Table(part, weights, state).updated(_of_all(own, names), write, norm)
            else:
                new, state = part.update(own, state, weights, write, norm=norm)
            done.append(new)
            states.append(state)
        return put(params, *done), remember(put(opt_state, *states), norm)


def _of_all(grads: Tree, names: Axes) -> OfSlice:
    """Any slice of a table's gradient that is there whole."""
    (whole,) = jax.tree.leaves(grads)

    def of_slice(_: Any, slices: Slices | None = None, j: jax.Array | None = None) -> jax.Array:
        return whole if slices is None or j is None else slices.read(whole, names.index("vocab"), j)

    return of_slice


def _in_layers(
    part: Part, grads: Tree, before: Tree, weights: Tree, write: Write, norm: jax.Array
) -> tuple[Tree, Tree]:
    layers = jax.tree.leaves(weights)[0].shape[0]

    def step(layer: jax.Array, carried: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
        weights, state, ready = carried
        ahead = fetched(state, part.state_axes, jax.numpy.minimum(layer + 1, layers - 1), before)
        new, kept = part.update(
            layer_of(grads, layer), ready, layer_of(weights, layer), write, layer=layer, layers=layers, norm=norm
        )
        # What is read is read before it is written over, or XLA would copy all of it.
        ahead, state = jax.lax.optimization_barrier((ahead, state))
        weights = with_layer(weights, axes_at_rest(part.axes, weights), "weights", layer, new)
        return weights, stored(state, part.state_axes, layer, kept), ahead

    first = fetched(before, part.state_axes, jax.numpy.int32(0), before)
    weights, state, _ = jax.lax.fori_loop(0, layers, step, (weights, before, first))
    return weights, state


def _alone(path: tuple[Any, ...]) -> Tree:
    """A tree that has only what lies at this place."""
    tree: Tree = ()
    for step in reversed(path):
        tree = {step.key: tree}
    return tree


def kinds(device: Any) -> set[str] | None:
    """The memories that a device can address; None: it is but the description of one."""
    return {memory.kind for memory in device.addressable_memories()} or None


def placed(specs: Tree, away: Tree, devices: np.ndarray) -> Tree:
    """Shapes with their places, those of what waits on the host there."""
    known = kinds(devices.flat[0])
    if known is None:  # the program is told instead
        return specs
    if HOST not in known:
        raise UserError(
            f"memory.offload: {devices.flat[0].platform} devices have no {HOST} memory, only"
            f" {', '.join(sorted(known))}; use memory.offload=none"
        )

    def place(own: bool, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not own:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST))

    return jax.tree.map(place, away, specs)


def told(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """For descriptions of devices: arguments that are first of all sent to the host come from there, and results that
    are last of all sent there stay. jax knows no memories of such devices, so it is written into its program."""
    module: Any = lowered.compiler_ir()
    with module.context:
        main = next(one for one in module.body.operations if one.attributes["sym_name"].value == "main")
        block = main.regions[0].blocks[0]
        arguments = [any(_is_sent(use.owner) for use in one.uses) for one in block.arguments]
        results = [_is_sent(one.owner) for one in block.operations[len(block.operations) - 1].operands]
        for kind, there in (("arg_attrs", arguments), ("res_attrs", results)):
            main.attributes[kind] = ir.ArrayAttr.get(
                [_with_kind(one) if host else one for one, host in zip(main.attributes[kind], there, strict=True)]
            )
    return lowered


def _is_sent(operation: Any) -> bool:
    operation = getattr(operation, "operation", operation)
    if getattr(operation, "name", "") != "stablehlo.custom_call":
        return False
    return "annotate_device_placement" in str(operation) and HOST in str(operation)


def _with_kind(attributes: Any) -> Any:
    given: Any = ir.DictAttr(attributes)
    known = {one.name: one.attr for one in given}
    return ir.DictAttr.get({**known, "mhlo.memory_kind": ir.StringAttr.get(HOST)})
