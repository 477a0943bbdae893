"""The linear layer, and its matmuls: with a weight, with a frozen quantized weight, and fused with dequantization."""

from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxmem.config.recompute import MATMUL
from jaxmem.errors import UserError
from jaxmem.models.layers import Keys, axes_of, fetch, fetch_for, new_constant, new_weight
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, current, gather, gather_quantized, map_devices
from jaxmem.sharding.weights import StoredWeight


class Linear(nnx.Module):
    def __init__(
        self, rngs: nnx.Rngs, inputs: int, outputs: int, axes: tuple[str | None, str | None], *, bias: bool = False
    ):
        self.weight = new_weight(rngs, (inputs, outputs), axes)
        self.bias = new_constant(0.0, (outputs,), axes[1:]) if bias else None
        self.lora: Any = nnx.data(None)  # an adapter of jaxmem.adapters
        # The implementation of matmuls with a frozen quantized weight (kernels.dequant_matmul); None: dequantize.
        self.dequant_matmul: str | None = None

    def __call__(self, x: Float[Array, "*batch inputs"], keys: Keys | None = None) -> Float[Array, "*batch outputs"]:
        """`keys`, for the first dimensions of x, enable the dropout of an adapter."""
        frozen, w = self._frozen_quantized, None
        if frozen is None:
            own, w = fetch_for(x, self.weight, x.dtype)
            y = matmul(own, w)
        elif self.dequant_matmul is None:
            y = dequantizing_matmul(x, frozen, axes_of(self.weight, 2))
        else:
            y = fused_dequant_matmul(x, frozen, axes_of(self.weight, 2), self.dequant_matmul, False)
        y = checkpoint_name(y, MATMUL)
        if self.lora is not None:
            y = self.lora(x, y, partial(fetch, self.weight, x.dtype) if w is None else lambda: w, keys)
        return y if self.bias is None else y + fetch(self.bias, x.dtype)

    @property
    def _frozen_quantized(self) -> QTensor | None:
        """The weight if it is quantized and has no gradient; otherwise None."""
        value = self.weight.get_value()
        frozen = isinstance(value, StoredWeight) and value.proxy is None and isinstance(value.stored, QTensor)
        return value.stored if frozen else None


@jax.custom_vjp
def matmul(x: Float[Array, "*batch inputs"], w: Float[Array, "inputs outputs"]) -> Float[Array, "*batch outputs"]:
    """x @ w, with the weight gradient computed in the order of the weight. jax would compute the transposed gradient
    and transpose it, which copies activations on CPUs (a quarter of the time of a step)."""
    return x @ w


def _matmul_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    rows = tuple(range(x.ndim - 1))
    return g @ w.T, jax.lax.dot_general(x, g, ((rows, rows), ((), ())))


matmul.defvjp(lambda x, w: (x @ w, (x, w)), _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dequantizing_matmul(x: Float[Array, "*batch inputs"], q: QTensor, axes: Axes) -> Float[Array, "*batch outputs"]:
    """x @ w for a frozen quantized weight, which is dequantized only when x is available, and again for the gradient.
    So one dequantized matrix exists at a time."""
    return x @ _dequantized_after(x, q, axes)


def _dequantized_after(x: jax.Array, q: QTensor, axes: Axes) -> jax.Array:
    x, q = jax.lax.optimization_barrier((x, q))
    return gather(q, axes, x.dtype)


dequantizing_matmul.defvjp(
    lambda x, q, axes: (dequantizing_matmul(x, q, axes), q),
    lambda axes, q, g: (g @ _dequantized_after(g, q, axes).T, None),
)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def fused_dequant_matmul(x: jax.Array, q: QTensor, axes: Axes, implementation: str, transposed: bool) -> jax.Array:
    """`kernels.dequant_matmul` of x [*batch, inputs] with a frozen weight. The codes of the weight are gathered, and
    gathered again for the gradient; each device multiplies its own tokens. A complete dequantized weight never
    exists."""
    from jaxmem import kernels

    x, q = jax.lax.optimization_barrier((x, q))  # gathers only when x is available
    q, layout = gather_quantized(q, axes), current()
    double_quant = isinstance(q.scale, QTensor)
    scale = kernels.QuantizedScales(q.scale.codes, q.scale.scale, q.scale.offset) if double_quant else q.scales
    run = partial(
        kernels.dequant_matmul,
        format=q.format,
        block_size=q.block_size,
        inputs=q.shape[0],
        transposed=transposed,
        implementation=implementation,
    )
    try:
        if layout is not None:
            tokens = layout.spec("activations", (*("batch", "time")[: x.ndim - 1], None))
            specs = (tokens, layout.spec("compute", (None, None)), layout.spec("compute", ()))
            run = map_devices(run, specs, tokens)
        return run(x, q.codes, scale)
    except ValueError as error:
        raise UserError(f"adapter.matmul: {error}; use adapter.matmul=auto") from error


fused_dequant_matmul.defvjp(
    lambda x, q, *options: (fused_dequant_matmul(x, q, *options), q),
    lambda axes, implementation, transposed, q, g: (
        fused_dequant_matmul(g, q, axes, implementation, not transposed),
        None,
    ),
)
