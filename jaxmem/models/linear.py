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
        self, x: Float[Array, "*batch inputs"], keys: Keys | None = None, rounded_x: Any = None
    ) -> Float[Array, "*batch outputs"]:
        """`keys`, for the first dimensions of x, enable the dropout of an adapter. `rounded_x`: x as a `fp8.Rounded`,
        if other layers use it too."""
        frozen = self._frozen_quantized
        stored = self.weight.get_value()
        axes = axes_of(self.weight, 2)
        w = None  # in the dtype of x
        if frozen is not None:
            y = dequantizing_matmul(x, frozen, axes, self.scaling)
        elif self.scaling == "tensor":
            from jaxmem.models import fp8

            operand, rounded_w = gather_encoded(x, stored, axes, x.dtype, fp8.round_values)
            y = matmul(operand, rounded_w, self.scaling, rounded_x)
        else:
            operand, w = gather_with_input(x, stored, axes, x.dtype)
            y = matmul(operand, w, self.scaling, None, axes)
        y = saved_as(y, MATMUL)
        if self.lora is not None:
            y = self.lora(x, y, partial(fetch, self.weight, x.dtype) if w is None else lambda: w, keys)
        return y if self.bias is None else add_bias(y, fetch(self.bias, jnp.float32))

    @property
    def _frozen_quantized(self) -> QTensor | None:
        """The weight if it is quantized and has no gradient; otherwise None."""
        frozen = frozen_of(self.weight.get_value())
        return frozen if isinstance(frozen, QTensor) else None


def apply_linears(
    x: Float[Array, "*batch inputs"], layers: Sequence[Linear], keys: Sequence[Keys | None]
) -> list[Float[Array, "*batch outputs"]]:
    """The outputs of several layers, each with its keys. In FP8 with one scale per tensor, x is rounded once, and saved
    once for the backward passes of all."""
    rounded_x = None
    if all(layer.scaling == "tensor" for layer in layers):
        from jaxmem.models import fp8

        rounded_x = fp8.round_values(jax.lax.stop_gradient(x))
    return [layer(x, layer_keys, rounded_x) for layer, layer_keys in zip(layers, keys, strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(2, 4))
def matmul(
    x: Float[Array, "*batch inputs"],
    w: Float[Array, "inputs outputs"] | StoredWeight,
    scaling: Scaling | None = None,
    rounded_x: Any = None,
    axes: Axes | None = None,
) -> Float[Array, "*batch outputs"]:
    """x @ w, with the weight gradient computed in the order of the weight. jax would compute the transposed gradient
    and transpose it, which copies activations on CPUs (a quarter of the time of a step). A stored weight is one that is
    rounded already, and the array that receives its gradient. `rounded_x`: x as a `fp8.Rounded`. `axes`: the logical
    axes of w, if x is sharded."""
    operand: Any = stored_of(w)
    if scaling is None:
        return x @ operand
    from jaxmem.models import fp8

    return fp8.product(x if rounded_x is None else rounded_x, operand, scaling, x.dtype, axes)


def _matmul_forward(
    x: jax.Array, w: jax.Array | StoredWeight, scaling: Scaling | None, rounded_x: Any, axes: Axes | None
) -> tuple[jax.Array, Any]:
    """With one scale per operand, the rounded operands are saved for the backward pass."""
    saved_x: Any = x
    if scaling == "tensor":
        from jaxmem.models import fp8

        saved_x = rounded_x = fp8.round_values(x) if rounded_x is None else rounded_x
    return matmul(x, w, scaling, rounded_x, axes), (saved_x, w)


def _matmul_backward(
    scaling: Scaling | None, axes: Axes | None, saved: tuple[Any, Any], g: jax.Array
) -> tuple[jax.Array, Any, None]:
    x, w = saved
    of_x = _input_gradient(g, stored_of(w), scaling, axes)
    of_w = _weight_gradient(x, g, scaling, axes)
    return of_x, StoredWeight(None, of_w) if isinstance(w, StoredWeight) else of_w, None  # type: ignore[arg-type]


def _input_gradient(g: jax.Array, w: Any, scaling: Scaling | None, axes: Axes | None) -> jax.Array:
    if scaling is None:
        return g @ w.T
    from jaxmem.models import fp8

    return fp8.input_gradient(g, w, scaling, axes)


def _weight_gradient(x: Any, g: jax.Array, scaling: Scaling | None, axes: Axes | None) -> jax.Array:
    if scaling is None:
        rows = tuple(range(x.ndim - 1))
        return jax.lax.dot_general(x, g, ((rows, rows), ((), ())))
    from jaxmem.models import fp8

    return fp8.weight_gradient(x, g, scaling, axes)


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
