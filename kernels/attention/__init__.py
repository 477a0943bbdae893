"""Attention, with everything that transformers ask of it. `reference.py` says what it computes.

A new implementation is a function with the signature of `reference.attend` and a line in IMPLEMENTATIONS;
one that cannot run a call raises ValueError and says why. `tests/kernels/test_attention.py` holds for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.kernels import choice

from . import blockwise, mosaic, pallas, reference, triton
from .arguments import GIVEN, checked

IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "blockwise": blockwise.attend,
    "mosaic": mosaic.attend,
    "pallas": pallas.attend,
    "reference": reference.attend,
    "triton": triton.attend,
}


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: int | None = None,
    segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: tuple[jax.Array, float] | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:  # an array, with `return_lse` two
    """softmax(scale q k^T) v for each head, its softmax in float32.

    q is [batch, queries, heads, dim]; k and v are [batch, keys, kv_heads, dim], and so is the output like q.
    `heads` may be a multiple of `kv_heads`: query heads share key heads in consecutive groups.
    `causal`: a query sees the keys up to its own place; with more keys than queries the last query stands at
    the last key. `window`: it sees so many keys, its own included, and none after it.
    `segment_ids`: it sees keys of its own id (`kv_segment_ids`; where there are as many keys, the same ids).
    A query that sees nothing gives zeros. `scale` is 1/sqrt(dim) by default. `soft_cap` bounds the scores,
    cap tanh(score / cap). `dropout`: (a jax random key, the share of probabilities that become 0); the choice
    depends on key, batch row, head and positions, never on how the work is cut; inside `shard_map` they count
    from 0 on each shard, so fold the shard's index into the key there.
    `deterministic`: equal input gives equal gradients, to the bit. Else `mosaic` adds to dq in an order that changes
    from run to run, which is faster; all others are deterministic anyway.
    `return_lse`: also log(sum(exp(scores))), [batch, heads, queries] in float32, differentiable.
    `implementation`: a name in IMPLEMENTATIONS; None picks one.
    """
    arrays, options, extras = checked(
        q,
        k,
        v,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        scale=scale,
        soft_cap=soft_cap,
        dropout=dropout,
        deterministic=deterministic,
    )
    like, keys, _ = arrays
    with_lse = GIVEN.flag("return_lse", return_lse)
    out, lse = choice.run(
        "attention",
        implementation,
        IMPLEMENTATIONS,
        lambda attend: attend(*arrays, options, extras),
        (arrays, extras),
        portable="blockwise",
        kind=f"{like.dtype.name} {'causal' if options.causal or options.window is not None else 'full'}",
        sizes=(like.shape[1], keys.shape[1], *like.shape[2:]),
    )
    return (out, lse) if with_lse else out
