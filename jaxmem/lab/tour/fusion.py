"""What the compiler fuses by itself: the bytes that a layer's elementwise chains read and write, from the compiled HLO.

Run one by one, every operation reads its arguments from memory and writes its result there. XLA makes one kernel of a
chain, so that what lies between stays in registers; below that is only what must be read and written once. What it does
not fuse with products are their results: those of the loss and of the MLP are made in chunks, so that they are never
there whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = "h100-80gb"
TOKENS, EMBED, MLP, HEADS, DIM = 8192, 4096, 14336, 32, 128  # of llama3-8b
NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
VIEWS = ("broadcast_in_dim", "reshape", "squeeze")  # that nobody copies
BASE: dict[str, Any] = {
    "name": "tour",
    "model": {"preset": "llama3-8b"},
    "data": {"source": "tokens", "path": "unused", "sequence_length": TOKENS},
    "batch": {"global_size": 1},
    "precision": {"parameters": "bfloat16"},
    "memory": {"remat": "full"},
    "train": {"steps": 1000},
}
CHUNKS: dict[str, tuple[str, ...]] = {
    "neither": ("memory.loss_chunk=128256", f"memory.mlp_chunk={TOKENS}"),
    "the loss": ("memory.loss_chunk=auto", f"memory.mlp_chunk={TOKENS}"),
    "loss and MLP": ("memory.loss_chunk=auto", f"memory.mlp_chunk={TOKENS // 8}"),
}
LONG = 4 * TOKENS
AWAY = f"{LONG:,} tokens, boundaries on the host"
CHUNKS |= {
    f"{name}; {AWAY}": (*CHUNKS[name], "memory.offload=activations", f"data.sequence_length={LONG}")
    for name in ("the loss", "loss and MLP")
}


def by_chain(
    target: str | None = None, base: Mapping[str, Any] = BASE, chunks: Mapping[str, Sequence[str]] = CHUNKS
) -> Found:
    """Compiled for a GPU that need not be here; what chunks leave, by the arithmetic of a plan."""
    from jaxmem.planning.targets import parse_target, target_devices

    aim = parse_target(target or TARGET)
    if aim.gpu is None:
        raise UserError(f"target {target}: tour fusion reads what a GPU's kernels move; give one, as {TARGET}")
    rows = list(chains(target_devices(aim, 8 * 2**30)[0]))
    held = [_chunked(name, load_config(dict(base), overrides)) for name, overrides in chunks.items()]
    moved: Columns = {
        "chain": lambda row: f"{row['name']}{', and back' if row['back'] else ''}",
        "one by one, MB": lambda row: f"{row['apart'] / 1e6:,.0f}",
        "fused": lambda row: f"{row['moved'] / 1e6:,.0f}",
        "least": lambda row: f"{row['least'] / 1e6:,.0f}",
        "kernels": lambda row: str(row["kernels"]),
    }
    sizes: Columns = {
        "in chunks": lambda row: row["name"],
        "activations, GiB": lambda row: f"{row['activations'] / 2**30:.2f}",
        "step, GiB": lambda row: f"{row['total'] / 2**30:.2f}",
    }
    tables = [
        Shown(f"{TOKENS:,} tokens of llama3-8b in bfloat16: bytes that kernels move on {aim.name}", rows, moved),
        Shown(f"A step on {TOKENS:,} tokens, by arithmetic", held, sizes),
    ]
    return Found(tables, _note(rows, held), partial(_draw, rows=rows))


def operations() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    """With the arguments that have a gradient of their own: that of a branch is that of the stream."""
    import jax
    import jax.numpy as jnp

    from jaxmem.models.rope import Angles, rotate

    def numbers(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(x: Any, branch: Any, scale: Any) -> Any:
        """The norm of the residual stream with a branch added, and the sum, as in a block."""
        total = x + branch
        wide = total.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype), total

    half: Any = numbers(1, TOKENS, DIM // 2, dtype=jnp.float32)
    wide, angles = numbers(TOKENS, EMBED), Angles(half, half)
    summed = wide, wide, numbers(EMBED, dtype=jnp.float32)
    yield "rms_norm, with the residual", norm, summed, (0, 2)
    yield "swiglu", lambda gate, up: jax.nn.silu(gate) * up, (numbers(TOKENS, MLP), numbers(TOKENS, MLP)), (0, 1)
    yield "rope", rotate, (numbers(1, TOKENS, HEADS, DIM), angles), (0,)


def chains(device: Any) -> Iterator[Row]:
    """Each forward, then with its backward pass."""
    import jax

    for name, function, arguments, own in operations():

        def both(arguments: Any, cotangents: Any, function: Any = function, own: Any = own) -> Any:
            def of_own(*chosen: Any) -> Any:
                given = dict(zip(own, chosen, strict=True))
                return function(*(given.get(i, x) for i, x in enumerate(arguments)))

            made, pull = jax.vjp(of_own, *(arguments[i] for i in own))
            return made, pull(cotangents)

        made = jax.eval_shape(function, *arguments)
        for back, run, given in ((False, function, arguments), (True, both, (arguments, made))):
            found = counted(run, given, device)
            yield {"name": name, "back": back, "apart": one_by_one(jax.make_jaxpr(run)(*given).jaxpr), **found}


def counted(function: Callable[..., Any], arguments: Any, device: Any) -> Row:
    """Bytes that XLA's kernels move, the least, and how many kernels there are."""
    import jax

    from jaxmem.machine.devices import lowering_for
    from jaxmem.planning.compile import compile_all
    from jaxmem.planning.timeline import moved_bytes

    place = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
    with lowering_for(device):
        lowered = jax.jit(function).lower(*placed)
    module = compile_all(lowered, {}, here=False)[0].module
    kernels = [moved_bytes(one) for one in module.entry.instructions if one.opcode not in NO_KERNELS]
    read = sum(one.shape.bytes for one in module.entry.instructions if one.opcode == "parameter")
    made = jax.tree.leaves(jax.eval_shape(function, *arguments))
    written = sum(math.prod(a.shape) * a.dtype.itemsize for a in made)
    return {"moved": sum(kernels), "least": read + written, "kernels": len(kernels)}


def one_by_one(jaxpr: Any) -> int:
    """Bytes read and written where each operation of a trace runs by itself."""
    total = 0
    for one in jaxpr.eqns:
        inner = [getattr(given, "jaxpr", given) for given in one.params.values()]
        inner = [given for given in inner if hasattr(given, "eqns")]
        if inner:
            total += one_by_one(inner[0])
        elif one.primitive.name not in VIEWS:
            total += sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in (*one.invars, *one.outvars))
    return total


def _chunked(name: str, cfg: Any) -> Row:
    from jaxmem.planning.predict import estimate

    found = estimate(for_devices(cfg, 1), "gpu")
    return {"name": name, "activations": found.parts["activations"], "total": found.total}


def _note(rows: Sequence[Row], held: Sequence[Row]) -> str:
    apart, fused, least = (sum(row[of] for row in rows) for of in ("apart", "moved", "least"))
    norm = next(row for row in rows if row["back"] and row["name"] == rows[0]["name"])
    whole, loss, both, away, both_away = (row["activations"] / 2**30 for row in held)
    return (
        f"One by one these chains move {apart / 1e9:.1f} GB; fused by XLA {fused / 1e9:.1f}, {fused / least:.2f} times"
        " the least, which reads every input and writes every result once. Where a whole row is needed before its first"
        f" number can be written, as in a norm's gradient, it reads more than once: {norm['moved'] / norm['least']:.2f}"
        " times the least. The results of products are written in any case. The loss in chunks of the vocabulary, so"
        f" that no logits are there whole, takes a step's activations from {whole:.2f} to {loss:.2f} GiB. The MLP in"
        f" chunks of tokens makes of that {both:.2f}: gradients of its weights are added up in float32 meanwhile, and"
        f" at {TOKENS:,} tokens that takes all that they save. At {AWAY}, it goes from {away:.2f} to {both_away:.2f}."
    )


def _draw(drawn: Figure, rows: Sequence[Row]) -> None:
    axes = drawn.subplots()
    shown = list(rows)
    places = range(len(shown))
    for number, (of, label) in enumerate((("apart", "one by one"), ("moved", "fused"), ("least", "least"))):
        axes.barh([place + 0.25 * number for place in places], [row[of] / 1e6 for row in shown], 0.25, label=label)
    names = [f"{row['name']}{', and back' if row['back'] else ''}" for row in shown]
    axes.set_yticks([place + 0.25 for place in places], names)
    axes.invert_yaxis()
    axes.set(xlabel="MB read and written")
    axes.legend()


STOP = Stop(
    "fusion",
    "chains that the compiler makes one kernel of, and products in chunks: bytes moved, bytes held",
    by_chain,
    uses="devices",
    config=["memory.loss_chunk=auto", "memory.mlp_chunk=1024"],
    read=["jaxmem/models/cross_entropy.py", "jaxmem/models/chunking.py"],
)
