"""What the product takes: checked once, in one place, whichever implementation runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxmem.kernels.codes import FP4, NF4
from jaxmem.kernels.given import FLOATS, Given, shown


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
    x: Any, codes: Any, scale: Any, format_: Any, block_size: Any, inputs: Any, transposed: bool
) -> tuple[jax.Array, jax.Array, Any, Call]:
    """The arguments in one form, or a ValueError that names the argument and what it should be."""
    given = Given("dequant_matmul")
    known = isinstance(format_, str) and format_ in FORMS
    given.require(known, f"format is {shown(format_)}; it should be one of {', '.join(FORMS)}")
    form = FORMS[format_]
    last = "outputs" if transposed else "inputs"
    x = given.array("x", x, f"[..., {last}]", FLOATS)
    codes = given.array("codes", codes, "[inputs, outputs]")
    wanted = "int8" if form.bits == 8 else "uint8"
    given.require(codes.dtype.name == wanted, f"codes is {codes.dtype}; codes of {format_} are {wanted}")
    outputs = codes.shape[1]
    if inputs is None:
        inputs = codes.shape[0] * form.together if transposed else x.shape[-1]
    inputs, block = given.whole("inputs", inputs), given.whole("block_size", block_size)
    wide = outputs if transposed else inputs
    given.require(x.shape[-1] == wide, f"x has shape {x.shape}; its last dimension should be the {wide} {last}")
    rows = -(-inputs // form.together)
    given.require(codes.shape[0] == rows, f"codes has {codes.shape[0]} rows; {inputs} inputs in {format_} take {rows}")
    given.require(block >= 1, f"block_size is {block}; it should be at least 1")
    blocks = -(-inputs // block)
    scale = _constants(given, scale)
    own = scale.codes if isinstance(scale, Constants) else scale
    given.require(
        own.shape == (blocks, outputs),
        f"scale has shape {own.shape}; {inputs} inputs in blocks of {block} take {(blocks, outputs)}",
    )
    if isinstance(scale, Constants):
        given.require(
            scale.scale.shape[1:] == (outputs,) and scale.scale.size > 0 and scale.mean.shape == (1, 1),
            f"scale has groups of shape {scale.scale.shape} and a mean of {scale.mean.shape}; they should be"
            f" [groups, {outputs}] and [1, 1]",
        )
    if blocks == 1:  # a block that ends far beyond the inputs is one that ends a little beyond them
        block = min(block, max(2, 1 << (inputs - 1).bit_length()))
    return x, codes, scale, Call(form, block, inputs, outputs)


def _constants(given: Given, scale: Any) -> Any:
    if not isinstance(scale, Constants):
        array = isinstance(scale, jax.Array | np.ndarray)
        given.require(array, f"scale is {shown(scale)}; it should be an array or Constants")
        return given.array("scale", scale, None, ("float32",))
    return Constants(
        given.array("scale.codes", scale.codes, None, ("uint8",)),
        given.array("scale.scale", scale.scale, None, ("float32",)),
        given.array("scale.mean", scale.mean, None, ("float32",)),
    )
