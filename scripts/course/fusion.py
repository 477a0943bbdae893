"""Chains compiled for a GPU, which need not be installed; then the memory that chunks save, predicted."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.estimate.memory import estimate
from jaxmem.estimate.passes import equations, inside
from jaxmem.models.rope import Angles, rotate
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.planning.timeline import moved_bytes
from jaxmem.typing import Tree
from scripts.course import Findings, common, main
from scripts.course.panels import Bars
from scripts.course.table import Row, Table, gib

TOKENS, EMBED, MLP, HEADS, DIM = 8192, 4096, 14336, 32, 128  # sizes of llama3-8b
NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
VIEWS = ("broadcast_in_dim", "reshape", "squeeze")  # operations that copy nothing
BASE = common.CONFIGS["fusion"]["base"]
CHUNKS = common.rows_of("fusion", "chunks")
MOVED = ("one by one, MB", "fused, MB", "minimum, MB")


def measure(target: str) -> Findings:
    rows = list(chains(target_devices(parse_target(target), 8 * 2**30)[0]))
    moved = Table(f"{TOKENS:,} tokens of llama3-8b in bfloat16 on {target}: bytes moved", rows)
    chunked = [_chunked(name, overrides) for name, overrides in CHUNKS.items()]
    apart, fused, minimum = (sum(moved.column(name)) for name in MOVED)
    return Findings(
        [moved, Table(f"A step on {TOKENS:,} tokens, predicted", chunked)],
        {"apart": apart / 1e3, "fused": fused / 1e3, "times": fused / minimum},
        [Bars(moved, MOVED, grouped=True)],
    )


def operations() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    """(name, function, arguments, indices of the arguments with a gradient). The gradient of a branch equals that of
    the residual stream."""

    def numbers(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(x: Any, branch: Any, scale: Any) -> Any:
        """The sum of a branch and the residual stream, and its RMS norm, as in a block."""
        summed = x + branch
        wide = summed.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype), summed

    half: Any = numbers(1, TOKENS, DIM // 2, dtype=jnp.float32)
    wide = numbers(TOKENS, EMBED)
    gates = (numbers(TOKENS, MLP), numbers(TOKENS, MLP))
    yield "rms_norm and residual", norm, (wide, wide, numbers(EMBED, dtype=jnp.float32)), (0, 2)
    yield "swiglu", lambda gate, up: jax.nn.silu(gate) * up, gates, (0, 1)
    yield "rope", rotate, (numbers(1, TOKENS, HEADS, DIM), Angles(half, half)), (0,)


def chains(device: Any) -> Iterator[Row]:
    """The megabytes that the kernels of each chain move, and their number: forward, then with the backward pass."""
    for name, function, arguments, differentiable in operations():

        def both(
            arguments: Tree, cotangents: Tree, function: Any = function, differentiable: Any = differentiable
        ) -> Any:
            def of_chosen(*chosen: Any) -> Any:
                replaced = dict(zip(differentiable, chosen, strict=True))
                return function(*(replaced.get(i, x) for i, x in enumerate(arguments)))

            out, pull = jax.vjp(of_chosen, *(arguments[i] for i in differentiable))
            return out, pull(cotangents)

        out = jax.eval_shape(function, *arguments)
        for label, run, inputs in ((name, function, arguments), (f"{name}, with backward", both, (arguments, out))):
            entry = common.compile_for(device, run, *inputs).module.entry
            kernels = [
                moved_bytes(instruction) for instruction in entry.instructions if instruction.opcode not in NO_KERNELS
            ]
            read = sum(
                instruction.shape.bytes for instruction in entry.instructions if instruction.opcode == "parameter"
            )
            written = sum(map(_bytes, jax.tree.leaves(jax.eval_shape(run, *inputs))))
            sizes = (one_by_one(jax.make_jaxpr(run)(*inputs).jaxpr), sum(kernels), read + written)
            yield {"chain": label, **{of: size / 1e6 for of, size in zip(MOVED, sizes, strict=True)}} | {
                "kernels": len(kernels)
            }


def one_by_one(jaxpr: Any) -> int:
    """Bytes that are read and written if each operation of a jaxpr runs separately."""
    operations = [
        equation
        for equation, _ in equations(jaxpr, 1)
        if equation.primitive.name not in VIEWS and not any(inside(equation, 1))
    ]
    return sum(_bytes(x.aval) for equation in operations for x in (*equation.invars, *equation.outvars))


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _chunked(name: str, overrides: Any) -> Row:
    estimated = estimate(for_devices(load_config(BASE, overrides), 1), "gpu")
    return {
        "in chunks": name,
        "activations, GiB": gib(estimated.categories["activations"]),
        "step, GiB": gib(estimated.total),
    }


if __name__ == "__main__":
    main(__file__)
