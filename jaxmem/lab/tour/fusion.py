"""What the compiler fuses by itself: the bytes that a layer's elementwise chains read and write, from compiled HLO.

Run one by one, every operation reads its arguments from memory and writes its result there. XLA fuses a chain into one
kernel, so that intermediate results stay in registers; the minimum is to read each input and write each result once.
XLA does not fuse the results of matmuls: the loss and the MLP compute theirs in chunks, so that they never exist whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings, gpu_target
from jaxmem.lab.tour.table import Row, Table
from jaxmem.models.rope import Angles, rotate
from jaxmem.planning.predict import estimate
from jaxmem.planning.targets import target_devices
from jaxmem.planning.timeline import moved_bytes

TARGET = "h100-80gb"
TOKENS, EMBED, MLP, HEADS, DIM = 8192, 4096, 14336, 32, 128  # of llama3-8b
NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
VIEWS = ("broadcast_in_dim", "reshape", "squeeze")  # operations that copy nothing
BASE = common.llm_config("llama3-8b", TOKENS, precision={"parameters": "bfloat16"}, memory={"remat": "full"})
LONG = 4 * TOKENS
OFFLOADED = ("memory.offload=activations", f"data.sequence_length={LONG}")
LOSS, BOTH = (
    ("memory.loss_chunk=auto", f"memory.mlp_chunk={TOKENS}"),
    ("memory.loss_chunk=auto", f"memory.mlp_chunk={TOKENS // 8}"),
)
CHUNKS: dict[str, tuple[str, ...]] = {
    "nothing": ("memory.loss_chunk=128256", f"memory.mlp_chunk={TOKENS}"),
    "loss": LOSS,
    "loss and MLP": BOTH,
    f"loss; {LONG:,} tokens, boundaries offloaded": (*LOSS, *OFFLOADED),
    f"loss and MLP; {LONG:,} tokens, boundaries offloaded": (*BOTH, *OFFLOADED),
}
MOVED = ("one by one", "fused", "minimum")


def measure(
    target: str | None = None, base: Mapping[str, Any] = BASE, chunks: Mapping[str, Sequence[str]] = CHUNKS
) -> Findings:
    """Chains compiled for a GPU that need not be here; what chunks save, by the arithmetic of a plan."""
    aim, _ = gpu_target("fusion", target or TARGET)
    rows = list(chains(target_devices(aim, 8 * 2**30)[0]))
    held = [_chunked(name, load_config(dict(base), overrides)) for name, overrides in chunks.items()]
    apart, fused, minimum = (sum(row[name] for row in rows) for name in MOVED)
    whole, loss, both, long, both_long = (row["activations"] / 2**30 for row in held)
    return Findings(
        [
            Table(
                f"{TOKENS:,} tokens of llama3-8b in bfloat16 on {aim.name}: bytes moved",
                rows,
                dict.fromkeys(MOVED, "MB"),
            ),
            Table(f"A step on {TOKENS:,} tokens, predicted", held, {"activations": "GiB", "step": "GiB"}),
        ],
        f"One by one these chains move {apart / 1e9:.1f} GB; fused by XLA {fused / 1e9:.1f} GB, {fused / minimum:.2f}"
        " times the minimum. A norm needs a whole row before it can write the first number, so it reads more than once:"
        f" {rows[1]['fused'] / rows[1]['minimum']:.2f} times the minimum with its gradient. The loss in chunks of the"
        f" vocabulary takes the activations from {whole:.2f} to {loss:.2f} GiB. The MLP in chunks of tokens gives"
        f" {both:.2f}, since its weight gradients are accumulated in float32 meanwhile; at {LONG:,} tokens it takes"
        f" {long:.2f} to {both_long:.2f}.",
        [Bars(f"Bytes read and written, {TOKENS:,} tokens of llama3-8b", rows, MOVED, "MB", grouped=True)],
    )


def operations() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    """(name, function, arguments, those with a gradient of their own): that of a branch is that of the stream."""

    def numbers(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(x: Any, branch: Any, scale: Any) -> Any:
        """A branch added to the residual stream, and the RMS norm of the sum, as a block computes it."""
        summed = x + branch
        wide = summed.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype), summed

    half: Any = numbers(1, TOKENS, DIM // 2, dtype=jnp.float32)
    wide, gates = numbers(TOKENS, EMBED), (numbers(TOKENS, MLP), numbers(TOKENS, MLP))
    yield "rms_norm and residual", norm, (wide, wide, numbers(EMBED, dtype=jnp.float32)), (0, 2)
    yield "swiglu", lambda gate, up: jax.nn.silu(gate) * up, gates, (0, 1)
    yield "rope", rotate, (numbers(1, TOKENS, HEADS, DIM), Angles(half, half)), (0,)


def chains(device: Any) -> Iterator[Row]:
    """Each chain forward, then with its backward pass."""
    for name, function, arguments, own in operations():

        def both(arguments: Any, cotangents: Any, function: Any = function, own: Any = own) -> Any:
            def of_own(*chosen: Any) -> Any:
                replaced = dict(zip(own, chosen, strict=True))
                return function(*(replaced.get(i, x) for i, x in enumerate(arguments)))

            out, pull = jax.vjp(of_own, *(arguments[i] for i in own))
            return out, pull(cotangents)

        out = jax.eval_shape(function, *arguments)
        for label, run, given in ((name, function, arguments), (f"{name}, with backward", both, (arguments, out))):
            yield {
                "chain": label,
                "one by one": one_by_one(jax.make_jaxpr(run)(*given).jaxpr),
                **counted(run, given, device),
            }


def counted(function: Callable[..., Any], arguments: Any, device: Any) -> Row:
    """Bytes that XLA's kernels move, the minimum, and the number of kernels."""
    module = common.compile_for(device, function, *arguments).module
    kernels = [moved_bytes(one) for one in module.entry.instructions if one.opcode not in NO_KERNELS]
    read = sum(one.shape.bytes for one in module.entry.instructions if one.opcode == "parameter")
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    written = sum(math.prod(a.shape) * a.dtype.itemsize for a in results)
    return {"fused": sum(kernels), "minimum": read + written, "kernels": len(kernels)}


def one_by_one(jaxpr: Any) -> int:
    """Bytes read and written if each operation of a jaxpr runs by itself."""
    total = 0
    for one in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in one.params.values()]
        inner = [value for value in inner if hasattr(value, "eqns")]
        if inner:
            total += one_by_one(inner[0])
        elif one.primitive.name not in VIEWS:
            total += sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in (*one.invars, *one.outvars))
    return total


def _chunked(name: str, cfg: Any) -> Row:
    found = estimate(for_devices(cfg, 1), "gpu")
    return {"in chunks": name, "activations": found.parts["activations"], "step": found.total}
