"""Flax NNX modules that a script passes to `train`, without logical axes or jaxmem's layers.

Their weights are sharded by a rule: over `mesh.fsdp`, along the largest dimension whose size is divisible. `merge`
gathers the weights of the complete module in the compute dtype; XLA runs each gather shortly before its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxmem.config.own import Axes as AxesByPattern
from jaxmem.errors import UserError, nearest
from jaxmem.sharding import Axes, gather
from jaxmem.sharding.table import DEFAULT_TABLE
from jaxmem.sharding.weights import StoredWeight, apply_hooks

Path = tuple[str, ...]


class Functions(nnx.Module):
    """A model of two functions, `init(key)` and `apply(params, *inputs)`, for example of equinox or plain JAX:
    `train(cfg, model=lambda rngs: Functions(rngs, init, apply), ...)`."""

    def __init__(self, rngs: nnx.Rngs, init: Any, apply: Any):
        leaves, self.structure = jax.tree.flatten(init(rngs.params()))
        self.leaves = nnx.List([nnx.Param(jnp.asarray(leaf)) for leaf in leaves])
        self.apply = apply

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        params = jax.tree.unflatten(self.structure, [leaf.get_value() for leaf in self.leaves])
        return self.apply(params, *inputs, **options)


@dataclass(frozen=True)
class PlainModel:
    """The structure of a module, without the values of its variables."""

    graphdef: Any
    randomness: Any  # the states of random number generators
    variables: Mapping[Path, nnx.Variable]  # the parameters, and what the forward pass changes
    state: frozenset[Path]  # variables that the forward pass changes, for example the statistics of BatchNorm
    axes: Mapping[Path, Axes]

    @classmethod
    def of(cls, create: Callable[[], Any], by_pattern: AxesByPattern | None, shards: int) -> PlainModel:
        """`shards`: the number of devices over which the weights are sharded."""
        network = nnx.eval_shape(create)
        graphdef, params, randomness, rest = nnx.split(  # type: ignore[misc]
            network, nnx.Param, nnx.RngState, ...
        )
        weights, state = _flat(params), _flat(rest)
        replicated: dict[Path, Axes] = {path: (None,) * len(variable.shape) for path, variable in state.items()}
        axes = axes_by_rule(weights, by_pattern, shards) | replicated
        return cls(graphdef, randomness, weights | state, frozenset(state), axes)

    def network(self, params: Any, dtype: DTypeLike) -> PlainNetwork:
        """The module with gathered weights in the compute dtype."""
        flat = flatten_dict(apply_hooks(params))
        arrays = {
            path: _stored(x) if path in self.state else gather(x, self.axes[path], dtype) for path, x in flat.items()
        }
        # Indices of lists are numbers in the state of a module.
        numbered = {tuple(int(key) if key.isdigit() else key for key in path): x for path, x in arrays.items()}
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
        new = jax.tree.map(lambda x: jax.random.key(0) if is_key(x) else jnp.zeros(x.shape, x.dtype), self.randomness)
        return PlainNetwork(self, nnx.merge(self.graphdef, unflatten_dict(numbered), new), dtype)


@dataclass(frozen=True)
class PlainNetwork:
    """A module with the values of its variables."""

    model: PlainModel
    module: Any
    dtype: DTypeLike

    def prepared(self, keys: jax.Array | None) -> Any:
        """The module for a pass over a batch: its random number generators begin at the key of the first row. Without
        keys, dropout is off and BatchNorm uses its statistics."""
        if keys is None:
            self.module.eval()
            return self.module
        self.module.train()
        for number, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(self.module, nnx.RngKey))):
            variable.set_value(jax.random.fold_in(keys.ravel()[0], number))
        return self.module

    @property
    def state(self) -> dict[str, Any]:
        """The variables that the forward pass changed."""
        flat = _flat(nnx.state(self.module))
        return unflatten_dict({path: flat[path].get_value() for path in self.model.state})


def variables_of(network: Any) -> dict[Path, Any]:
    """The values of the variables of a module, except for the states of random number generators."""
    flat = _flat(nnx.state(network, nnx.Not(nnx.RngState)))
    return {path: variable.get_value() for path, variable in flat.items()}


def _flat(state: Any) -> dict[Path, nnx.Variable]:
    return {tuple(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _stored(x: Any) -> Any:
    return x.stored if isinstance(x, StoredWeight) else x


def axes_by_rule(shapes: Mapping[Path, Any], by_pattern: AxesByPattern | None, shards: int) -> dict[Path, Axes]:
    """The logical axes of each weight: the axes that it declares, or those of a pattern that matches its name;
    otherwise `embed` for its largest dimension that is divisible by the number of shards."""
    used = set()

    def axes_of(path: Path, variable: Any) -> Axes:
        name, shape = _name(path), variable.shape
        if (declared := variable.get_metadata().get("axes")) is not None:
            return declared
        for pattern, axes in (by_pattern or {}).items():
            if fnmatchcase(name, pattern):
                used.add(pattern)
                return _checked(name, shape, pattern, tuple(axes))
        sizes = [size if size % shards == 0 else 0 for size in shape]
        largest = sizes.index(max(sizes)) if any(sizes) else None
        return tuple("embed" if dim == largest and len(shape) > 1 else None for dim in range(len(shape)))

    found = {path: axes_of(path, variable) for path, variable in shapes.items()}
    for pattern in set(by_pattern or ()) - used:
        raise UserError(f"axes: {pattern} matches no weight{nearest(pattern, map(_name, shapes))}")
    return found


def _checked(name: str, shape: tuple[int, ...], pattern: str, axes: Axes) -> Axes:
    if len(axes) != len(shape):
        raise UserError(f"axes: {pattern} has {len(axes)} axes, but {name} has {len(shape)} dimensions {list(shape)}")
    for axis in axes:
        if axis is not None and axis not in DEFAULT_TABLE:
            raise UserError(f"axes: {pattern} has the axis {axis}{nearest(str(axis), DEFAULT_TABLE)}")
    return axes


def _name(path: Any) -> str:
    return ".".join(map(str, path))
