"""The updates as Triton kernels: each array is read once and written once, codes and scales in place.

A program has complete blocks in registers, so the absmax of a block is known before its codes are written. With a
16-bit gradient or update and blocks of 256, Adam moves 8.06 bytes per element, and int8 weights 4.05."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.kernels.triton_launch import Launch, launch, load_programs, next_power_of_2

from . import AdamHyperparameters, Moments8, ScaleBlocks, blocked, lines

PROGRAMS = "jaxmem.kernels.quantized_update.triton_programs"
# A program updates 32 elements per thread: at least two programs share a multiprocessor, so that one computes while the
# other waits. A program with more elements has proportionally more warps.
NUMBERS, WARPS, MAX_WARPS = 4096, 4, 32
MIN_COLUMNS = 32  # the least number of columns if blocks are along rows: memory is read in lines of 32 bytes
MAX_BLOCK = 16384  # largest number of elements of a block


@dataclass(frozen=True)
class UpdateTiling:
    """Compile-time values of a program."""

    along_columns: bool  # blocks are along the last dimension; otherwise along rows
    size: int  # elements of a block
    padded: int  # the next power of two
    count: int  # blocks of a program
    blocks: int  # blocks of all programs; along columns only
    columns: int
    beta1: float = 0.0
    beta2: float = 0.0

    @property
    def m_unit(self) -> float:
        return 1.0 - self.beta1

    @property
    def v_unit(self) -> float:
        return 1.0 - self.beta2


def adam8(
    adam: AdamHyperparameters, blocks: ScaleBlocks, g: jax.Array, state: Moments8, unbiased: jax.Array
) -> tuple[jax.Array, Moments8]:
    # With a and b the direction is m / (a * sqrt(v) + b), with m in units of 1 - beta1 and v in units of 1 - beta2.
    root = jnp.sqrt((1 - adam.beta2) / unbiased[1])
    factors = jnp.stack([root, jnp.float32(adam.epsilon)]) * (unbiased[0] / (1 - adam.beta1))
    numbers = [blocked(x, blocks) for x in (g, state.m, state.v)]
    arrays = [*numbers, *(lines(x, blocks) for x in (state.m_scale, state.v_scale)), factors]
    outputs = [jax.ShapeDtypeStruct(arrays[0].shape, g.dtype)]
    u, *new = _run("adam8_update", blocks, arrays, g, outputs, (1, 2, 3, 4), adam)
    return u.reshape(g.shape), Moments8(*(x.reshape(old.shape) for x, old in zip(new, state, strict=True)))


def int8_add(
    blocks: ScaleBlocks, codes: jax.Array, scale: jax.Array, u: jax.Array, seeds: jax.Array
) -> tuple[jax.Array, jax.Array]:
    arrays = [blocked(codes, blocks), lines(scale, blocks), blocked(u, blocks), lines(seeds, blocks)]
    new, new_scale = _run("int8_add", blocks, arrays, u, [], (0, 1))
    return new.reshape(codes.shape), new_scale.reshape(scale.shape)


def _run(
    operation: str,
    blocks: ScaleBlocks,
    arrays: list[jax.Array],
    like: jax.Array,
    outputs: list[jax.ShapeDtypeStruct],
    in_place: tuple[int, ...],
    adam: AdamHyperparameters | None = None,
) -> list[jax.Array]:
    along_columns = blocks.along == -1
    columns = like.shape[-1]
    padded = next_power_of_2(blocks.size)
    if padded > MAX_BLOCK:
        raise ValueError(
            f"{operation}: block_size is {blocks.size}; the triton implementation supports at most {MAX_BLOCK}"
        )
    total = like.size // blocks.size
    if along_columns:
        blocks_per_program = max(1, NUMBERS // padded)
        grid = -(-total // blocks_per_program)
    else:
        blocks_per_program = min(max(MIN_COLUMNS, NUMBERS // padded), next_power_of_2(columns))
        grid = -(-columns // blocks_per_program) * (total // columns)
    betas = {} if adam is None else {"beta1": adam.beta1, "beta2": adam.beta2}
    return launch(
        getattr(load_programs(PROGRAMS), operation),
        arrays,
        outputs,
        Launch(
            grid=(grid,),
            static=UpdateTiling(along_columns, blocks.size, padded, blocks_per_program, total, columns, **betas),
            warps=min(MAX_WARPS, WARPS * max(1, padded * blocks_per_program // NUMBERS)),
            in_place=in_place,
        ),
    )
