"""An update with optimizer state in host memory: the state of one layer at a time is copied to the device and back.

With P parameters in N layers and s bytes of state per parameter, a device stores the state of two layers, 2 s P / N
bytes, instead of s P. The host stores s P bytes, and 2 s P bytes per step are sent over its link (Ren et al.,
arXiv:2101.06840). The state of embedding and output matrices is copied in slices (`vocab_update.py`). Frozen weights
are copied a layer ahead in each pass (`stack`), and not copied back.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.models.vocab_slices import VocabSlices
from jaxmem.optim import record_norm
from jaxmem.optim.groups import (
    ParameterGroup,
    Write,
    constrain_tree,
    merge,
    put_stacked_layer,
    select,
    take_stacked_layer,
)
from jaxmem.quant.precision import Params
from jaxmem.sharding import Axes, is_axes, stored_axes
from jaxmem.sharding.host import put_layer, take_layer, to_device, to_host
from jaxmem.sharding.weights import is_quantized
from jaxmem.step.segments import SliceGradient, nested
from jaxmem.step.state import StateSpec
from jaxmem.step.vocab_update import VocabUpdate

Tree = Any


def update_from_host(
    spec: StateSpec, params: Params, grads: Params, opt_state: Any, write: Write, norm: jax.Array
) -> tuple[Params, Any]:
    """Returns new parameters and optimizer state. Weights are updated one after the other, and a stack layer by layer,
    while the state of the next layer is copied. `params` are the trainable parameters; `norm` is the norm of all
    gradients."""
    axes = spec.model.select(spec.model.axes)
    new_params, new_states = [], []
    for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        weight = select(params, nested(path, ()), is_leaf=is_axes)
        part = ParameterGroup.of(weight, spec.optimizer_for, axes, spec.opt_axes)
        gradient, state = select(grads, part.axes, is_leaf=is_axes), part.state(opt_state)
        (names,) = jax.tree.leaves(part.axes, is_leaf=is_axes)
        if names[:1] == ("layer",):
            new, state = _layer_by_layer(part, gradient, state, weight, write, norm)
        elif "vocab" in names:
            new, state, _ = VocabUpdate(part, weight, state).update(_slices_of(gradient, names), write, norm)
        else:
            new, state = part.update(gradient, state, weight, write, norm=norm)
        new_params.append(new)
        new_states.append(state)
    return merge(params, *new_params), record_norm(merge(opt_state, *new_states), norm)


def fetch_state_layer(state: Tree, axes: Tree, layer: jax.Array, unstacked: Tree) -> Tree:
    """One layer of the state, on the device. Leaves that are not stacked are taken from `unstacked`."""
    return to_device(take_stacked_layer(state, axes, layer, unstacked))


def store_state_layer(state: Tree, axes: Tree, layer: jax.Array, new: Tree) -> Tree:
    """The state with one layer replaced, in host memory."""

    def one(own: Axes, x: jax.Array, new: jax.Array) -> jax.Array:
        return put_layer(x, layer, to_host(new)) if own[:1] == ("layer",) else new

    return jax.tree.map(one, axes, state, constrain_tree(new, axes, "optimizer"), is_leaf=is_axes)


def _slices_of(grads: Tree, names: Axes) -> SliceGradient:
    """Slices of a complete gradient."""
    (whole,) = jax.tree.leaves(grads)

    def of_slice(_: Any, slices: VocabSlices | None = None, j: jax.Array | None = None) -> jax.Array:
        return whole if slices is None or j is None else slices.read(whole, names.index("vocab"), j)

    return of_slice


def _layer_by_layer(
    part: ParameterGroup, grads: Tree, state: Tree, weights: Tree, write: Write, norm: jax.Array
) -> tuple[Tree, Tree]:
    layers = jax.tree.leaves(weights)[0].shape[0]
    initial_state = state  # every layer has the number of updates before this one

    def step(layer: jax.Array, carry: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
        weights, state, fetched = carry
        ahead = fetch_state_layer(state, part.state_axes, jnp.minimum(layer + 1, layers - 1), initial_state)
        new, kept = part.update(
            take_layer(grads, layer), fetched, take_layer(weights, layer), write, layer=layer, layers=layers, norm=norm
        )
        # Read before it is overwritten; otherwise XLA would copy all of it.
        ahead, state = jax.lax.optimization_barrier((ahead, state))
        weights = put_stacked_layer(weights, stored_axes(part.axes, weights), "weights", layer, new)
        return weights, store_state_layer(state, part.state_axes, layer, kept), ahead

    first = fetch_state_layer(state, part.state_axes, jnp.int32(0), initial_state)
    weights, state, _ = jax.lax.fori_loop(0, layers, step, (weights, state, first))
    return weights, state
