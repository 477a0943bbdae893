"""Checks of arguments, with the same rules for all operations.

Arrays are those of jax or numpy; lists, None and numbers are refused, since they have no dtype. Whole numbers are
values that Python accepts as an index (an int, a numpy integer, an array without dimensions); numbers are values that
`float` accepts. Strings, bools and traced values are neither. A wrong argument raises ValueError with one line: the
operation, the argument, its value, and what is allowed."""

import difflib
import importlib
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.kernels.typing import Tree

FLOATS = ("float32", "bfloat16", "float16")
# Implementations in plain JAX, which XLA's partitioner can shard. It cannot shard kernels.
PLAIN = ("blockwise", "reference")


@dataclass(frozen=True)
class Validator:
    operation: str

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.operation}: {message}")

    def array(self, name: str, x: Any, dims: str | None = None, dtypes: tuple[str, ...] = ()) -> jax.Array:
        """x as an array. `dims`: e.g. "[..., sequence, embed]"; no dimension may be 0. `dtypes`: allowed; (): any."""
        self.require(isinstance(x, jax.Array | np.ndarray), f"{name} is {describe(x)}; it should be an array")
        if dims is not None:
            least = dims.count(",") + 1 - dims.count("...")
            fits = x.size > 0 and (x.ndim >= least if "..." in dims else x.ndim == least)
            self.require(fits, f"{name} has shape {x.shape}; it should be {dims}, with no empty dimension")
        prefix = "" if len(dtypes) == 1 else "one of "
        allowed = not dtypes or x.dtype.name in dtypes
        self.require(allowed, f"{name} is {x.dtype}; it should be {prefix}{', '.join(dtypes)}")
        return jnp.asarray(x)

    def integers(self, name: str, x: Any, shape: tuple[int, ...], dims: str = "") -> jax.Array:
        x = self.array(name, x)
        self.require(x.shape == shape, f"{name} has shape {x.shape}; it should be {dims}{shape}")
        self.require(jnp.issubdtype(x.dtype, jnp.integer), f"{name} is {x.dtype}; it should be an integer dtype")
        return x

    def whole_number(self, name: str, value: Any) -> int:
        try:
            if not isinstance(value, bool | np.bool_):
                return operator.index(value)
        except TypeError:  # jax raises it for traced values too
            pass
        raise ValueError(f"{self.operation}: {name} is {describe(value)}; it should be a whole number")

    def number(self, name: str, value: Any) -> float:
        try:
            if not isinstance(value, bool | np.bool_ | str | bytes) and getattr(value, "ndim", 0) == 0:
                number = float(value)
                self.require(math.isfinite(number), f"{name} is {number}; it should be a finite number")
                return number
        except (TypeError, OverflowError):  # jax raises TypeError for traced values too
            pass
        raise ValueError(f"{self.operation}: {name} is {describe(value)}; it should be a finite number")

    def flag(self, name: str, value: Any) -> bool:
        self.require(isinstance(value, bool | np.bool_), f"{name} is {describe(value)}; it should be True or False")
        return bool(value)

    def implementation(
        self,
        name: Any,
        implementations: Mapping[str, Any],
        arrays: tuple[Tree, ...],
        refusal: Callable[[str], str | None] = lambda _: None,
    ) -> Any:
        """The named implementation of a call with these arrays.

        Args:
            name: what the call names.
            implementations: {name: module, or the name of a module that is imported now}.
            arrays: all arrays of the call.
            refusal: the reason why an implementation does not support the call; None: it supports it.
        """
        text = f"implementation is {describe(name)}; it should be one of {', '.join(sorted(implementations))}"
        self.require(isinstance(name, str), text)
        near = difflib.get_close_matches(name, implementations, n=1, cutoff=0.0)[0]
        self.require(name in implementations, f"{text}, nearest {near}")
        reason = refusal(name)
        self.require(reason is None, reason or "")
        self.unsharded(name, arrays)
        module = implementations[name]
        return importlib.import_module(module) if isinstance(module, str) else module

    def unsharded(self, implementation: str, arrays: tuple[Tree, ...]) -> None:
        """ValueError if the argument of a kernel is a sharded array. The sharding of a traced array is known only with
        explicit mesh axes; otherwise, under `jax.jit`, XLA gathers the array on every device without a warning."""
        if implementation in PLAIN:
            return
        for x in jax.tree.leaves(arrays):
            self.require(
                not is_sharded(x),
                f"an array of shape {x.shape} is sharded over devices, which the {implementation} implementation does"
                " not support; call it within jax.shard_map, on each device's own part",
            )


def is_sharded(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        return any(axes is not None for axes in jax.typeof(x).sharding.spec)
    return isinstance(x, jax.Array) and not x.is_fully_replicated


def describe(value: Any) -> str:
    """A value in an error: numbers and strings literally, other values by type.

    >>> describe(2.5), describe("3"), describe([1, 2]), describe(None), describe(np.zeros(3, np.float32))
    ('2.5', "'3'", 'a list', 'None', 'an array, float32(3,)')
    """
    if isinstance(value, jax.core.Tracer):
        return f"traced, {value.dtype}{value.shape}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array, {value.dtype}{value.shape}"
    if value is None or isinstance(value, bool | int | float | complex | str | np.generic):
        return str(value) if isinstance(value, np.generic) else repr(value)[:60]
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
