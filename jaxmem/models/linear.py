"""The linear layer, and its matmuls, in the dtype of the input or in FP8: with a weight, and with a frozen quantized
weight."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmem.config.base import Scaling
from jaxmem.config.recompute import MATMUL
from jaxmem.models import fp8
from jaxmem.models.layers import Keys, add_bias, axes_of, fetch, new_constant, new_weight
from jaxmem.quant import QTensor
from jaxmem.sharding.gathering import gather, gather_encoded, gather_with_input
from jaxmem.sharding.table import Axes
from jaxmem.sharding.weights import StoredWeight, frozen_of, stored_of
from jaxmem.stack.remat import saved_as


class Linear(nnx.Module):
    scaling: Scaling | None = None  # of matmuls in FP8; None: they run in the dtype of the input

    def __init__(
        self, rngs: nnx.Rngs, inputs: int, outputs: int, axes: tuple[str | None, str | None], *, bias: bool = False
    ):
        self.weight = new_weight(rngs, (inputs, outputs), axes)
        self.bias = new_constant(0.0, (outputs,), axes[1:]) if bias else None
        self.lora: Any = nnx.data(None)  # an adapter of jaxmem.adapters

    def __call__(
        self, x: Float[Array, "*batch inputs"], keys: Keys | None = None, rounded_x: fp8.Rounded | None = None
    ) -> Float[Array, "*batch outputs"]:
        """`keys`, for the first dimensions of x, enable the dropout of an adapter. `rounded_x`: x, rounded, if other
        layers use it too."""
        stored = self.weight.get_value()
        frozen = frozen_of(stored)
        axes = axes_of(self.weight, 2)
        w = None  # in the dtype of x
        if isinstance(frozen, QTensor):
            y = dequantizing_matmul(x, frozen, axes, self.scaling)
        elif self.scaling == "tensor":
            operand, rounded_w = gather_encoded(x, stored, axes, x.dtype, fp8.round_values)
            y = matmul(operand, rounded_w, self.scaling, rounded_x)
        else:
            operand, w = gather_with_input(x, stored, axes, x.dtype)
            y = matmul(operand, w, self.scaling, None, axes)
        y = saved_as(y, MATMUL)
        if self.lora is not None:
            y = self.lora(x, y, partial(fetch, self.weight, x.dtype) if w is None else lambda: w, keys)
        return y if self.bias is None else add_bias(y, fetch(self.bias, jnp.float32))


def apply_linears(
    x: Float[Array, "*batch inputs"], layers: Sequence[Linear], keys: Sequence[Keys | None]
) -> list[Float[Array, "*batch outputs"]]:
    """The outputs of several layers, each with its keys. In FP8 with one scale per tensor, x is rounded once, and saved
    once for the backward passes of all."""
    rounds_once = all(layer.scaling == "tensor" for layer in layers)
    rounded_x = fp8.round_values(jax.lax.stop_gradient(x)) if rounds_once else None
    return [layer(x, layer_keys, rounded_x) for layer, layer_keys in zip(layers, keys, strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(2, 4))
def matmul(
    x: Float[Array, "*batch inputs"],
    w: Float[Array, "inputs outputs"] | StoredWeight,
    scaling: Scaling | None = None,
    rounded_x: fp8.Rounded | None = None,
    axes: Axes | None = None,
) -> Float[Array, "*batch outputs"]:
    """x @ w, with the weight gradient computed in the order of the weight. jax would compute the transposed gradient
    and transpose it, which copies activations on CPUs (a quarter of the time of a step). A stored weight is one that is
    rounded already, and the array that receives its gradient. `axes`: the logical axes of w, if x is sharded."""
    operand: Any = stored_of(w)
    if scaling is None:
        return x @ operand
    return fp8.product(x if rounded_x is None else rounded_x, operand, scaling, x.dtype, axes)


def _matmul_forward(
    x: jax.Array,
    w: jax.Array | StoredWeight,
    scaling: Scaling | None,
    rounded_x: fp8.Rounded | None,
    axes: Axes | None,
) -> tuple[jax.Array, Any]:
    """With one scale per operand, the rounded operands are saved for the backward pass."""
    if scaling == "tensor" and rounded_x is None:
        rounded_x = fp8.round_values(x)
    return matmul(x, w, scaling, rounded_x, axes), (x if rounded_x is None else rounded_x, w)


def _matmul_backward(
    scaling: Scaling | None, axes: Axes | None, saved: tuple[Any, Any], g: jax.Array
) -> tuple[jax.Array, Any, None]:
    x, w = saved
    of_x = _input_gradient(g, stored_of(w), scaling, axes)
    if scaling is None:
        rows = tuple(range(x.ndim - 1))
        of_w = jax.lax.dot_general(x, g, ((rows, rows), ((), ())))
    else:
        of_w = fp8.weight_gradient(x, g, scaling, axes)
    return of_x, StoredWeight(None, of_w) if isinstance(w, StoredWeight) else of_w, None  # type: ignore[arg-type]


def _input_gradient(g: jax.Array, w: Any, scaling: Scaling | None, axes: Axes | None) -> jax.Array:
    return g @ w.T if scaling is None else fp8.input_gradient(g, w, scaling, axes)


matmul.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dequantizing_matmul(
    x: Float[Array, "*batch inputs"], q: QTensor, axes: Axes, scaling: Scaling | None = None
) -> Float[Array, "*batch outputs"]:
    """x @ w for a frozen quantized weight, which is dequantized only when x is available, and again for the gradient.
    So one dequantized matrix exists at a time."""
    return matmul(x, _dequantized_after(x, q, axes), scaling, None, axes)


def _dequantized_after(x: jax.Array, q: QTensor, axes: Axes) -> jax.Array:
    x, q = jax.lax.optimization_barrier((x, q))
    return gather(q, axes, x.dtype)


def _dequantizing_backward(axes: Axes, scaling: Scaling | None, q: QTensor, g: jax.Array) -> tuple[jax.Array, None]:
    return _input_gradient(g, _dequantized_after(g, q, axes), scaling, axes), None


dequantizing_matmul.defvjp(
    lambda x, q, axes, scaling: (dequantizing_matmul(x, q, axes, scaling), q), _dequantizing_backward
)
