"""A matmul with a quantized weight. `reference.py` defines the results.

A new implementation is a module with `multiply` and `of_activations` as in `reference.py`, and a line in
IMPLEMENTATIONS; it raises ValueError for calls that it does not support. `tests/kernels/test_quantized_matmul.py` tests
all implementations.
"""

from functools import partial
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.kernels.choice import Operation
from jaxmem.kernels.validation import Validator

from .arguments import FORMS, MatmulCall, QuantizedScales, check_arguments

IMPLEMENTATIONS: dict[str, Any] = {name: f"{__name__}.{name}" for name in ("reference", "sliced", "triton")}


def dequant_matmul(
    x: ArrayLike,
    codes: ArrayLike,
    scale: Any,  # an array, or QuantizedScales
    *,
    format: str,  # noqa: A002 - the usual name
    block_size: int,
    inputs: int | None = None,
    transposed: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """x @ w, where w = value(codes) * scale, of [inputs, outputs]; `transposed`: x @ w.T.

    x is [..., inputs] (transposed [..., outputs]), codes [inputs / codes per byte, outputs], scale [blocks, outputs].
    `format`: nf4, fp4, mxfp4, int4 (two codes per byte along `inputs`, the first in the high bits, uint8) or int8.
    `scale` has a float32 for each `block_size` inputs of each output, or is `QuantizedScales`. Values are dequantized
    in float32 and rounded to the dtype of x; sums are in float32. Only x has a gradient, computed from the same codes.
    `inputs`: by default the size in x, or in the codes. `implementation`: a name in IMPLEMENTATIONS; None: chosen by
    `kernels.choice`.
    """
    transposed = Validator("dequant_matmul").flag("transposed", transposed)
    x, codes, scale, call = check_arguments(x, codes, scale, format, block_size, inputs, transposed)
    product = Operation("dequant_matmul", IMPLEMENTATIONS, "sliced").run(
        implementation,
        lambda module: _product(module, call, transposed, x.reshape(-1, x.shape[-1]), codes, scale),
        (x, codes, scale),
        kind=f"{format} {x.dtype.name}",
        sizes=(x.size // x.shape[-1], call.inputs, call.outputs),
    )
    return product.reshape(*x.shape[:-1], product.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(module: Any, call: MatmulCall, transposed: bool, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    return (module.of_activations if transposed else module.multiply)(call, x, codes, scale)


def _forward(
    module: Any, call: MatmulCall, transposed: bool, x: jax.Array, codes: jax.Array, scale: Any
) -> tuple[jax.Array, Any]:
    return _product(module, call, transposed, x, codes, scale), (codes, scale)


def _backward(
    module: Any, call: MatmulCall, transposed: bool, saved: Any, g: jax.Array
) -> tuple[jax.Array, None, None]:
    return _product(module, call, not transposed, g, *saved), None, None


_product.defvjp(_forward, _backward)

__all__ = ["FORMS", "IMPLEMENTATIONS", "MatmulCall", "QuantizedScales", "dequant_matmul"]
