"""How a stack of layers is divided into pipeline stages. `timetable.py` has the schedules."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.sharding.arrays import map_layers
from jaxmem.sharding.host import fetch_from_host, send_like, take_layer
from jaxmem.stack.call import StackCall
from jaxmem.typing import Tree


@dataclass(frozen=True)
class Pipeline:
    """A stack of layers over pipeline stages. Identity layers pad it to a multiple of the number of stages."""

    layers: int
    stages: int
    micro_batches: int
    rounds: int = 1  # groups of layers per stage; a micro-batch passes through one group per round
    schedule: str = "1f1b"
    recomputes: bool = False  # whether a backward pass repeats the forward pass

    @property
    def group(self) -> int:
        """Layers that a stage computes per tick."""
        return -(-self.layers // (self.stages * self.rounds))

    @property
    def stored(self) -> int:
        """The number of layers, including identity layers."""
        return self.stages * self.group * self.rounds

    @property
    def timetable(self) -> Any:
        """The `Timetable` of the schedule."""
        from jaxmem.pipeline.timetable import timetable

        return timetable(self.schedule, self.stages, self.micro_batches, self.rounds)

    @property
    def bubble(self) -> float:
        """The share of the time of a step in which a stage is idle.

        >>> Pipeline(layers=32, stages=4, micro_batches=8).bubble
        0.2727272727272727
        """
        return self.timetable.idle_share(recomputes=self.recomputes)

    @cached_property
    def order(self) -> np.ndarray:
        """The index of the layer that is stored at each position of the stack, `stages` x `group` x `rounds`. Identity
        layers have indices from `layers` on.

        >>> Pipeline(layers=8, stages=2, micro_batches=4, rounds=2).order.tolist()
        [0, 4, 1, 5, 2, 6, 3, 7]
        """
        stage, position, round_ = np.ogrid[: self.stages, : self.group, : self.rounds]
        return ((round_ * self.stages + stage) * self.group + position).reshape(-1)

    def create(self, layer: Callable[[jax.Array], Tree], keys: jax.Array) -> Tree:
        """The layers `layer(key)`, stacked in the order in which they are stored. Each stage creates its own layers;
        identity layers are zeros."""

        def stored(numbered: tuple[jax.Array, jax.Array]) -> Tree:
            number, key = numbered
            weights = layer(key)
            if self.stored == self.layers:
                return weights
            used = lambda w: jnp.where(number < self.layers, w, jnp.zeros_like(w))  # noqa: E731
            return send_like(jax.tree.map(used, fetch_from_host(weights)), weights)

        numbers = jnp.asarray(self.order, jnp.int32)
        stored_layers = lambda numbers, keys, _: jax.lax.map(stored, (numbers, keys))  # noqa: E731
        run = map_layers(stored_layers, len(numbers), (("layer",), ("layer",)), ("layer",))
        return run(numbers, keys[jnp.minimum(numbers, self.layers - 1)])

    def split(self, stacked: jax.Array) -> jax.Array:
        """[stored, ...] -> [stages, group, rounds, ...], without moving data."""
        return stacked.reshape(self.stages, self.group, self.rounds, *stacked.shape[1:])

    def apply(self, call: StackCall) -> tuple[Tree, Tree]:
        """Applies one layer after the other on all devices, for a batch without micro-batches. The weights of one layer
        at a time are sent from their stage to all devices."""
        staged = jax.tree.map(self.split, call.weights)

        def fetch(stacked: jax.Array, layer: jax.Array) -> jax.Array:
            place = layer % self.group
            group = layer // self.group
            round_index = group // self.stages
            stage = group % self.stages
            layer_weights = fetch_from_host(take_layer(take_layer(stacked, place, dim=1), round_index, dim=1))
            mine = (jnp.arange(self.stages) == stage).reshape(-1, *[1] * (layer_weights.ndim - 1))
            return jnp.sum(
                jnp.where(mine, layer_weights, jnp.zeros_like(layer_weights)), axis=0, dtype=layer_weights.dtype
            )

        def step(x: Tree, xs: tuple[jax.Array, Tree]) -> tuple[Tree, Tree]:
            layer, layer_input = xs
            return call.run(jax.tree.map(partial(fetch, layer=layer), staged), x, layer_input, call.shared)

        return jax.lax.scan(step, call.x, (jnp.arange(self.layers, dtype=jnp.int32), call.inputs))
