"""Memory compiled for a GPU, times on this machine, and errors relative to float64."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.kernels import attention
from jaxmem.planning.targets import parse_target, target_devices
from scripts.course import Findings, common, main
from scripts.course.panels import LinePlot
from scripts.course.table import Row, Table

FUSED = "triton"  # the fused kernel among the implementations
IMPLEMENTATIONS = ("reference", "blockwise", FUSED)
HEADS, KV_HEADS, DIM = 32, 8, 128  # sizes of llama3-8b
LENGTHS = (1024, 4096, 16384)
MEASURED_LENGTHS = (256, 512, 1024)  # tokens, with 4 heads of 32
TEXTBOOK = "textbook: exp(x) / sum"
CASES = ("usual scores", "scores up to 1e4", "half the rows without keys")


def measure(target: str, lengths: Sequence[int] = LENGTHS, here: Sequence[int] = MEASURED_LENGTHS) -> Findings:
    compiled = Table(
        f"Temporary buffers of attention and its gradients on {target}, MiB",
        [{"tokens": length, **_temporaries(target, length)} for length in lengths],
    )
    names = IMPLEMENTATIONS if jax.default_backend() == "gpu" else IMPLEMENTATIONS[:2]
    timed = Table(
        f"Attention and its gradients, {common.clock_name()}, ms",
        [
            {"tokens": length}
            | {name: 1e3 * common.seconds(jax.jit(_causal(name)), *_arrays(length)) for name in names}
            for length in here
        ],
    )
    errors = [{"case": case, **_errors(case)} for case in CASES]
    growth = {name: compiled.rows[-1][name] / compiled.rows[0][name] for name in IMPLEMENTATIONS}
    broken = sum(isinstance(row[TEXTBOOK], str) for row in errors)
    return Findings(
        [
            compiled,
            timed,
            Table("Largest error of output and gradients against float64, relative to the largest value", errors),
        ],
        {"shortest": lengths[0], "longest": lengths[-1], "growth": growth, "broken": broken},
        [
            LinePlot.of(compiled, "tokens", "MiB", IMPLEMENTATIONS, "xy"),
            LinePlot.of(timed, "tokens", "ms", names, "xy"),
        ],
    )


def with_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(run, q, k, v)
        return (out, *pull(d_out))

    return both


def _causal(name: str) -> Callable[..., Any]:
    return with_gradients(partial(attention, causal=True, implementation=name))


def _temporaries(target: str, length: int) -> dict[str, float]:
    """MiB besides inputs and gradients, for each implementation."""
    aim = parse_target(target)
    device = target_devices(aim, 1000 * aim.memory)[0]
    q, k = (jax.ShapeDtypeStruct((1, length, heads, DIM), jnp.bfloat16) for heads in (HEADS, KV_HEADS))
    compiled = {name: common.compile_for(device, _causal(name), q, k, k, q) for name in IMPLEMENTATIONS}
    return {name: step.sizes["temporaries"] / 2**20 for name, step in compiled.items()}


def _arrays(length: int, heads: int = 4, dim: int = 32) -> list[Any]:
    return [jax.random.normal(key, (1, length, heads, dim)) for key in jax.random.split(jax.random.key(0), 4)]


def _errors(case: str, length: int = 64) -> Row:
    """For each implementation the worst error of the output and of all gradients."""
    q, k, v, d_out = _arrays(length)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    q = q * (1e4 / jnp.max(jnp.abs(scores)) if case == CASES[1] else 1.0)
    seen = jnp.arange(length) < (length // 2 if case == CASES[2] else length)
    ids = {"segment_ids": jnp.int32(~seen)[None], "kv_segment_ids": jnp.zeros((1, length), jnp.int32)}
    runs = {TEXTBOOK: partial(_stored, _textbook_softmax, seen)}
    runs |= {name: partial(attention, **ids, implementation=name) for name in IMPLEMENTATIONS[:2]}
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, d_out)]
        exact = with_gradients(partial(_stored, lambda x, seen: jnp.where(seen, jax.nn.softmax(x), 0.0), seen))(*wide)
    worst: dict[str, float | str] = {}
    for name, run in runs.items():
        results = jax.jit(with_gradients(run))(q, k, v, d_out)
        errors = [
            np.abs(np.asarray(a, np.float64) - np.asarray(b)).max() / np.abs(b).max()
            for a, b in zip(results, exact, strict=True)
        ]
        worst[name] = float(max(errors)) if np.isfinite(errors).all() else "not a number"
    return worst


def _stored(softmax: Callable[..., Any], seen: Any, q: Any, k: Any, v: Any) -> Any:
    """Attention with all scores stored; `seen`: the queries that attend to keys."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores, seen[:, None]), v)


def _textbook_softmax(scores: Any, seen: Any) -> Any:
    """Softmax without subtracting the maximum, which overflows."""
    scores = jnp.where(seen, jnp.exp(scores), 0.0)
    return scores / jnp.sum(scores, -1, keepdims=True)


if __name__ == "__main__":
    main(__file__)
