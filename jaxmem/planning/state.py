"""The state of one device by arithmetic: shapes traced once, divided as the table of axes says. Exact."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmem.config import Config, Memory
from jaxmem.planning.breakdown import part_of
from jaxmem.planning.pace import Weights
from jaxmem.planning.passes import alone, shape_of
from jaxmem.sharding import Axes, Role, assign_mesh_axes, is_axes, rules_for
from jaxmem.sharding.weights import differentiable
from jaxmem.step.host_placement import offloaded_state, offloaded_weights


@dataclass(frozen=True)
class Leaf:
    axes: Axes
    shape: tuple[int, ...]
    itemsize: int
    may_wait: bool = False  # whether `memory.offload` may have it in host memory


@dataclass(frozen=True)
class State:
    weights: tuple[Leaf, ...]  # as their gradients are, or would be
    trained: tuple[Leaf, ...]  # those of them that learn
    params: tuple[Leaf, ...]  # as they rest: numbers, or codes
    constants: tuple[Leaf, ...]  # of codes
    master: tuple[Leaf, ...]
    optimizer: tuple[Leaf, ...]

    @property
    def rest(self) -> float:
        """Bytes that a weight rests in."""
        held = sum(leaf.itemsize * math.prod(leaf.shape) for leaf in (*self.params, *self.constants))
        return held / sum(math.prod(leaf.shape) for leaf in self.weights)


def state_of(cfg: Config, platform: str) -> State:
    """Traced once for all configs that differ in how they lie, run or recompute."""
    shape = shape_of(cfg, platform)
    return _state(shape.model_copy(update={"memory": Memory(update=cfg.memory.update)}))


@functools.lru_cache(maxsize=256)
def _state(shape: Config) -> State:
    built = alone(shape)
    found: dict[str, list[Leaf]] = {part: [] for part in ("parameters", "quantization", "master", "optimizer")}
    frozen = offloaded_weights(built.model.axes, built.model.select(built.model.axes), built.spec.param_axes)
    for where, named, placed, waits in (
        ("params", built.spec.param_axes, built.spec.state.params, frozen),
        ("opt_state", built.spec.opt_axes, built.spec.state.opt_state, offloaded_state(built.spec.opt_axes)),
    ):
        axes = jax.tree.leaves(named, is_leaf=is_axes)
        leaves_there = jax.tree_util.tree_leaves_with_path(placed)
        for name, (path, leaf), may_wait in zip(axes, leaves_there, jax.tree.leaves(waits), strict=True):
            part = part_of(f"state.{where}{jax.tree_util.keystr(path)}")
            found[part].append(Leaf(name, leaf.shape, np.dtype(leaf.dtype).itemsize, may_wait))
    at = jax.eval_shape(lambda params: differentiable(params, built.spec.gradient_dtype), built.spec.state.params)

    def leaves(axes: Any, at: Any) -> tuple[Leaf, ...]:
        named = jax.tree.leaves(axes, is_leaf=is_axes)
        return tuple(Leaf(axes, x.shape, x.dtype.itemsize) for axes, x in zip(named, jax.tree.leaves(at), strict=True))

    trained = leaves(built.model.select(built.model.axes), built.model.select(at))
    return State(leaves(built.model.axes, at), trained, *map(tuple, found.values()))


class Held:
    """How arrays lie on a config's mesh: each shape is divided once for each role."""

    def __init__(self, cfg: Config) -> None:
        self._rules, self._mesh = rules_for(cfg), cfg.mesh.model_dump()
        # The embedding is looked up where it lies, unless it also makes the logits.
        self._looks_up = cfg.zero >= 2 and not getattr(cfg.model, "tie_embeddings", False)
        self._known: dict[tuple[Role, Axes, tuple[int, ...]], tuple[list[int], bool, int]] = {}

    def __call__(self, role: Role, leaves: Iterable[Leaf], width: int = 0) -> int:
        """Bytes on one device; `width` bytes a number, where it is not their own."""
        return sum(self._divided(role, leaf)[2] * (width or leaf.itemsize) for leaf in leaves)

    def is_turned(self, leaf: Leaf) -> bool:
        """Whether a dimension that is gathered for use is not the first: XLA then keeps a copy in which it is."""
        if self._looks_up and leaf.axes == ("vocab", "embed"):
            return False
        first = 2 if leaf.axes[:1] == ("layer",) else 1
        return self._divided("weights", leaf)[0][first:] != self._divided("compute", leaf)[0][first:]

    def by_message(self, leaves: Iterable[Leaf], width: int, gathered: float) -> Weights:
        """Where the tables part a weight differently, something is sent: `width` bytes a number of a gradient,
        `gathered` of a weight."""
        found = dict.fromkeys(("gathered", "scattered", "reduced", "beside", "renewed"), 0)
        for leaf in leaves:
            (_, tensor, used), (_, _, rests), (_, _, gradient), (_, _, updated) = (
                self._divided(role, leaf) for role in ("compute", "weights", "gradients", "optimizer")
            )
            found["gathered"] += int(used * gathered) if rests < used else 0
            found["scattered" if gradient < used else "reduced"] += used * width
            found["beside"] += 0 if tensor else gradient * width
            found["renewed"] += rests * leaf.itemsize if rests > updated else 0
        return Weights(**found)

    def _divided(self, role: Role, leaf: Leaf) -> tuple[list[int], bool, int]:
        """Into how many parts each dimension is split, whether `tensor` splits one, and numbers on one device."""
        key = role, leaf.axes, leaf.shape
        if key not in self._known:
            split = assign_mesh_axes(leaf.axes, leaf.shape, getattr(self._rules, role), self._mesh)
            parts = [math.prod(self._mesh[axis] for axis in over) for over in split]
            numbers = math.prod(-(-size // count) for size, count in zip(leaf.shape, parts, strict=True))
            self._known[key] = parts, any("tensor" in over for over in split), numbers
        return self._known[key]
