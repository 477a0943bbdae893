"""Groups of parameters that are updated separately, with the same result as updating all of them with one optimizer.

The parameters of a group keep their paths, so that names, and the random numbers derived from them, are the same. The
state of a group is the leaves of the complete state at the same paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import optax

from jaxmem.sharding.arrays import constrain
from jaxmem.sharding.gathering import stored_axes
from jaxmem.sharding.host import fetch_from_host, send_like
from jaxmem.sharding.table import Axes, Role, is_axes
from jaxmem.sharding.trees import select
from jaxmem.sharding.weights import is_encoded
from jaxmem.typing import Tree

if TYPE_CHECKING:
    from jaxmem.optim.apply import Writer
    from jaxmem.pipeline.stages import Pipeline


@dataclass(frozen=True)
class ParameterGroup:
    tx: optax.GradientTransformationExtraArgs
    axes: Tree  # the axes of the group's parameters
    state_axes: Tree  # the axes of the group's state
    pipeline_of: Callable[[str], Pipeline | None]  # the pipeline that orders the layers of a weight with this name

    def part(self, params: Tree, optimizer_for: Callable[[Tree], optax.GradientTransformation]) -> ParameterGroup:
        """The group of some of its parameters. `optimizer_for` returns the optimizer of parameters with these axes."""
        axes = select(self.axes, params, is_leaf=is_encoded)
        tx = optax.with_extra_args_support(optimizer_for(axes))
        state_axes = select(self.state_axes, jax.eval_shape(tx.init, params))
        return replace(self, tx=tx, axes=axes, state_axes=state_axes)

    def state(self, opt_state: Tree) -> Tree:
        """This group's part of an optimizer's state."""
        return select(opt_state, self.state_axes, is_leaf=is_axes)

    def compute_updates(self, grads: Tree, state: Tree, params: Tree, **extra: Any) -> tuple[Tree, Tree]:
        """Returns what is added to the parameters (optax's updates), and the new state."""
        return self.tx.update(grads, state, params, pipeline_of=self.pipeline_of, **extra)

    def update_weights(self, grads: Tree, state: Tree, params: Tree, write: Writer, **extra: Any) -> tuple[Tree, Tree]:
        """Returns new parameters and new state, where the state was: state in host memory is copied to the device and
        back. With `layer`, these are of one layer of stacked parameters."""
        layer = extra.get("layer")
        vocab_slice = extra.get("vocab_slice")
        grads = constrain_tree(grads, self.axes, "gradients")
        # Otherwise the partitioner shards the stack from which the layer is read, and gathers all of it for each layer.
        params = constrain_tree(params, stored_axes(self.axes, params), "weights")
        updates, new_state = self.compute_updates(grads, fetch_from_host(state), params, **extra)
        params = write(params, updates, axes=self.axes, layer=layer, vocab_slice=vocab_slice)
        # The cast runs in the sharding of the optimizer state, before the gather; otherwise float32 would be sent.
        return constrain_tree(params, stored_axes(self.axes, params), "optimizer"), send_like(new_state, state)


def constrain_tree(tree: Tree, axes: Tree, role: Role) -> Tree:
    """Constrains each leaf to its sharding in a role. Leaves may be one layer of a stack."""

    def constrain_leaf(names: Axes, x: jax.Array) -> jax.Array:
        return constrain(x, *names[len(names) - x.ndim :], role=role)

    return jax.tree.map(constrain_leaf, axes, tree, is_leaf=is_axes)
