"""Reorders the layers of a checkpoint, which are padded and ordered for the pipeline stages of the run that saved it,
for other stages or for none.

Such arrays are read with all layers on each device and another dimension sharded over `stage`, so that each device
reorders its shards; then each layer is sent to its stage. In addition to the state, one array at a time is in memory.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.sharding import Axes, Layout, Role, is_axes
from jaxmem.stack import Pipeline


def order(config: Mapping[str, Any]) -> np.ndarray:
    """The layer at each position of a stack, as a config (as JSON) stores it; numbers beyond its layers are padding.

    >>> order({"model": {"layers": 3}, "mesh": {"stage": 2}, "pipeline": {"rounds": 1}}).tolist()
    [0, 1, 2, 3]
    """
    layers, stages = config["model"].get("layers"), config["mesh"]["stage"]
    if stages == 1:
        return np.arange(layers or 0)
    return Pipeline(layers, stages, 1, config["pipeline"]["rounds"]).order


class Restage:
    """Converts layers from the order of one config to the order of another, on the devices of the other."""

    def __init__(self, saved: Mapping[str, Any], here: Mapping[str, Any], layout: Layout) -> None:
        self._layout = layout
        before, after = order(saved), order(here)
        self._stored = len(before)
        self.needed = not np.array_equal(before, after)
        places = {layer: place for place, layer in enumerate(before.tolist())}
        layers = here["model"].get("layers") or 0
        self._sources = np.array([places[layer] if layer < layers else -1 for layer in after.tolist()])

    def saved(self, role: Role, axes: Any, placed: Any) -> Any:
        """Shapes and shardings of the arrays in the checkpoint with which they can be reordered. `placed`: the shapes
        and shardings of the result."""

        def one(axes: Axes, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if not _stacked(axes):
                return x
            shape = (self._stored, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self._layout.with_unsplit_layers(role, axes, shape))

        return jax.tree.map(one, axes, placed, is_leaf=is_axes)

    def __call__(self, axes: Any, arrays: Any, placed: Any) -> Any:
        return jax.tree.map(self._ordered, axes, arrays, placed, is_leaf=is_axes)

    def _ordered(self, axes: Axes, x: jax.Array, placed: jax.ShapeDtypeStruct) -> jax.Array:
        if not _stacked(axes):
            return x
        sources = self._sources

        def pick(x: jax.Array) -> jax.Array:
            real = (sources >= 0).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(real, x[np.maximum(sources, 0)], jnp.zeros((), x.dtype))

        return jax.jit(pick, out_shardings=placed.sharding)(x)


def _stacked(axes: Axes) -> bool:
    return axes[:1] == ("layer",)
