"""LoRA for Flax's layers: Linear, LinearGeneral, Einsum and Embed.

The names of the weights of a layer stay the same: it gets the attribute `lora`, and its class is replaced by a subclass
whose call adds s (x A) B. The kernel is regarded as a matrix of its contracted dimensions and the others.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.sharding import Axis

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Embed)


def as_matrix(module: Any) -> Any:
    """The weight of a layer as the `weight` of a `Linear`, [inputs, outputs], without its values."""
    *stack, inputs, outputs = _shape(module)
    shape = (*stack, math.prod(inputs), math.prod(outputs))
    sharded = Axis("embed", if_even=True)
    axes = (*(["layer"] if stack else []), sharded, sharded)
    return SimpleNamespace(weight=nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes))


def add(module: Any, lora: Any) -> None:
    """Adds an adapter to a layer, in place."""
    kind: Any = type(module)
    module.__class__ = _with_lora(kind)
    module.lora = lora


@functools.cache
def _with_lora(kind: Any) -> Any:
    class WithLora(kind):
        def __call__(self, x: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
            y = super().__call__(x, *arguments, **options)
            a, b = (w.get_value() for w in (self.lora.a, self.lora.b))
            scale = self.lora.scale if self.lora.layer_scale is None else self.lora.layer_scale.get_value()
            return y + (scale * _low_rank(self, x, y, a, b)).astype(y.dtype)

    WithLora.__name__ = WithLora.__qualname__ = kind.__name__
    return WithLora


def _low_rank(module: Any, x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """(x A) B in the shape of the output y."""
    if isinstance(module, nnx.Embed):
        return a[x] @ b
    x = x.astype(y.dtype)
    if isinstance(module, nnx.Einsum):
        inputs, result, inner, outer, sizes = _equation(module)
        kept_dims = "".join(d for d in inputs if d not in inner)
        rows = jnp.einsum(f"{inputs},{inner}z->{kept_dims}z", x, a.reshape(*(sizes[d] for d in inner), -1))
        return jnp.einsum(f"{kept_dims}z,z{outer}->{result}", rows, b.reshape(-1, *(sizes[d] for d in outer)))
    contracted = y.ndim - _outer_dims(module)
    return (x.reshape(*x.shape[:contracted], -1) @ a @ b).reshape(y.shape)


def _shape(module: Any) -> tuple[Any, ...]:
    """(the number of layers if they are stacked, the contracted dimensions, the other dimensions) of the weight."""
    shape = _weight(module).shape
    if isinstance(module, nnx.Einsum):
        _, _, inner, outer, sizes = _equation(module)
        stack = shape[: len(shape) - len(sizes)]
        return (*stack, tuple(sizes[d] for d in inner), tuple(sizes[d] for d in outer))
    last = len(shape) - _outer_dims(module)
    first = last - (len(module.in_features) if isinstance(module, nnx.LinearGeneral) else 1)
    return (*shape[:first], shape[first:last], shape[last:])


def _outer_dims(module: Any) -> int:
    return len(module.out_features) if isinstance(module, nnx.LinearGeneral) else 1


def _equation(module: Any) -> tuple[str, str, str, str, dict[str, int]]:
    """The dimensions of an Einsum: those of the input, those of the output, the contracted and the other dimensions of
    the kernel; and the sizes of the dimensions."""
    operands, result = module.einsum_str.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    shape = _weight(module).shape
    sizes = dict(zip(kernel, shape[len(shape) - len(kernel) :], strict=True))
    inner = "".join(d for d in kernel if d not in result)
    return inputs, result, inner, "".join(d for d in kernel if d in result), sizes


def can_adapt(module: Any) -> bool:
    """Whether a layer has a weight that is a matrix of contracted and other dimensions."""
    if isinstance(module, nnx.LinearGeneral):  # contracts the last dimensions of its input
        last = tuple(range(-len(module.in_features), 0))
        return not module.batch_axis and tuple(module.axis) == last
    if isinstance(module, nnx.Einsum):
        if not module.einsum_str or "..." in module.einsum_str or "z" in module.einsum_str:
            return False
        inputs, _, inner, outer, _ = _equation(module)
        return bool(inner) and set(inner) <= set(inputs) and not set(outer) & set(inputs)
    return isinstance(module, LAYERS)


def _weight(module: Any) -> Any:
    return module.embedding if isinstance(module, nnx.Embed) else module.kernel
