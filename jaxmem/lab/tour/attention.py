"""Attention without the score matrix: bytes and time by sequence length, and its numerical error.

With T queries and T keys each head has T x T scores. Stored, they are needed by the softmax and by the gradient;
computed block by block, with a running maximum and sum, only one block exists at a time, and the backward pass
recomputes it from q, k and one number per row. (Dao, arXiv:2307.08691.) Subtracting each row's maximum before the
exponential prevents overflow, and a row that sees no key gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.kernels import attention
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Lines
from jaxmem.lab.tour.stop import Findings, gpu_target
from jaxmem.lab.tour.table import Row, Table
from jaxmem.planning.targets import target_devices

TARGET = "h100-80gb"
FUSED = "triton"  # the fused kernel among the implementations
HEADS, KV_HEADS, DIM = 32, 8, 128  # of llama3-8b
LENGTHS = (1024, 4096, 16384)
HERE = (256, 512, 1024)  # tokens, with 4 heads of 32
TEXTBOOK = "textbook: exp(x) / sum"
CASES = ("usual scores", "scores up to 1e4", "half the rows see no key")


def measure(target: str | None = None, lengths: Sequence[int] = LENGTHS, here: Sequence[int] = HERE) -> Findings:
    """Compiled for a GPU; run on this machine; compared with float64."""
    aim, _ = gpu_target("attention", target or TARGET)
    compiled: list[Row] = [{"tokens": f"{length:,}", **_temporaries(aim, length)} for length in lengths]
    timed = [{"tokens": f"{length:,}", **_seconds(length)} for length in here]
    errors = [{"case": case, **_errors(case)} for case in CASES]
    names = ("reference", "blockwise", FUSED)
    growth = {name: compiled[-1][name] / compiled[0][name] for name in names}
    broken = sum(isinstance(row[TEXTBOOK], str) for row in errors)
    return Findings(
        [
            Table(
                f"Temporary buffers of attention and its gradients on {aim.name}",
                compiled,
                dict.fromkeys(names, "bytes"),
            ),
            Table(
                f"Attention and its gradients, {common.clock_name()}: 4 heads of 32 in float32",
                timed,
                dict.fromkeys(names, "ms"),
            ),
            Table(
                "Largest error of output and gradients against float64, relative to the largest value",
                errors,
                dict.fromkeys(errors[0], ".0e"),
            ),
        ],
        f"{HEADS} heads of {DIM} with {KV_HEADS} KV heads, in bfloat16. From {lengths[0]:,} to {lengths[-1]:,} tokens"
        f" the buffers of the reference grow {growth['reference']:.0f} times, with the square of the length; those of"
        f" the fused kernel {growth[FUSED]:.0f} times, with the length. A textbook softmax fails in {broken} of"
        f" {len(CASES)} cases, by overflow and by 0 / 0.",
        [
            _lines("Temporary buffers, compiled for the target", "GiB", compiled, 2**30),
            _lines(f"Time, {common.clock_name()}", "ms", timed, 1e-3),
        ],
    )


def _lines(title: str, unit: str, rows: Sequence[Row], scale: float) -> Lines:
    tokens = {float(row["tokens"].replace(",", "")): row["tokens"] for row in rows}
    names = [name for name in rows[0] if name != "tokens"] if rows else []
    points = {name: [(at, row[name] / scale) for at, row in zip(tokens, rows, strict=True)] for name in names}
    return Lines(title, "tokens", unit, points, "xy", tokens)


def with_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(run, q, k, v)
        return (out, *pull(d_out))

    return both


def _temporaries(aim: Any, length: int) -> dict[str, int]:
    """Bytes beside inputs and gradients, for each implementation."""
    device = target_devices(aim, 1000 * aim.memory)[0]
    found = {}
    for name in ("reference", "blockwise", FUSED):
        q, k = (jax.ShapeDtypeStruct((1, length, heads, DIM), jnp.bfloat16) for heads in (HEADS, KV_HEADS))
        run = with_gradients(partial(attention, causal=True, implementation=name))
        found[name] = common.compile_for(device, run, q, k, k, q).sizes["temporaries"]
    return found


def _arrays(length: int, heads: int = 4, dim: int = 32) -> list[Any]:
    return [jax.random.normal(key, (1, length, heads, dim)) for key in jax.random.split(jax.random.key(0), 4)]


def _seconds(length: int) -> dict[str, float]:
    names = ("reference", "blockwise", *((FUSED,) if jax.default_backend() == "gpu" else ()))
    runs = {name: jax.jit(with_gradients(partial(attention, causal=True, implementation=name))) for name in names}
    return {name: common.seconds(run, *_arrays(length)) for name, run in runs.items()}


def _errors(case: str, length: int = 64) -> dict[str, float | str]:
    """For each implementation the worst error of the output and of all gradients."""
    q, k, v, d_out = _arrays(length)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    q = q * (1e4 / jnp.max(jnp.abs(scores)) if case == CASES[1] else 1.0)
    seen = jnp.arange(length) < (length // 2 if case == CASES[2] else length)
    ids = {"segment_ids": jnp.int32(~seen)[None], "kv_segment_ids": jnp.zeros((1, length), jnp.int32)}
    runs = {
        TEXTBOOK: partial(_stored, _textbook_softmax, seen),
        "reference": partial(attention, **ids, implementation="reference"),
        "blockwise": partial(attention, **ids, implementation="blockwise"),
    }
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, d_out)]
        exact = [np.asarray(x) for x in with_gradients(partial(_stored, _softmax, seen))(*wide)]
    worst: dict[str, float | str] = {}
    for name, run in runs.items():
        found = jax.jit(with_gradients(run))(q, k, v, d_out)
        errors = [
            np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max() for a, b in zip(found, exact, strict=True)
        ]
        worst[name] = float(max(errors)) if np.isfinite(errors).all() else "not a number"
    return worst


def _stored(softmax: Callable[..., Any], seen: Any, q: Any, k: Any, v: Any) -> Any:
    """Attention with all scores; `seen`: queries that see a key."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores, seen[:, None]), v)


def _textbook_softmax(scores: Any, seen: Any) -> Any:
    """Without the maximum: what nobody should compute."""
    scores = jnp.where(seen, jnp.exp(scores), 0.0)
    return scores / jnp.sum(scores, -1, keepdims=True)


def _softmax(scores: Any, seen: Any) -> Any:
    return jnp.where(seen, jax.nn.softmax(scores), 0.0)
