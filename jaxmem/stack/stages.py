"""How a stack of layers is divided into pipeline stages, and the share of idle time.

GPipe (Huang et al., arXiv:1811.06965): with p stages and m micro-batches, a stage works in m of m + p - 1 ticks, so
the bubble is (p - 1) / (m + p - 1). The interleaved schedule (Narayanan et al., arXiv:2104.04473) assigns v groups of
layers to each stage that are not adjacent: a micro-batch passes through all stages v times, a tick is v times shorter,
and the bubble is (p - 1) / (v m + p - 1).
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.config.recompute import is_scheduled
from jaxmem.stack.remat import Remat


@dataclass(frozen=True)
class Pipeline:
    """A stack of layers over pipeline stages. Identity layers pad it to a multiple of the number of stages."""

    layers: int
    stages: int
    micro_batches: int
    rounds: int = 1  # groups of layers per stage; a micro-batch passes through one group per round; 1 is GPipe

    @property
    def group(self) -> int:
        """Layers that a stage computes per tick."""
        return -(-self.layers // (self.stages * self.rounds))

    @property
    def stored(self) -> int:
        """The number of layers, including identity layers."""
        return self.stages * self.group * self.rounds

    @property
    def slots(self) -> int:
        """The number of micro-batches, padded to the same number on every stage."""
        return -(-self.micro_batches // self.stages) * self.stages

    @property
    def ticks(self) -> int:
        return self.rounds * self.micro_batches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of ticks in which a stage is idle.

        >>> Pipeline(layers=32, stages=4, micro_batches=8).bubble
        0.2727272727272727
        """
        return (self.stages - 1) / self.ticks

    def layers_per_boundary(self, remat: Remat) -> int:
        """The number of layers of a stage that are recomputed from one saved boundary; with `sqrt`, the number for
        which the fewest boundaries are saved.

        >>> pipeline = Pipeline(layers=32, stages=4, micro_batches=2)
        >>> [pipeline.layers_per_boundary(remat) for remat in ("full", "every_2", "sqrt")]
        [1, 2, 8]
        """
        if not isinstance(remat, str) or not is_scheduled(remat):
            return 1
        if remat != "sqrt":
            return min(int(remat.removeprefix("every_")), self.group)
        return min(range(1, self.group + 1), key=lambda size: self.ticks * -(-self.group // size) + size)

    @cached_property
    def order(self) -> np.ndarray:
        """The index of the layer that is stored at each position of the stack, `stages` x `group` x `rounds`. Identity
        layers have indices from `layers` on.

        >>> Pipeline(layers=8, stages=2, micro_batches=4, rounds=2).order.tolist()
        [0, 4, 1, 5, 2, 6, 3, 7]
        """
        stage, position, round_ = np.ogrid[: self.stages, : self.group, : self.rounds]
        return ((round_ * self.stages + stage) * self.group + position).reshape(-1)

    def arrange(self, stacked: jax.Array) -> jax.Array:
        """The layers of a model, [layers, ...], in the order in which they are stored; identity layers are zeros."""
        padded = jnp.pad(stacked, [(0, self.stored - self.layers), *[(0, 0)] * (stacked.ndim - 1)])
        return padded if self.rounds == 1 else padded[self.order]

    def split(self, stacked: jax.Array) -> jax.Array:
        """[stored, ...] -> [stages, group, rounds, ...], without moving data."""
        return stacked.reshape(self.stages, self.group, self.rounds, *stacked.shape[1:])
