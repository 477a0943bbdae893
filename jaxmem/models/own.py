"""Flax NNX modules that a script passes to `train`, without logical axes or jaxmem's layers.

Their weights are sharded by a rule: over `mesh.fsdp`, along the largest dimension whose size is divisible. `merge`
gathers the weights of the complete module in the compute dtype; XLA runs each gather shortly before its first use.
"""

from collections.abc import Mapping
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
from jaxmem.sharding.weights import apply_hooks

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


def split(network: Any) -> tuple[Any, dict[Path, nnx.Variable], Any]:
    """The structure, the parameters by path, and the states of random number generators of a module."""
    graphdef, params, randomness, rest = nnx.split(  # type: ignore[misc]
        network, nnx.Param, nnx.RngState, ...
    )
    for path, variable in nnx.to_flat_state(rest):
        raise UserError(
            f"model: {_name(path)} is a {type(variable).__name__}, which an update would have to change outside of the "
            "optimizer; use layers with parameters only, such as LayerNorm or GroupNorm for BatchNorm"
        )
    return graphdef, {tuple(map(str, path)): variable for path, variable in nnx.to_flat_state(params)}, randomness


def merge(graphdef: Any, params: Any, randomness: Any, axes: Any, dtype: DTypeLike) -> Any:
    """The module with gathered weights in the compute dtype."""
    named = flatten_dict(axes)
    gathered = {path: gather(w, named[path], dtype) for path, w in flatten_dict(apply_hooks(params)).items()}
    # Indices of lists are numbers in the state of a module.
    numbered = {tuple(int(key) if key.isdigit() else key for key in path): w for path, w in gathered.items()}
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    new = jax.tree.map(lambda x: jax.random.key(0) if is_key(x) else jnp.zeros(x.shape, x.dtype), randomness)
    return nnx.merge(graphdef, unflatten_dict(numbered), new)


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


def reseed(network: Any, keys: jax.Array | None) -> None:
    """Sets new keys of the random number generators of a module, from the key of the first row of a batch. Without
    keys, turns dropout off."""
    if keys is None:
        network.eval()
        return
    network.train()
    for number, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(network, nnx.RngKey))):
        variable.set_value(jax.random.fold_in(keys.ravel()[0], number))


def _name(path: Any) -> str:
    return ".".join(map(str, path))
