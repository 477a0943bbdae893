"""What the product takes: checked once, in one place, whichever implementation runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxmem.kernels.codes import FP4, NF4

DTYPES = ("float32", "bfloat16", "float16")


class Constants(NamedTuple):
    """Constants of blocks that are in codes themselves (double quantization): constant = value(code) * scale + mean,
    with the value of a signed dynamic code of 8 bits."""

    codes: UInt8[Array, "blocks outputs"]
    scale: Float[Array, "groups outputs"]  # of as many blocks each
    mean: Float[Array, "1 1"]


@dataclass(frozen=True)
class Form:
    """How values from -1 to 1 are coded."""

    bits: int
    listed: tuple[float, ...] | None = None  # what each code stands for; None: evenly spaced

    @property
    def together(self) -> int:
        """Values in a byte, neighbours along `inputs`, the first in the highest bits."""
        return 8 // self.bits

    @property
    def steps(self) -> int:
        """From 0 to 1, of evenly spaced ones."""
        return 2 ** (self.bits - 1) - 1


FORMS = {"nf4": Form(4, NF4), "fp4": Form(4, FP4), "int4": Form(4), "int8": Form(8)}


@dataclass(frozen=True)
class Call:
    """All that is known when the program is compiled."""

    form: Form
    block: int  # inputs that share a constant
    inputs: int
    outputs: int

    @property
    def unit(self) -> int:
        """Rows of codes that share a constant."""
        return self.block // self.form.together


def checked(
    x: jax.Array, codes: jax.Array, scale: Any, format_: str, block_size: int, inputs: int | None, transposed: bool
) -> Call:
    """The call, or a ValueError that names the argument and what it should be."""
    _require(format_ in FORMS, f"format is {format_!r}; it should be one of {', '.join(FORMS)}")
    form = FORMS[format_]
    last = "outputs" if transposed else "inputs"
    _require(x.ndim >= 1 and x.size > 0, f"x has shape {x.shape}; it should be [..., {last}], of no dimension empty")
    _require(x.dtype.name in DTYPES, f"x is {x.dtype}; it should be one of {', '.join(DTYPES)}")
    _require(
        codes.ndim == 2 and codes.size > 0,
        f"codes has shape {codes.shape}; it should be [inputs, outputs], several to a byte",
    )
    wanted = "int8" if form.bits == 8 else "uint8"
    _require(codes.dtype.name == wanted, f"codes is {codes.dtype}; codes of {format_} are {wanted}")
    outputs = codes.shape[1]
    inputs = (codes.shape[0] * form.together if transposed else x.shape[-1]) if inputs is None else inputs
    wide = outputs if transposed else inputs
    _require(x.shape[-1] == wide, f"x has shape {x.shape}; its last dimension should be the {wide} {last}")
    rows = -(-inputs // form.together)
    _require(codes.shape[0] == rows, f"codes has {codes.shape[0]} rows; {inputs} inputs in {format_} take {rows}")
    _require(block_size >= 1, f"block_size is {block_size}; it should be at least 1")
    blocks = -(-inputs // block_size)
    own = scale.codes if isinstance(scale, Constants) else scale
    _require(
        own.shape == (blocks, outputs),
        f"scale has shape {own.shape}; {inputs} inputs in blocks of {block_size} take {(blocks, outputs)}",
    )
    if isinstance(scale, Constants):
        _require(
            scale.scale.shape[1:] == (outputs,) and scale.scale.size > 0 and scale.mean.shape == (1, 1),
            f"scale has groups of shape {scale.scale.shape} and a mean of {scale.mean.shape}; they should be"
            f" [groups, {outputs}] and [1, 1]",
        )
        _require(own.dtype == jnp.uint8, f"scale has codes in {own.dtype}; they should be uint8")
        for name, x in (("groups", scale.scale), ("a mean", scale.mean)):
            _require(x.dtype == jnp.float32, f"scale has {name} in {x.dtype}; they should be float32")
    else:
        _require(own.dtype == jnp.float32, f"scale is {own.dtype}; it should be float32")
    return Call(form, block_size, inputs, outputs)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"dequant_matmul: {message}")
