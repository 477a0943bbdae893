"""Attention without its matrix of scores: bytes and time by the length of a sequence, and numbers that stay numbers.

With T queries and T keys the scores of each head are T x T numbers. Written down they are there for the softmax and
again for the gradient; in blocks of keys, with the largest score and the sum of what was seen so far, only one block's
are, and the backward pass makes them again from q, k and one number a row. (Dao, arXiv:2307.08691.) Each row's largest
score is taken off before the exponential, so that none overflows, and a row that sees no key gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmem.errors import UserError
from jaxmem.lab.tour import timed
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = "h100-80gb"
HEADS, KV_HEADS, DIM = 32, 8, 128  # of llama3-8b
LENGTHS = (1024, 4096, 16384)
HERE = (256, 512, 1024)  # tokens of 4 heads of 32
CASES = ("usual scores", "scores up to 1e4", "half the rows see no key")


def by_length(target: str | None = None, lengths: Sequence[int] = LENGTHS, here: Sequence[int] = HERE) -> Found:
    """Compiled for a GPU; run on this machine; held against float64."""
    from jaxmem.planning.targets import parse_target

    aim = parse_target(target or TARGET)
    if aim.gpu is None:
        raise UserError(f"target {target}: tour attention compiles for a GPU, and runs here; give one, as {TARGET}")
    compiled = list(_compiled(aim, lengths))
    ran = [row for length in here for row in _timed(length)]
    errors = list(_errors())
    tables = [
        Shown(f"Bytes beside inputs and gradients, forward and backward, on {aim.name}", *_across(compiled, _held)),
        Shown(f"Here, {timed.where()}: 4 heads of 32 in float32, forward and backward", *_across(ran, _ms)),
        Shown("Largest error beside float64, as a share of the largest value", *_across(errors, _error)),
    ]
    return Found(tables, _note(compiled, errors), partial(_draw, compiled=compiled, ran=ran))


def _across(rows: Sequence[Row], cell: Callable[[Row], str]) -> tuple[list[Row], Columns]:
    """One line for each of `of`, a column for each way to compute it."""
    lines = [
        {"of": of, "ways": {row["way"]: row for row in rows if row["of"] == of}}
        for of in dict.fromkeys(row["of"] for row in rows)
    ]
    columns: Columns = {"": lambda line: f"{line['of']:,} tokens" if isinstance(line["of"], int) else line["of"]}
    for way in dict.fromkeys(row["way"] for row in rows):
        columns[way] = partial(_cell, way=way, cell=cell)
    return lines, columns


def _cell(line: Row, way: str, cell: Callable[[Row], str]) -> str:
    return cell(line["ways"][way])


def _held(row: Row) -> str:
    from jaxmem.planning.text import readable

    return readable(row["temporaries"])


def _ms(row: Row) -> str:
    return f"{row['seconds'] * 1e3:.1f} ms"


def _error(row: Row) -> str:
    return "not a number" if row["error"] is None else f"{row['error']:.0e}"


def _with_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(run, q, k, v)
        return (out, *pull(d_out))

    return both


def _compiled(aim: Any, lengths: Sequence[int]) -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    from jaxmem.kernels import attention
    from jaxmem.machine.devices import lowering_for
    from jaxmem.planning.compile import compile_all
    from jaxmem.planning.targets import target_devices

    device = target_devices(aim, 1000 * aim.memory)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    for length in lengths:
        for way in ("reference", "blockwise", "triton"):
            q, k = (
                jax.ShapeDtypeStruct((1, length, heads, DIM), jnp.bfloat16, sharding=place)
                for heads in (HEADS, KV_HEADS)
            )
            run = _with_gradients(partial(attention, causal=True, implementation=way))
            with lowering_for(device):
                lowered = jax.jit(run).lower(q, k, k, q)
            sizes = compile_all(lowered, {}, here=aim.is_here, code=False)[0].sizes
            yield {"of": length, "way": way, "temporaries": sizes["temporaries"]}


def _arrays(length: int, heads: int = 4, dim: int = 32) -> list[Any]:
    import jax

    return [jax.random.normal(key, (1, length, heads, dim)) for key in jax.random.split(jax.random.key(0), 4)]


def _timed(length: int) -> Iterator[Row]:
    import jax

    from jaxmem.kernels import attention

    arrays = _arrays(length)
    for way in ("reference", "blockwise", *(("triton",) if jax.default_backend() == "gpu" else ())):
        run = jax.jit(_with_gradients(partial(attention, causal=True, implementation=way)))
        yield {"of": length, "way": way, "seconds": timed.seconds(run, *arrays)}


def _errors(length: int = 64) -> Iterator[Row]:
    """Of the output and of all gradients, the worst."""
    import jax
    import jax.numpy as jnp

    from jaxmem.kernels import attention

    for case in CASES:
        q, k, v, d_out = _arrays(length)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        q = q * (1e4 / jnp.max(jnp.abs(scores)) if case == CASES[1] else 1.0)
        seen = jnp.arange(length) < (length // 2 if case == CASES[2] else length)
        ids = {"segment_ids": jnp.int32(~seen)[None], "kv_segment_ids": jnp.zeros((1, length), jnp.int32)}
        ways = {
            "exp(x) / sum, as written": partial(_as_written, seen=seen),
            "reference": partial(attention, **ids, implementation="reference"),
            "blockwise": partial(attention, **ids, implementation="blockwise"),
        }
        wanted = _exact([np.asarray(x, np.float64) for x in (q, k, v, d_out)], np.asarray(seen))
        for way, run in ways.items():
            found = jax.jit(_with_gradients(run))(q, k, v, d_out)
            off = [
                np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()
                for a, b in zip(found, wanted, strict=True)
            ]
            yield {"of": case, "way": way, "error": float(max(off)) if np.isfinite(off).all() else None}


def _as_written(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """As a textbook has it; what nobody should compute."""
    import jax.numpy as jnp

    scores = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(np.sqrt(q.shape[-1])))
    scores = jnp.where(seen[:, None], scores, 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", scores / jnp.sum(scores, -1, keepdims=True), v)


def _exact(arrays: Sequence[Any], seen: Any) -> tuple[Any, ...]:
    """Output and gradients in float64, by the rule of the softmax's derivative."""
    q, k, v, d_out = arrays
    scale = 1 / np.sqrt(q.shape[-1])
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True) * seen[:, None]
    d_p = np.einsum("bqhd,bkhd->bhqk", d_out, v)
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    return (
        np.einsum("bhqk,bkhd->bqhd", p, v),
        np.einsum("bhqk,bkhd->bqhd", d_scores, k),
        np.einsum("bhqk,bqhd->bkhd", d_scores, q),
        np.einsum("bhqk,bqhd->bkhd", p, d_out),
    )


def _note(compiled: Sequence[Row], errors: Sequence[Row]) -> str:
    lengths = sorted({row["of"] for row in compiled})
    size = {(row["of"], row["way"]): row["temporaries"] for row in compiled}
    first, last = lengths[0], lengths[-1]
    grown = {way: size[last, way] / size[first, way] for way in ("reference", "triton")}
    safe = max(row["error"] for row in errors if row["way"] == "blockwise")
    broken = sum(row["error"] is None for row in errors)
    return (
        f"{HEADS} heads of {DIM} with {KV_HEADS} of keys, in bfloat16. From {first:,} to {last:,} tokens what the"
        f" reference needs grows {grown['reference']:.0f} times, with the square of the length; a kernel's"
        f" {grown['triton']:.0f} times, with the length: {size[last, 'reference'] / 2**30:.0f} GiB against"
        f" {size[last, 'triton'] / 2**20:.1f} MiB at {last:,}. The reference keeps the scores for the backward pass,"
        " the others make them again, block by block, from one number a row."
        f" The softmax as textbooks write it fails in {broken} of {len(CASES)} cases, by an overflow and by 0 / 0; in"
        f" blocks the worst error beside float64 is {safe:.0e} of the largest value, with scores of 1e4 and rows that"
        " see nothing."
    )


def _draw(drawn: Figure, compiled: Sequence[Row], ran: Sequence[Row]) -> None:
    size, speed = drawn.subplots(1, 2)
    for axes, rows, field, unit in ((size, compiled, "temporaries", 2**30), (speed, ran, "seconds", 1e-3)):
        for way in dict.fromkeys(row["way"] for row in rows):
            own = [row for row in rows if row["way"] == way]
            axes.plot([row["of"] for row in own], [row[field] / unit for row in own], "o-", label=way)
        lengths = sorted({row["of"] for row in rows})
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.legend()
    size.set_title("GiB, compiled for the target")
    speed.set_title(f"ms {timed.where()}, here")


STOP = Stop(
    "attention",
    "scores written down or made in blocks: bytes, time, and numbers that stay numbers",
    by_length,
    uses="devices",
    config=["memory.attention=triton", "memory.attention=blockwise"],
    read=[
        "kernels/fused_attention/reference.py",
        "kernels/fused_attention/blockwise.py",
        "kernels/fused_attention/triton.py",
    ],
)
