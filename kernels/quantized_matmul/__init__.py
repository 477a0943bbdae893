"""A matmul with a quantized weight. `reference.py` defines the results.

A new implementation is a module with `multiply` and `of_activations` as in `reference.py`, and a line in
IMPLEMENTATIONS; it raises ValueError for calls that it does not support. `tests/kernels/test_quantized_matmul.py` tests
all implementations.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, UInt8

from jaxmem.kernels.choice import Operation
from jaxmem.kernels.codes import E2M1, FP4, NF4
from jaxmem.kernels.typing import Tree
from jaxmem.kernels.validation import FLOATS, Validator, describe

IMPLEMENTATIONS: dict[str, Any] = {name: f"{__name__}.{name}" for name in ("reference", "sliced")}


class QuantizedScales(NamedTuple):
    """Quantized block scales (double quantization): block scale = value(code) * scale + mean, with the value of a
    signed 8-bit dynamic code."""

    codes: UInt8[Array, "blocks outputs"]
    scale: Float[Array, "groups outputs"]  # one per group of blocks
    mean: Float[Array, "1 1"]


@dataclass(frozen=True)
class Form:
    """An encoding of values from -1 to 1 (mxfp4: from -6 to 6)."""

    bits: int
    listed: tuple[float, ...] | None = None  # the value of each code; None: evenly spaced

    @property
    def together(self) -> int:
        """Codes per byte: neighbours along `inputs`, the first in the high bits."""
        return 8 // self.bits

    @property
    def steps(self) -> int:
        """Steps from 0 to 1 of evenly spaced values."""
        return 2 ** (self.bits - 1) - 1


FORMS = {"nf4": Form(4, NF4), "fp4": Form(4, FP4), "mxfp4": Form(4, E2M1), "int4": Form(4), "int8": Form(8)}


@dataclass(frozen=True)
class MatmulCall:
    """Compile-time properties of a call."""

    form: Form
    block: int  # inputs that share a scale
    inputs: int
    outputs: int

    @property
    def unit(self) -> int:
        """Rows of codes that share a scale."""
        return self.block // self.form.together


def check_arguments(
    x: Any, codes: Any, scale: Any, format_: Any, block_size: Any, inputs: Tree, transposed: bool
) -> tuple[jax.Array, jax.Array, Any, MatmulCall]:
    """The arrays and the compile-time properties; ValueError names a wrong argument."""
    checks = Validator("dequant_matmul")
    known = isinstance(format_, str) and format_ in FORMS
    checks.require(known, f"format is {describe(format_)}; it should be one of {', '.join(FORMS)}")
    form = FORMS[format_]
    last = "outputs" if transposed else "inputs"
    x = checks.array("x", x, f"[..., {last}]", FLOATS)
    codes = checks.array("codes", codes, "[inputs, outputs]")
    wanted = "int8" if form.bits == 8 else "uint8"
    checks.require(codes.dtype.name == wanted, f"codes is {codes.dtype}; codes of {format_} are {wanted}")
    outputs = codes.shape[1]
    if inputs is None:
        inputs = codes.shape[0] * form.together if transposed else x.shape[-1]
    inputs = checks.whole_number("inputs", inputs)
    block = checks.whole_number("block_size", block_size)
    wide = outputs if transposed else inputs
    checks.require(x.shape[-1] == wide, f"x has shape {x.shape}; its last dimension should be the {wide} {last}")
    rows = -(-inputs // form.together)
    checks.require(codes.shape[0] == rows, f"codes has {codes.shape[0]} rows; {inputs} inputs in {format_} need {rows}")
    checks.require(block >= 1, f"block_size is {block}; it should be at least 1")
    blocks = -(-inputs // block)
    scale = _scale(checks, scale)
    scales = scale.codes if isinstance(scale, QuantizedScales) else scale
    checks.require(
        scales.shape == (blocks, outputs),
        f"scale has shape {scales.shape}; {inputs} inputs in blocks of {block} need {(blocks, outputs)}",
    )
    if isinstance(scale, QuantizedScales):
        checks.require(
            scale.scale.shape[1:] == (outputs,) and scale.scale.size > 0 and scale.mean.shape == (1, 1),
            f"scale has groups of shape {scale.scale.shape} and a mean of {scale.mean.shape}; they should be"
            f" [groups, {outputs}] and [1, 1]",
        )
    if blocks == 1:  # the size of a single block beyond the inputs has no effect; a small size fits in 32 bits
        block = min(block, max(2, 1 << (inputs - 1).bit_length()))
    return x, codes, scale, MatmulCall(form, block, inputs, outputs)


def _scale(checks: Validator, scale: Any) -> Tree:
    if not isinstance(scale, QuantizedScales):
        array = isinstance(scale, jax.Array | np.ndarray)
        checks.require(array, f"scale is {describe(scale)}; it should be an array or QuantizedScales")
        return checks.array("scale", scale, None, ("float32",))
    return QuantizedScales(
        checks.array("scale.codes", scale.codes, None, ("uint8",)),
        checks.array("scale.scale", scale.scale, None, ("float32",)),
        checks.array("scale.mean", scale.mean, None, ("float32",)),
    )


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
    """x @ w, where w = value(codes) * scale. Values are dequantized in float32 and rounded to the dtype of x; sums are
    in float32. Only x has a gradient, computed from the same codes.

    Args:
        x: [..., inputs]; transposed [..., outputs].
        codes: [inputs / codes per byte, outputs].
        scale: [blocks, outputs], a float32 for each `block_size` inputs of each output, or `QuantizedScales`.
        format: nf4, fp4, mxfp4, int4 (two codes per byte along `inputs`, the first in the high bits, uint8) or int8.
        block_size: Inputs per scale.
        inputs: By default the size in x, or in the codes.
        transposed: Compute x @ w.T.
        implementation: A name in IMPLEMENTATIONS; None: `sliced`.

    Returns:
        [..., outputs], transposed [..., inputs], in the dtype of x.
    """
    transposed = Validator("dequant_matmul").flag("transposed", transposed)
    x, codes, scale, call = check_arguments(x, codes, scale, format, block_size, inputs, transposed)
    product = Operation("dequant_matmul", IMPLEMENTATIONS, "sliced").run(
        implementation,
        lambda module: _matmul(module, call, transposed, x.reshape(-1, x.shape[-1]), codes, scale),
        (x, codes, scale),
    )
    return product.reshape(*x.shape[:-1], product.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _matmul(module: Any, call: MatmulCall, transposed: bool, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    return (module.of_activations if transposed else module.multiply)(call, x, codes, scale)


_matmul.defvjp(
    lambda *arguments: (_matmul(*arguments), arguments[-2:]),
    lambda module, call, transposed, saved, g: (_matmul(module, call, not transposed, g, *saved), None, None),
)


class MatmulShape(NamedTuple):
    tokens: int
    inputs: int
    outputs: int
    format: str = "nf4"
    block: int = 64
    double: bool = True

    @property
    def flops(self) -> int:
        """Operations of the matmul, or of its gradient with respect to x."""
        return 2 * self.tokens * self.inputs * self.outputs


MATMUL_SHAPES = {
    "llama3-8b up": MatmulShape(512, 4096, 14336),
    "llama3-8b down": MatmulShape(512, 14336, 4096),
    "llama3-8b up, long": MatmulShape(8192, 4096, 14336),
    "llama3-8b one token": MatmulShape(1, 4096, 14336),
    "llama3-70b up": MatmulShape(2048, 8192, 28672),
    "qwen2.5-7b int4": MatmulShape(2048, 3584, 18944, "int4", double=False),
    "llama2-7b int8": MatmulShape(2048, 4096, 11008, "int8", 256, double=False),
}
