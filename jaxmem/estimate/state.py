"""The exact bytes of the state of one device, by arithmetic: shapes are traced once and divided as they are sharded."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Config, Memory
from jaxmem.estimate.passes import on_one_device, shape_of
from jaxmem.sharding.table import Axes, Role, assign_mesh_axes, is_axes, is_stacked, tables_for
from jaxmem.sharding.weights import differentiable
from jaxmem.step.categories import ROLE_OF_CATEGORY, category_of
from jaxmem.step.execution import pipeline_of
from jaxmem.step.host_placement import offloaded_state, offloaded_weights
from jaxmem.typing import AxesTree, Tree

# Reasons to communicate a weight or its gradient, in this order: the weight is stored sharded, so it is gathered (zero
# 3); the gradient is reduce-scattered (from zero 2); the gradient is all-reduced; the weight is replicated over
# `tensor`, which shards tokens, so the gradient is all-reduced over it; the weight is updated in shards (zero 1 and 2).
TRAFFIC = ("gathered", "scattered", "reduced", "replicated", "renewed")


@dataclass(frozen=True)
class StateLeaf:
    axes: Axes
    shape: tuple[int, ...]
    itemsize: int
    can_offload: bool = False  # whether `memory.offload` may place it in host memory

    @property
    def is_stacked(self) -> bool:
        """Whether the first dimension is the layer."""
        return is_stacked(self.axes)


@dataclass(frozen=True)
class StateLeaves:
    weights: tuple[StateLeaf, ...]  # all weights, in the dtype of their gradients
    trainable: tuple[StateLeaf, ...]  # the trainable weights, in the dtype of their gradients
    categories: Mapping[str, tuple[StateLeaf, ...]]  # the arrays of each category; parameters: values or integer codes
    saved: Mapping[Role, tuple[StateLeaf, ...]]  # the arrays that a checkpoint contains, by role

    @property
    def stored_bytes(self) -> float:
        """Bytes per weight, scales included."""
        stored = (*self.categories["parameters"], *self.categories["quantization"])
        size = sum(leaf.itemsize * math.prod(leaf.shape) for leaf in stored)
        return size / sum(math.prod(leaf.shape) for leaf in self.weights)


def state_of(cfg: Config, platform: str) -> StateLeaves:
    """The state of a config, traced once for all configs that differ only in mesh, batch and recomputation. Stacks of
    pipeline stages have their identity layers."""
    state = _state(shape_of(cfg, platform).replace(memory=Memory(update=cfg.memory.update)))
    pipeline = pipeline_of(cfg)
    if pipeline is None or pipeline.stored == pipeline.layers:
        return state

    def stored(leaves: tuple[StateLeaf, ...]) -> tuple[StateLeaf, ...]:
        return tuple(
            dataclasses.replace(leaf, shape=(pipeline.stored, *leaf.shape[1:]))
            if leaf.is_stacked and leaf.shape[0] == pipeline.layers
            else leaf
            for leaf in leaves
        )

    return StateLeaves(
        stored(state.weights),
        stored(state.trainable),
        {category: stored(leaves) for category, leaves in state.categories.items()},
        {role: stored(leaves) for role, leaves in state.saved.items()},
    )


@functools.lru_cache(maxsize=256)
def _state(shape: Config) -> StateLeaves:
    built = on_one_device(shape)
    model = built.model
    spec = built.spec
    categories: dict[str, tuple[StateLeaf, ...]] = dict.fromkeys(ROLE_OF_CATEGORY, ())
    frozen = offloaded_weights(model.axes, model.select(model.axes), spec.param_axes)
    for where, named, arrays, offloadable in (
        ("params", spec.param_axes, spec.state.params, frozen),
        ("opt_state", spec.opt_axes, spec.state.opt_state, offloaded_state(spec.opt_axes)),
    ):
        axes = jax.tree.leaves(named, is_leaf=is_axes)
        leaves_there = jax.tree_util.tree_leaves_with_path(arrays)
        for name, (path, leaf), can_offload in zip(axes, leaves_there, jax.tree.leaves(offloadable), strict=True):
            category = category_of(f"state.{where}{jax.tree_util.keystr(path)}")
            categories[category] += (StateLeaf(name, leaf.shape, np.dtype(leaf.dtype).itemsize, can_offload),)
    proxies = jax.eval_shape(lambda params: differentiable(params, spec.gradient_dtype), spec.state.params)

    def leaves(axes: AxesTree, proxies: Any) -> tuple[StateLeaf, ...]:
        pairs = zip(jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(proxies), strict=True)
        return tuple(StateLeaf(axes, x.shape, np.dtype(x.dtype).itemsize) for axes, x in pairs)

    saved = SavedState(built).without_external_base
    return StateLeaves(
        leaves(model.axes, proxies),
        leaves(model.select(model.axes), model.select(proxies)),
        categories,
        {
            "weights": leaves(saved(spec.param_axes), saved(spec.state.params)),
            "optimizer": leaves(spec.opt_axes, spec.state.opt_state),
        },
    )


class Divided(NamedTuple):
    """An array in one role, divided among the devices of a mesh."""

    shards: list[int]  # the number of shards of each dimension
    over_tensor: bool  # whether the mesh axis `tensor` shards a dimension
    elements: int  # on one device


class DeviceBytes:
    """Bytes of arrays on one device of a mesh. The result for each shape and role is cached."""

    def __init__(self, cfg: Config) -> None:
        self._rules = tables_for(cfg)
        self._mesh = cfg.mesh.model_dump()
        self.stages = cfg.mesh.stage
        self._needs_all_rows = cfg.objective.name == "own"  # see `step/gradients.py`
        # Rows of a sharded embedding are looked up on the devices that store them, unless embeddings are tied.
        self._looked_up = cfg.zero >= 2 and not getattr(cfg.model, "tie_embeddings", False)
        self._known: dict[tuple[Role, Axes, tuple[int, ...]], Divided] = {}

    def __call__(self, role: Role, leaves: Iterable[StateLeaf], width: int = 0) -> int:
        """Bytes of arrays in a role. `width`: bytes per element, by default of the stored dtype."""
        return sum(self._divided(role, leaf).elements * (width or leaf.itemsize) for leaf in leaves)

    @property
    def reduces_once(self) -> bool:
        """Whether devices sum the gradients of their own rows, and reduce the sums once per update."""
        if self._needs_all_rows:
            return False
        sharded = {axis for over in self._rules.gradients.values() for axis in over}
        return any(self._mesh[axis] > 1 and axis not in sharded for axis in self._rules.activations["batch"])

    def is_transposed(self, leaf: StateLeaf) -> bool:
        """Whether a dimension other than the first is gathered; XLA then stores a transposed copy in which it is the
        first."""
        if self._looked_up and leaf.axes == ("vocab", "embed"):
            return False
        first = 2 if leaf.is_stacked else 1
        return self._divided("weights", leaf).shards[first:] != self._divided("compute", leaf).shards[first:]

    def traffic(self, leaves: Iterable[StateLeaf], width: int, gathered: float) -> dict[str, int]:
        """Bytes of weights and gradients that are communicated because they are sharded differently in two roles.
        `width`: bytes per element of a gradient; `gathered`: bytes per element of a gathered weight."""
        sizes = dict.fromkeys(TRAFFIC, 0)
        for leaf in leaves:
            used = self._divided("compute", leaf).elements
            stored = self._divided("weights", leaf).elements
            gradient = self._divided("gradients", leaf).elements
            updated = self._divided("optimizer", leaf).elements
            sizes["gathered"] += int(used * gathered) if stored < used else 0
            sizes["scattered" if gradient < used else "reduced"] += used * width
            sizes["replicated"] += 0 if self._divided("compute", leaf).over_tensor else gradient * width
            sizes["renewed"] += stored * leaf.itemsize if stored > updated else 0
        return sizes

    def _divided(self, role: Role, leaf: StateLeaf) -> Divided:
        key = role, leaf.axes, leaf.shape
        if key not in self._known:
            split = assign_mesh_axes(leaf.axes, leaf.shape, getattr(self._rules, role), self._mesh)
            parts = [math.prod(self._mesh[axis] for axis in over) for over in split]
            elements = math.prod(-(-size // count) for size, count in zip(leaf.shape, parts, strict=True))
            self._known[key] = Divided(parts, any("tensor" in over for over in split), elements)
        return self._known[key]


def bytes_on_device(tree: Tree) -> int:
    """Bytes of sharded arrays (or their shapes) on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
