"""Grouped matmuls as Triton kernels: the tiles of all groups run at once, each with the matrix of one group (Gale et
al., arXiv:2211.15841).

A table, computed in the program, has the rows and the group of each tile; only the last tile of a group is padded. Rows
are read through their index, so rows of x are not copied into the order of groups. Codes of quantized matrices are
dequantized in registers (`quantized_tiles.py`). Sums are in float32. Arrays are as large as results: [sorted,
outputs], [groups, inputs, outputs] for the gradient of matrices, and the gradient of x for all sorted rows before it is
summed over the groups of each row."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmem.kernels.triton_launch import Launch, block_size, launch, load_programs
from jaxmem.kernels.typing import Tree

from .blocks import Groups, block_table, sum_of_groups, usual_rows
from .quantized_tiles import BACKWARD, FORWARD, QuantizedMatrices, TileSizes

PROGRAMS = "jaxmem.kernels.grouped_matmul.triton_programs"
Weight = jax.Array | QuantizedMatrices
# Tile sizes for weights in 2 bytes: 128 x 128 results, in steps of 64.
USUAL = {
    "grouped_matmul": TileSizes(128, 64, 128, 8, 3),
    "grouped_matmul_of_inputs": TileSizes(128, 128, 64, 8, 3),
    "grouped_matmul_of_weights": TileSizes(64, 128, 128, 8, 3),
}


@dataclass(frozen=True)
class GroupedTiling:
    """Compile-time values of a program. The properties of codes and blocks are 1 for weights that are not quantized."""

    tokens: int  # rows of x
    outputs: int
    code_rows: int
    blocks: int  # number of blocks (scales) along the rows
    blocks_of_group: int
    tile_tokens: int
    rows: int
    tile_outputs: int
    unit: int  # rows of codes that share a scale
    together: int  # codes per byte
    steps: int
    listed: bool
    double: bool
    sorted: int
    groups: int
    tiles: int
    quantized: bool
    gathers: bool  # whether the rows of x are read through their index; otherwise they are sorted
    scale_groups: int  # groups of scales of a matrix, with double quantization
    means: int  # number of means of a matrix: 1 with double quantization
    has_bias: bool = False
    has_shares: bool = False

    @property
    def reads_each_row(self) -> bool:
        return self.rows % self.unit != 0 != self.unit % self.rows

    @property
    def blocks_of_tile(self) -> int:
        return self.rows if self.reads_each_row else max(1, self.rows // self.unit)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def grouped_matmul(
    x: Float[Array, "rows inputs"],
    weight: Weight,
    bias: Float[Array, "groups outputs"] | None,
    shares: Float[Array, " sorted"] | None,
    groups: Groups,
    gathers: bool,
) -> Float[Array, "sorted outputs"]:
    """For each sorted row: x @ weight + bias, with the matrix and the bias of its group.

    Args:
        x: The sorted rows; with `gathers`, the rows that `groups.rows` selects.
        weight: [groups, inputs, outputs]. A quantized matrix has no gradient.
        bias: Of each group.
        shares: Factors of the bias, one for each sorted row.
        groups: The rows of each group.
        gathers: Whether x is in the order before sorting.

    Returns:
        The result of each sorted row, 0 for a row that belongs to no group.
    """
    together, inputs, outputs = _sizes(weight)
    planes = jnp.moveaxis(x.reshape(x.shape[0], inputs // together, together), 2, 0) if together > 1 else x
    static, arrays, warps = _prepare("grouped_matmul", x, weight, groups, gathers)
    static = replace(static, has_bias=bias is not None, has_shares=shares is not None)
    unused = jnp.zeros(1, x.dtype)
    (y,) = launch(
        load_programs(PROGRAMS).grouped_matmul,
        [planes, groups.rows, *arrays, unused if bias is None else bias, unused if shares is None else shares],
        [jax.ShapeDtypeStruct((static.sorted, outputs), x.dtype)],
        Launch(grid=(static.tiles, -(-outputs // static.tile_outputs)), static=static, flops=2.0 * inputs, **warps),
    )
    return y


def _of_inputs(g: Float[Array, "sorted outputs"], weight: Weight, groups: Groups) -> Float[Array, "sorted inputs"]:
    together, inputs, outputs = _sizes(weight)
    static, arrays, warps = _prepare("grouped_matmul_of_inputs", g, weight, groups, False)
    (result,) = launch(
        load_programs(PROGRAMS).grouped_matmul_of_inputs,
        [g, *arrays],
        [jax.ShapeDtypeStruct((together, g.shape[0], inputs // together), g.dtype)],
        Launch(grid=(static.tiles, -(-static.code_rows // static.rows)), static=static, flops=2.0 * outputs, **warps),
    )
    return jnp.moveaxis(result, 0, 2).reshape(g.shape[0], inputs)


def _of_weights(x: jax.Array, g: jax.Array, weight: jax.Array, groups: Groups, gathers: bool) -> jax.Array:
    static, _, warps = _prepare("grouped_matmul_of_weights", x, weight, groups, gathers)
    (result,) = launch(
        load_programs(PROGRAMS).grouped_matmul_of_weights,
        [x, groups.rows, g, jnp.stack([groups.starts, groups.stops])],
        [jax.ShapeDtypeStruct(weight.shape, weight.dtype)],
        Launch(
            grid=(-(-weight.shape[1] // static.rows), -(-weight.shape[2] // static.tile_outputs), weight.shape[0]),
            static=static,
            flops=2.0 * g.shape[0] / weight.shape[0],  # the mean over groups
            **warps,
        ),
    )
    return result


def _backward(gathers: bool, saved: Tree, g: jax.Array) -> tuple[Tree, ...]:
    x, weight, bias, shares, groups = saved
    of_x = _of_inputs(g, weight, groups)
    of_x = sum_of_groups(of_x, groups, x.shape[0]) if gathers else of_x
    of_weight = None if isinstance(weight, QuantizedMatrices) else _of_weights(x, g, weight, groups, gathers)
    of_bias = None
    of_shares = None
    if bias is not None:  # a matrix with one input
        column = (jnp.ones(g.shape[0], g.dtype) if shares is None else shares.astype(g.dtype))[:, None]
        of_bias = _of_weights(column, g, bias[:, None], groups, False)[:, 0]
        of_shares = None if shares is None else _of_inputs(g, bias[:, None], groups)[:, 0].astype(shares.dtype)
    elif shares is not None:
        of_shares = jnp.zeros_like(shares)
    return of_x, of_weight, of_bias, of_shares, None


grouped_matmul.defvjp(lambda *arguments: (grouped_matmul(*arguments), arguments[:-1]), _backward)


def _sizes(weight: Weight) -> tuple[int, int, int]:
    """Codes per byte, inputs and outputs."""
    if isinstance(weight, QuantizedMatrices):
        return weight.form.together, weight.inputs, weight.outputs
    return 1, weight.shape[1], weight.shape[2]


def _prepare(
    name: str, x: jax.Array, weight: Weight, groups: Groups, gathers: bool
) -> tuple[GroupedTiling, list[jax.Array], dict[str, Any]]:
    """Compile-time values, the arrays of the tiles and of the weight, and the warps and stages."""
    _, inputs, outputs = _sizes(weight)
    length = groups.rows.shape[0]
    count = groups.starts.shape[0]
    properties: dict[str, Any]
    if isinstance(weight, QuantizedMatrices):
        sizes = weight.tile_sizes(FORWARD if name == "grouped_matmul" else BACKWARD)
        arrays, properties = weight.arrays()
    else:
        sizes = USUAL[name]
        if x.dtype.itemsize == 4:  # half the depth of a step, for the shared memory
            depth = {"grouped_matmul": "rows", "grouped_matmul_of_inputs": "outputs"}.get(name, "tokens")
            sizes = sizes._replace(**{depth: getattr(sizes, depth) // 2})
        sizes = sizes._replace(rows=block_size(sizes.rows, inputs), outputs=block_size(sizes.outputs, outputs))
        arrays = [weight, *[jnp.zeros((1, 1), jnp.float32)] * 4]
        plain = dict.fromkeys(("blocks", "blocks_of_group", "unit", "together", "steps"), 1)
        properties = {"outputs": outputs, "code_rows": inputs, **plain, "listed": False, "double": False}
    if name != "grouped_matmul_of_weights":
        # About two tiles per group, so that padding is a third of the rows at most.
        sizes = sizes._replace(tokens=min(sizes.tokens, max(16, usual_rows(length, count) // 2)))
        if sizes.tokens <= 32:
            sizes = sizes._replace(warps=4)
    ends = jnp.full(1, length, jnp.int32)
    starts, stops = (jnp.concatenate(pair) for pair in ((groups.starts, groups.stops[-1:]), (groups.stops, ends)))
    start, stop, group, *_ = block_table(starts, stops, sizes.tokens, length)
    static = GroupedTiling(
        **properties,
        tokens=x.shape[0],
        tile_tokens=sizes.tokens,
        rows=sizes.rows,
        tile_outputs=sizes.outputs,
        sorted=length,
        groups=count,
        tiles=start.shape[0],
        quantized=isinstance(weight, QuantizedMatrices),
        gathers=gathers,
        scale_groups=arrays[2].shape[-2],
        means=int(properties["double"]),
    )
    tables = [] if name == "grouped_matmul_of_weights" else [jnp.stack([start, stop, group])]
    return static, [*tables, *arrays], {"warps": sizes.warps, "stages": sizes.stages}
