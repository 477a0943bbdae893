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

from jaxmem.models.embedding import take_rows
from jaxmem.quant import values_of
from jaxmem.sharding.table import Axis

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Embed)


def as_matrix(module: Any) -> Any:
    """The weight of a layer as the `weight` of a `Linear` or an `Embedding`, [inputs, outputs], without its values."""
    *stack, inputs, outputs = _shape(module)
    shape = (*stack, math.prod(inputs), math.prod(outputs))
    sharded = Axis("embed", if_even=True)
    axes = (*(["layer"] if stack else []), sharded, sharded)
    weight = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes)
    return SimpleNamespace(weight=weight, is_embedding=isinstance(module, nnx.Embed))


def add(module: Any, lora: Any) -> None:
    """Adds an adapter to a layer, in place, or replaces the one that it has."""
    module.__class__ = _with_lora(_class_without(module))
    module.lora = lora


def merge(module: Any) -> None:
    """Adds the adapter of a layer, if it has one, to its weight, and removes it."""
    kind = _class_without(module)
    if kind is type(module):
        return
    a, b, scale = _parts(module.lora)
    update = a.astype(jnp.float32) @ b.astype(jnp.float32)  # [*layers, inputs, outputs]
    weight = _weight(module)
    w = weight.get_value()
    *stack, inputs, outputs = _shape(module)
    update = jnp.reshape(scale, (-1, *[1] * (update.ndim - 1))) * update
    update = update.reshape(*stack, *inputs, *outputs)
    if isinstance(module, nnx.Einsum):
        _, _, inner, outer, sizes = _equation(module)
        update = jnp.einsum(f"...{inner}{outer}->...{''.join(sizes)}", update)
    merged = values_of(w, jnp.float32) + update
    weight.set_value(merged.astype(w.dtype))  # bfloat16 in place of a quantized weight, as `low_rank._merged`
    module.__class__ = kind
    del module.lora


def _class_without(module: Any) -> Any:
    """The class of a layer without its adapter."""
    return getattr(module, "adapted", type(module))


def _parts(lora: Any) -> tuple[jax.Array, jax.Array, Any]:
    """A, B and the scale, which may differ between layers."""
    scale = lora.scale if lora.layer_scale is None else lora.layer_scale.get_value()
    return lora.a.get_value(), lora.b.get_value(), scale


@functools.cache
def _with_lora(kind: Any) -> Any:
    class WithLora(kind):
        adapted = kind

        def __call__(self, x: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
            y = super().__call__(x, *arguments, **options)
            a, b, scale = _parts(self.lora)
            return y + (scale * _low_rank(self, x, y, a, b)).astype(y.dtype)

    def attend(self: Any, query: jax.Array) -> jax.Array:
        """The logits of an embedding that is also the output layer."""
        y = kind.attend(self, query)
        a, b, scale = _parts(self.lora)
        return y + (scale * (query.astype(y.dtype) @ b.T @ a.T)).astype(y.dtype)

    if issubclass(kind, nnx.Embed):
        WithLora.attend = attend
    WithLora.__name__ = WithLora.__qualname__ = kind.__name__
    return WithLora


def _low_rank(module: Any, x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """(x A) B in the shape of the output y."""
    if isinstance(module, nnx.Embed):
        return take_rows(a, x, a.dtype) @ b
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
