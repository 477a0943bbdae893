"""What a decoder keeps of the tokens that it has read: the keys and values of every layer, with room for more.

L layers, R texts, room for T tokens: 2 L R T kv_heads numbers of head_dim each, split over devices as the heads are. In
the compute dtype that is 2 head_dim bytes a head and token (bfloat16); as int8 with a constant for each head and token
head_dim + 4 (Hooper et al., arXiv:2401.18079, go below). Rounding moves each number by 1 / 254 of the largest of its
head at most. The new ones are written in place, and beside the cache one layer's keys and values are held, as they are
computed with: memory does not grow with depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmem import config, kernels
from jaxmem.quant import QTensor, quantize
from jaxmem.sharding import constrain

New = Float[Array, "batch time kv_heads head_dim"]
Room: TypeAlias = Float[Array, "layer batch room kv_heads head_dim"] | QTensor
Cache = tuple[Room, Room]  # keys and values

AXES = ("layer", "batch", None, "kv_heads", "head_dim")


@dataclass(frozen=True)
class Place:
    """Where a layer finds what was read, and leaves what is new."""

    cache: Cache
    layer: Int[Array, ""]
    length: Int[Array, ""]  # places that are taken
    first: Int[Array, "batch"] | None  # of each row, the first place that counts; None: 0


def empty(cfg: config.Decoder, rows: int, room: int, dtype: np.dtype, kept: str = "full") -> Cache:
    """A cache that holds nothing. `kept`: full, in `dtype`, or int8."""

    values: Any = jax.ShapeDtypeStruct((cfg.layers, rows, room, cfg.kv_heads, cfg.head_dim), dtype)
    if kept != "full":
        values = jax.eval_shape(lambda x: quantize(x, kept, None), values)

    def zeros() -> Room:
        return _pinned(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), values))

    return zeros(), zeros()


def with_room(cache: Cache, more: int) -> Any:
    """The same with room for so many more. Holds both while it copies."""
    return jax.tree.map(lambda x: jnp.pad(x, [(0, more if d == 2 else 0) for d in range(x.ndim)]), cache)


def room_of(cache: Cache) -> int:
    return int(jax.tree.leaves(cache)[0].shape[2])


def attend(
    q: Float[Array, "batch time heads head_dim"],
    k: New,
    v: New,
    place: Place,
    *,
    window: int | None,
    implementation: str | None,
) -> tuple[Float[Array, "batch time heads head_dim"], Cache]:
    """New positions against all that are taken and those of them that come before, and the cache with the new ones."""
    # Written, then read: the other way round XLA copies the caches of all layers.
    kept = _written(place.cache[0], k, place), _written(place.cache[1], v, place)
    new, room = q.shape[1], room_of(kept)
    spots = jnp.arange(room, dtype=jnp.int32)
    end = place.length + new
    if new > 1:  # turned so that the last of them stands last, as a causal mask wants it
        spots = (spots + end) % room
    seen = spots < end
    if new == 1 and window is not None:
        seen &= spots >= end - window
    shown = seen[None] if place.first is None else seen & (spots >= place.first[:, None])

    def read(one: Room) -> jax.Array:
        values = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place.layer, keepdims=False), one)
        if new > 1:
            values = jax.tree.map(lambda x: jnp.take(x, spots, axis=1), values)
        return values.dequantize(q.dtype) if isinstance(values, QTensor) else values

    mixed = kernels.attention(
        q,
        *map(read, kept),
        causal=new > 1,
        window=window if new > 1 else None,
        segment_ids=jnp.ones(q.shape[:2], jnp.int32),
        kv_segment_ids=jnp.broadcast_to(shown.astype(jnp.int32), (q.shape[0], room)),
        implementation=implementation,
    )
    return mixed, kept


def _written(room: Room, new: New, place: Place) -> Room:
    values: Any = room.requantize(new) if isinstance(room, QTensor) else new.astype(room.dtype)
    at = (place.layer, 0, place.length, 0, 0)
    return _pinned(jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y[None], at), room, values))


def _pinned(room: Room) -> Room:
    return jax.tree.map(lambda x: constrain(x, *AXES), room)
