"""A matrix product with a weight in codes, which is never decoded whole. `reference.py` says what it computes.

A new implementation is a module with `multiply` and `of_activations` as in `reference.py`, and a line in
IMPLEMENTATIONS; one that cannot run a call raises ValueError and says why. `tests/kernels/test_dequant_matmul.py` holds
for all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.kernels import choice
from jaxmem.kernels.given import Given

from . import pallas, reference, sliced
from .arguments import FORMS, Call, Constants, checked

IMPLEMENTATIONS: dict[str, Any] = {"pallas": pallas, "reference": reference, "sliced": sliced}


def dequant_matmul(
    x: ArrayLike,
    codes: ArrayLike,
    scale: Any,  # an array, or Constants
    *,
    format: str,  # noqa: A002 - the word everybody uses
    block_size: int,
    inputs: int | None = None,
    transposed: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """x @ w, where w = value(codes) * scale, of [inputs, outputs]; `transposed`: x @ w.T.

    x is [..., inputs] (transposed [..., outputs]), codes [inputs / values a byte, outputs], scale [blocks, outputs].
    `format`: nf4, fp4, int4 (two values to a byte along `inputs`, the first in the high bits, uint8) or int8. `scale`
    has a float32 for each `block_size` inputs of each output, or codes of them: `Constants`. Values are decoded in
    float32 and rounded to the dtype of x; sums are in float32. x alone has a gradient, made from the same codes.
    `inputs`: by default as many as x, or the codes, have. `implementation`: a name in IMPLEMENTATIONS; None picks one.
    """
    transposed = Given("dequant_matmul").flag("transposed", transposed)
    x, codes, scale, call = checked(x, codes, scale, format, block_size, inputs, transposed)
    made = choice.run(
        "dequant_matmul",
        implementation,
        IMPLEMENTATIONS,
        lambda way: _product(way, call, transposed, x.reshape(-1, x.shape[-1]), codes, scale),
        (x, codes, scale),
        portable="sliced",
        kind=f"{format} {x.dtype.name}",
        sizes=(x.size // x.shape[-1], call.inputs, call.outputs),
    )
    return made.reshape(*x.shape[:-1], made.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(run: Any, call: Call, transposed: bool, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    return (run.of_activations if transposed else run.multiply)(call, x, codes, scale)


def _forward(
    run: Any, call: Call, transposed: bool, x: jax.Array, codes: jax.Array, scale: Any
) -> tuple[jax.Array, Any]:
    return _product(run, call, transposed, x, codes, scale), (codes, scale)


def _backward(run: Any, call: Call, transposed: bool, kept: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    return _product(run, call, not transposed, g, *kept), None, None


_product.defvjp(_forward, _backward)

__all__ = ["FORMS", "IMPLEMENTATIONS", "Call", "Constants", "dequant_matmul"]
