"""The arguments of attention, and their checks for all implementations."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32

from jaxmem.kernels.validation import FLOATS, Validator, describe

DTYPES = FLOATS
CHECKS = Validator("attention")
QueryHeads = Float[Array, "batch queries heads dim"]
KeyHeads = Float[Array, "batch keys kv_heads dim"]
LogSumExp = Float[Array, "batch heads queries"]


class AttentionOptions(TypedDict, total=False):
    """The options of `attention`, which documents them."""

    causal: bool
    window: int | None
    segment_ids: ArrayLike | None
    kv_segment_ids: ArrayLike | None
    max_segments: int | None
    scale: float | None
    soft_cap: float | None
    has_window: ArrayLike | None
    window_share: tuple[int, int] | None
    sinks: ArrayLike | None


@dataclass(frozen=True)
class Options:
    """Options that are known at compile time."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    max_segments: int | None = None  # largest number of runs of equal segment ids in a sequence; None: unknown
    window_share: tuple[int, int] | None = None  # (number of calls with the window, number of all calls)


class Extras(NamedTuple):
    """Arrays besides q, k and v; None if the option is not used."""

    segment_ids: Int32[Array, "batch queries"] | None = None
    kv_segment_ids: Int32[Array, "batch keys"] | None = None
    has_window: Bool[Array, ""] | None = None  # whether the window applies; None: it applies
    sinks: Float[Array, " heads"] | None = None  # a logit for each head in the softmax, without a value


class Residuals(NamedTuple):
    """The arrays of a forward pass that the backward pass reads. `k` and `v` may be a part of the keys, if `out` and
    `lse` are those of all keys."""

    q: QueryHeads
    k: KeyHeads
    v: KeyHeads
    out: QueryHeads
    lse: LogSumExp


def visible(
    query: Int32[Array, " *rows"],
    key: Int32[Array, " *keys"],
    *,
    offset: int,
    causal: bool,
    window: int | None,
) -> Bool[Array, "..."] | None:
    """Whether the query at position `query` attends to the key at position `key` (they broadcast); None: always. Query
    q is at key position q + `offset`, with `offset` = keys - queries. With a window of w it attends to w keys, of which
    the key at this position is the last."""
    if not causal and window is None:
        return None
    distance = query + jnp.int32(offset) - key
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def check_arguments(
    q: Any, k: Any, v: Any, **arguments: Unpack[AttentionOptions]
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Options, Extras]:
    """The arrays and options; ValueError names a wrong argument."""
    if unknown := arguments.keys() - AttentionOptions.__annotations__:
        raise TypeError(f"attention: unknown argument {', '.join(sorted(unknown))}")
    read: Any = arguments.get
    q, k, v = (
        CHECKS.array(name, x, "[batch, sequence, heads, dim]", DTYPES) for name, x in (("q", q), ("k", k), ("v", v))
    )
    for name, x in (("k", k), ("v", v)):
        _require(x.dtype == q.dtype, f"{name} is {x.dtype} and q is {q.dtype}; they should be the same")
    _require(k.shape == v.shape, f"k has shape {k.shape} and v {v.shape}; they should be the same")
    batch, queries, heads, dim = q.shape
    _require(k.shape[0] == batch, f"k has batch {k.shape[0]} and q {batch}; they should be the same")
    _require(k.shape[3] == dim, f"k has dim {k.shape[3]} and q {dim}; they should be the same")
    _require(heads % k.shape[2] == 0, f"k has {k.shape[2]} heads; the {heads} heads of q should be a multiple of them")
    causal = CHECKS.flag("causal", read("causal", False))
    if (window := read("window")) is not None:
        window = CHECKS.whole_number("window", window)
        _require(window >= 1, f"window is {window}; it should be at least 1 (the key at the position of the query)")
        window = min(window, k.shape[1])  # the window must fit in 32 bits
    if (soft_cap := read("soft_cap")) is not None:
        soft_cap = CHECKS.number("soft_cap", soft_cap)
        _require(soft_cap > 0, f"soft_cap is {soft_cap!r}; it should be above 0")
    scale = dim**-0.5 if read("scale") is None else CHECKS.number("scale", read("scale"))
    segment_ids = read("segment_ids")
    kv_segment_ids = read("kv_segment_ids")
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
    if (max_segments := read("max_segments")) is not None:
        max_segments = CHECKS.whole_number("max_segments", max_segments)
        _require(max_segments >= 1, f"max_segments is {max_segments}; it should be at least 1")
    if (has_window := read("has_window")) is not None:
        has_window = jnp.asarray(has_window)
        _require(window is not None, "has_window is set without window; it needs both")
        is_flag = has_window.shape == () and has_window.dtype == bool
        _require(is_flag, f"has_window is {describe(has_window)}; it should be one boolean")
    if (sinks := read("sinks")) is not None:
        sinks = jnp.asarray(sinks)
        is_right = sinks.shape == (heads,) and sinks.dtype in DTYPES
        _require(is_right, f"sinks is {describe(sinks)}; it should be floats of shape [{heads}], one per head")
    options = Options(causal, window, scale, soft_cap, max_segments, read("window_share"))
    return (q, k, v), options, Extras(segment_ids, kv_segment_ids, has_window, sinks)


def _ids(name: str, ids: Any, shape: tuple[int, int]) -> jax.Array:
    return CHECKS.integers(name, ids, shape, "[batch, sequence], ").astype(jnp.int32)


_require = CHECKS.require


class AttentionShape(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool = True
    window: int | None = None

    @property
    def flops(self) -> int:
        """Operations of the two matmuls of the forward pass. The backward pass has five, so 2.5 times as many."""
        visible = pairs(self.queries, self.keys, causal=self.causal, window=self.window)
        return 4 * self.batch * self.heads * visible * self.dim


@functools.cache  # a search asks thousands of times
def pairs(queries: int, keys: int, *, causal: bool, window: int | None) -> int:
    """The number of (query, key) pairs that are not masked."""
    if not causal and window is None:
        return queries * keys
    reach = keys if window is None else min(window, keys)

    def below(end: int) -> int:
        """Keys that the queries at positions below `end` attend to."""
        full = max(end - reach, 0)
        rising = max(min(end, reach), 0)
        return full * reach + rising * (rising + 1) // 2

    return below(keys) - below(keys - queries)


ATTENTION_SHAPES = {
    "bench": AttentionShape(8, 256, 256, 8, 8, 32),  # a model that fits on a CPU
    "llama2-7b": AttentionShape(1, 4096, 4096, 32, 32, 128),
    "llama3-8b": AttentionShape(1, 8192, 8192, 32, 8, 128),
    "llama3.2-1b": AttentionShape(4, 2048, 2048, 32, 8, 64),
    "llama3-70b": AttentionShape(1, 8192, 8192, 64, 8, 128),
    "mistral-7b": AttentionShape(1, 16384, 16384, 32, 8, 128, window=4096),
    "qwen2.5-7b": AttentionShape(1, 8192, 8192, 28, 4, 128),
    "vit-b16": AttentionShape(32, 197, 197, 12, 12, 64, causal=False),
    "probe": AttentionShape(4, 4096, 4096, 16, 16, 128),  # the backward pass of XLA's own attention needs 10 GiB
    "long": AttentionShape(1, 16384, 16384, 16, 16, 128),
}
