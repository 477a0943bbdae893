"""Flax NNX modules that a script passes to `train`, without logical axes or jaxmem's layers.

The path of `train(cfg, model=..., loss=..., axes=..., layers=...)`, in order:

1. `config.methods.config_with` sets `model.family: own` and `objective.name: own`; `config.user.user_objects` checks
   the arguments. A `model` without `loss` is refused by `config.check._objective` (if the config says
   `objective.name: own`, by `_sums_of_user`).
2. `step.model.ModelSpec.flax_model` traces the module, with its lists of blocks stacked (`user_layers.stack_lists`).
   `FlaxModel.of` takes its structure, and the axes of its variables from `axes_by_rule`.
3. `StepSpec.state` shards each variable by `Layout.sharding("weights", axes)`: a dimension with the axis `embed` over
   the mesh axes in the row `embed` of `sharding.table.make_tables`.
4. `step.initial_weights.InitialWeights.new_base` builds it again with the key of the run; `store_flax` stores a weight.
5. In the step, `FlaxModel.bind` returns the module with gathered weights, a `FlaxNetwork`.
6. `step.objective._sums_of_user` calls the loss with `FlaxNetwork.prepared`, in which each stack is a `Blocks`.
7. The call of the first block of `Blocks` computes all of its layers (`stack.apply.apply_call`).

Weights have the axes that they declare, else those of `axes=`. The others are sharded by a rule: over `mesh.fsdp` and
`mesh.context`, along the largest dimension whose size is divisible; vectors, and weights without such a dimension, are
replicated. `bind` gathers all weights outside of stacks in the compute dtype, and the backward pass reads them again:
with ZeRO-3 each device then holds the complete model in the compute dtype. The layers of a stack are gathered one at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxmem.config.networks import SHARDED
from jaxmem.config.user import AxesByPattern
from jaxmem.errors import UserError, nearest
from jaxmem.models.user_layers import Blocks, dotted_name, flat_state, new_randomness, numbered, reseed, value_of
from jaxmem.sharding.gathering import gather
from jaxmem.sharding.table import Axes, is_stacked
from jaxmem.sharding.trees import Path
from jaxmem.sharding.weights import MIN_BLOCK, Storage, apply_hooks, is_matrix, store, stored_of
from jaxmem.stack.call import StackOptions
from jaxmem.typing import Tree

VECTORS = ("bias", "scale")  # names of weights of Flax's layers that are no matrices


class Functions(nnx.Module):
    """A model of two functions, `init(key)` and `apply(params, *inputs)`, for example of equinox or plain JAX:
    `train(cfg, model=lambda rngs: Functions(rngs, init, apply), ...)`."""

    def __init__(self, rngs: nnx.Rngs, init: Any, apply: Any):
        leaves, self.structure = jax.tree.flatten(init(rngs.params()))
        self.leaves = nnx.List([nnx.Param(jnp.asarray(leaf)) for leaf in leaves])
        self.apply = apply

    def __call__(self, *inputs: Tree, **options: Any) -> Any:
        params = jax.tree.unflatten(self.structure, [leaf.get_value() for leaf in self.leaves])
        return self.apply(params, *inputs, **options)


@dataclass(frozen=True)
class FlaxModel:
    """The structure of a module, without the values of its variables."""

    graphdef: Any
    randomness: Any  # the states of random number generators
    variables: Mapping[Path, Any]  # the parameters, and `state`
    state: frozenset[Path]  # variables that the forward pass changes, such as statistics of BatchNorm, and arrays
    axes: Mapping[Path, Axes]
    stacks: Mapping[Path, int]  # the number of blocks of each list that is stacked

    @classmethod
    def of(
        cls, build: Callable[[], tuple[Any, Mapping[Path, int]]], by_pattern: Any, shards: Sequence[int]
    ) -> FlaxModel:
        """`build` returns a module and its stacks. The other arguments are those of `axes_by_rule`."""
        stacks: dict[Path, int] = {}

        def create() -> Tree:
            network, new_stacks = build()
            stacks.update(new_stacks)
            return network

        graphdef, params, randomness, other_state = nnx.split(  # type: ignore[misc]
            nnx.eval_shape(create), nnx.Param, nnx.RngState, ...
        )
        params = flat_state(params)
        for path, variable in params.items():
            if not jnp.issubdtype(dtype := value_of(variable).dtype, jnp.floating):
                raise UserError(
                    f"the parameter {dotted_name(path)} has dtype {dtype}; use floating-point parameters (two for real"
                    " and imaginary parts), and nnx.Variable for an array that is not trained"
                )
        state = flat_state(other_state)
        shapes = {path: variable.shape for path, variable in (params | state).items()}
        layered = {path for path in shapes if any(path[: len(stack)] == stack for stack in stacks)}
        axes = {path: (None,) * len(shapes[path]) for path in state} | axes_by_rule(params, layered, by_pattern, shards)
        axes |= {path: ("layer", *axes[path][1:]) for path in layered & state.keys()}
        return cls(graphdef, randomness, params | state, frozenset(state), axes, stacks)

    def bind(self, params: Tree, dtype: DTypeLike, options: StackOptions) -> FlaxNetwork:
        """The module with weights in the compute dtype: gathered, but in stacks as they are stored."""
        flat = flatten_dict(params)
        arrays = {path: stored_of(x) if path in self.state else x for path, x in flat.items()}
        arrays |= {
            path: gather(apply_hooks(x), self.axes[path], dtype)
            for path, x in arrays.items()
            if path not in self.state and self._stack_of(path) is None
        }
        module = nnx.merge(self.graphdef, unflatten_dict(numbered(arrays)), new_randomness(self.randomness))
        variables = {tuple(map(str, path)): node for path, node in nnx.iter_graph(module)}
        state = {path: variables.get(path, arrays[path]) for path in self.state}
        weights = {path: x for path, x in flat.items() if path not in state}
        stacks = [
            Blocks(
                module,
                path,
                count,
                weights=self._within(path, weights),
                axes=self._within(path, self.axes),
                state=self._within(path, state),
                options=options,
                dtype=dtype,
            )
            for path, count in self.stacks.items()
        ]
        return FlaxNetwork(module, state, stacks, dtype)

    def _within(self, stack: Path, values: Mapping[Path, Any]) -> dict[Path, Any]:
        """The values of a stack, by their paths inside it."""
        return {path[len(stack) :]: x for path, x in values.items() if self._stack_of(path) == stack}

    def _stack_of(self, path: Path) -> Path | None:
        return next((stack for stack in self.stacks if path[: len(stack)] == stack), None)


@dataclass(frozen=True)
class FlaxNetwork:
    """A module with the values of its variables."""

    module: Any
    _state: Mapping[Path, Any]
    _stacks: Sequence[Blocks]
    dtype: DTypeLike

    def prepared(self, keys: jax.Array | None) -> Tree:
        """The module for a pass over a batch: its random number generators begin at the key of the first row. Without
        keys, dropout is off and BatchNorm uses its statistics."""
        if keys is None:
            self.module.eval()
        else:
            self.module.train()
            reseed(self.module, keys)
        for blocks in self._stacks:
            blocks.replace_in_module(keys)
        return self.module

    @property
    def state(self) -> dict[str, Any]:
        """The variables that the forward pass changed."""
        return unflatten_dict({path: value_of(variable) for path, variable in self._state.items()})


def store_flax(w: jax.Array, axes: Axes, storage: Storage) -> Any:
    """A new weight as it is stored. If a kernel [embed, heads, head_dim] has few heads, its blocks are along
    head_dim."""
    is_short = w.ndim - is_stacked(axes) > 2 and w.shape[-2] < MIN_BLOCK
    return store(w, axes, storage, blocks_along=-1 if is_short else -2)


def variables_of(network: Any) -> dict[Path, Any]:
    """The values of the variables of a module, except for the states of random number generators."""
    flat = flat_state(nnx.state(network, nnx.Not(nnx.RngState)))
    return {path: value_of(variable) for path, variable in flat.items()}


def axes_by_rule(
    shapes: Mapping[Path, Any], layered: Collection[Path], by_pattern: AxesByPattern | None, shards: Sequence[int]
) -> dict[Path, Axes]:
    """The logical axes of each weight: the axes that it declares, or those of a pattern that matches its name;
    otherwise `token` and `embed` for the table of `nnx.Embed`, and `embed` for the largest dimension of others that is
    divisible by the number of shards. `layered`: the weights that are stacked; patterns have the axes of one layer.
    `shards`: numbers of shards, the preferred one first."""
    used = set()

    def axes_of(path: Path, variable: Any) -> Axes:
        is_stack = path in layered
        axes = axes_of_shape(path, variable, variable.shape[is_stack:])
        if path[-1] in VECTORS and is_matrix(axes):
            axes = _of_vector(axes)
        return ("layer", *axes) if is_stack else axes

    def axes_of_shape(path: Path, variable: Any, shape: tuple[int, ...]) -> Axes:
        name = dotted_name(path)
        if (declared := variable.get_metadata().get("axes")) is not None:
            return declared[len(declared) - len(shape) :]
        for pattern, axes in (by_pattern or {}).items():
            if fnmatchcase(name, pattern):
                used.add(pattern)
                return _checked(name, shape, pattern, tuple(axes))
        if path[-1] == "embedding" and len(shape) == 2:  # of nnx.Embed
            has_shards = any(shape[1] % count == 0 for count in shards)
            return "token", "embed" if has_shards else None
        by_size = sorted(range(len(shape)), key=lambda dim: -shape[dim])
        divisible = (dim for count in shards for dim in by_size if shape[dim] % count == 0)
        largest = next(divisible, None)
        return tuple("embed" if dim == largest and len(shape) > 1 else None for dim in range(len(shape)))

    by_path = {path: axes_of(path, variable) for path, variable in shapes.items()}
    names = [dotted_name(path) for path in shapes]
    for pattern in set(by_pattern or ()) - used:
        if any(fnmatchcase(name, pattern) for name in names):
            why = "a pattern before it matches its weights, or they declare their axes"
            raise UserError(f"axes: {pattern} has no effect: {why}; put the pattern first, or remove it")
        raise UserError(f"axes: {pattern} matches no weight{nearest(pattern, names)}")
    return by_path


def _of_vector(axes: Axes) -> Axes:
    """The axes of a bias or scale with several dimensions, such as [heads, head_dim]: the first named one, and `bias`
    for the others."""
    named = next((dim for dim, axis in enumerate(axes) if axis is not None), 0)
    return tuple(axis if dim == named else "bias" for dim, axis in enumerate(axes))


def _checked(name: str, shape: tuple[int, ...], pattern: str, axes: Axes) -> Axes:
    if len(axes) != len(shape):
        raise UserError(
            f"axes: {pattern} has {len(axes)} axes, but {name} has shape {list(shape)}; use one axis per dimension"
        )
    for axis in axes:
        if axis is not None and axis not in SHARDED:
            raise UserError(f"axes: {pattern} has the unknown axis {axis}{nearest(str(axis), SHARDED)}")
    return axes
