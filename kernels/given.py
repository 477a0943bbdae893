"""What operations are given, brought into one form, by one rule for all of them.

An array is one of jax or of numpy; a list, None or a number in its place is refused, as nobody said its dtype. A whole
number is what Python takes as an index (an int, one of numpy's, an array of no dimension), a number what it makes a
float of; neither a string nor a bool, and known when the program is compiled. Whatever else comes is a ValueError of
one line: the operation, the argument, what it is and what it should be.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "bfloat16", "float16")
# Implementations in plain JAX, which XLA's partitioner cuts where arrays lie split; of a kernel it knows nothing.
PLAIN = ("blockwise", "reference", "sliced")


@dataclass(frozen=True)
class Given:
    """To a call of an operation."""

    operation: str

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.operation}: {message}")

    def array(self, name: str, x: Any, dims: str | None = None, dtypes: tuple[str, ...] = ()) -> jax.Array:
        """`dims`: as "[..., time, embed]", of which none may be empty. `dtypes`: one of these."""
        self.require(isinstance(x, jax.Array | np.ndarray), f"{name} is {shown(x)}; it should be an array")
        if dims is not None:
            least = dims.count(",") + 1 - dims.count("...")
            fits = x.size > 0 and (x.ndim >= least if "..." in dims else x.ndim == least)
            self.require(fits, f"{name} has shape {x.shape}; it should be {dims}, of no dimension empty")
        one = "" if len(dtypes) == 1 else "one of "
        self.require(
            not dtypes or x.dtype.name in dtypes, f"{name} is {x.dtype}; it should be {one}{', '.join(dtypes)}"
        )
        return jnp.asarray(x)

    def integers(self, name: str, x: Any, shape: tuple[int, ...], dims: str = "") -> jax.Array:
        x = self.array(name, x)
        self.require(x.shape == shape, f"{name} has shape {x.shape}; it should be {dims}{shape}")
        self.require(jnp.issubdtype(x.dtype, jnp.integer), f"{name} is {x.dtype}; it should be of integers")
        return x

    def whole(self, name: str, value: Any) -> int:
        try:
            if not isinstance(value, bool | np.bool_):
                return operator.index(value)
        except TypeError:  # jax's for what is traced too
            pass
        raise ValueError(f"{self.operation}: {name} is {shown(value)}; it should be a whole number")

    def number(self, name: str, value: Any) -> float:
        try:
            if not isinstance(value, bool | np.bool_ | str | bytes) and getattr(value, "ndim", 0) == 0:
                found = float(value)
                self.require(math.isfinite(found), f"{name} is {found}; it should be a finite number")
                return found
        except (TypeError, OverflowError):  # jax's for what is traced too
            pass
        raise ValueError(f"{self.operation}: {name} is {shown(value)}; it should be a finite number")

    def flag(self, name: str, value: Any) -> bool:
        self.require(isinstance(value, bool | np.bool_), f"{name} is {shown(value)}; it should be True or False")
        return bool(value)

    def undivided(self, implementation: str, arrays: tuple[Any, ...]) -> None:
        """That no array is split over devices, as far as it can be seen: of one that is traced jax tells where its mesh
        axes are explicit. Elsewhere under `jax.jit` XLA gathers it on every device, without a word."""
        if implementation in PLAIN:
            return
        for x in jax.tree.leaves(arrays):
            self.require(
                not is_split(x),
                f"an array of shape {x.shape} lies split over devices, which the {implementation} implementation cannot"
                " be: call it within jax.shard_map, on each device's own part",
            )


def is_split(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        return any(axes is not None for axes in jax.typeof(x).sharding.spec)
    return isinstance(x, jax.Array) and not x.is_fully_replicated


def shown(value: Any) -> str:
    """In a few words: a number and a string as they are, of others what they are.

    >>> shown(2.5), shown("3"), shown([1, 2]), shown(None), shown(np.zeros(3, np.float32)), shown(np.int64(3))
    ('2.5', "'3'", 'a list', 'None', 'an array, float32(3,)', '3')
    """
    if isinstance(value, jax.core.Tracer):
        return f"traced, {value.dtype}{value.shape}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array, {value.dtype}{value.shape}"
    if value is None or isinstance(value, bool | int | float | complex | str | np.generic):
        return str(value) if isinstance(value, np.generic) else repr(value)[:60]
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
