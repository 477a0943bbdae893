"""What attention takes: checked once, in one place, whichever implementation runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from .mask import seed_of

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """What is known when the program is compiled."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    dropout: float  # the share of probabilities dropped


class Extras(NamedTuple):
    """Arrays beside q, k and v; None where there is nothing to do."""

    segment_ids: Int32[Array, "batch queries"] | None = None
    kv_segment_ids: Int32[Array, "batch keys"] | None = None
    seed: UInt32[Array, "2"] | None = None  # of dropout


def checked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    window: int | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    scale: float | None,
    soft_cap: float | None,
    dropout: tuple[jax.Array, float] | None,
) -> tuple[Options, Extras]:
    """The arguments in one form, or a ValueError that names the argument and what it should be."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(x.ndim == 4, f"{name} has shape {x.shape}; it should be [batch, time, heads, dim]")
        _require(x.size > 0, f"{name} has shape {x.shape}; no dimension may be empty")
        _require(x.dtype.name in DTYPES, f"{name} is {x.dtype}; it should be one of {', '.join(DTYPES)}")
        _require(x.dtype == q.dtype, f"{name} is {x.dtype} and q is {q.dtype}; they should be the same")
    _require(k.shape == v.shape, f"k has shape {k.shape} and v {v.shape}; they should be the same")
    batch, queries, heads, dim = q.shape
    _require(k.shape[0] == batch, f"k has batch {k.shape[0]} and q {batch}; they should be the same")
    _require(k.shape[3] == dim, f"k has dim {k.shape[3]} and q {dim}; they should be the same")
    _require(heads % k.shape[2] == 0, f"k has {k.shape[2]} heads; they should divide the {heads} heads of q")
    if window is not None:
        _require(window >= 1, f"window is {window!r}; it should be at least 1 (the key at the query's own place)")
    if soft_cap is not None:
        _require(soft_cap > 0 and math.isfinite(soft_cap), f"soft_cap is {soft_cap!r}; it should be above 0")
    if scale is not None:
        _require(math.isfinite(scale), f"scale is {scale!r}; it should be a finite number")
    if kv_segment_ids is None and k.shape[1] == queries:
        kv_segment_ids = segment_ids
    _require(
        (segment_ids is None) == (kv_segment_ids is None),
        f"{'segment_ids' if segment_ids is None else 'kv_segment_ids'} is missing; "
        f"with {queries} queries and {k.shape[1]} keys both are needed",
    )
    if segment_ids is not None and kv_segment_ids is not None:
        segment_ids = _ids("segment_ids", segment_ids, (batch, queries))
        kv_segment_ids = _ids("kv_segment_ids", kv_segment_ids, (batch, k.shape[1]))
    rate, seed = 0.0, None
    if dropout is not None:
        key, rate = dropout
        _require(0.0 <= rate < 1.0, f"dropout has rate {rate!r}; it should be at least 0 and below 1")
        seed = seed_of(key) if rate else None
    options = Options(bool(causal), window, dim**-0.5 if scale is None else float(scale), soft_cap, float(rate))
    return options, Extras(segment_ids, kv_segment_ids, seed)


def _ids(name: str, ids: jax.Array, shape: tuple[int, int]) -> jax.Array:
    _require(ids.shape == shape, f"{name} has shape {ids.shape}; it should be [batch, time], {shape}")
    _require(jnp.issubdtype(ids.dtype, jnp.integer), f"{name} is {ids.dtype}; it should be of integers")
    return ids.astype(jnp.int32)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"attention: {message}")
