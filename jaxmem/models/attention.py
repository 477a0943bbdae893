"""Grouped-query attention, on one device or sharded over batch, heads and sequence.

A sequence dimension sharded over `context` is stored in the order of `context_order`. `Execution.context_method` names
the communication of attention over `context`, one of the methods in `kernels/fused_attention/context.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmem import kernels
from jaxmem.kernels.scopes import purpose
from jaxmem.models.chunking import join_head_groups, map_head_groups, map_token_chunks
from jaxmem.models.layers import Keys, Modules, RMSNorm, fetch, fold_keys, new_constant
from jaxmem.models.linear import Linear, apply_linears
from jaxmem.models.network import Execution
from jaxmem.models.rope import Angles, rotate
from jaxmem.sharding.arrays import constrain, map_devices
from jaxmem.sharding.layout import Layout, current, shard_count
from jaxmem.sharding.table import Axes
from jaxmem.stack.remat import saved_as
from jaxmem.typing import Tree

HEADS: Axes = ("batch", "time", "heads", "head_dim")
PER_DEVICE = ("cudnn", "triton")  # implementations that XLA's partitioner cannot shard


class Tokens(NamedTuple):
    """Inputs of attention for each token."""

    angles: Angles | None = None
    segment_ids: Int[Array, "batch time"] | None = None  # index of each token's document in a packed sequence
    has_window: Bool[Array, ""] | None = None  # whether this layer has a window, if layers differ


@dataclass(frozen=True)
class AttentionSpec:
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None
    window_share: tuple[int, int] | None = None  # (layers with the window, all layers), if layers differ
    scale: float | None = None  # factor on the scores; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None
    bias: bool = False  # whether queries, keys and values have biases
    output_bias: bool = False
    qk_norm: float | None = None  # the epsilon of an RMS norm of q and k
    joint_qk_norm: bool = False  # whether this norm is over all heads together, instead of each head
    norm_offset: float = 0.0
    sinks: bool = False  # whether each head has a trained logit in its softmax, without a value
    values: int | None = None  # number of first dimensions of values that are not zeros (padding); None: all

    def options(self, has_window: jax.Array | None) -> dict[str, Any]:
        """Options of `kernels.attention` for a layer. `has_window`: whether it has a window; None: all layers agree."""
        common = {"window": self.window, "scale": self.scale, "soft_cap": self.soft_cap}
        return common if has_window is None else common | {"has_window": has_window, "window_share": self.window_share}


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245)."""

    # The modules before the output projection.
    inner: ClassVar[tuple[str, ...]] = ("q", "k", "v", "q_norm", "k_norm", "sinks")

    def __init__(self, rngs: nnx.Rngs, spec: AttentionSpec, execution: Execution = Execution()):
        heads = spec.heads * spec.head_dim
        kv_heads = spec.kv_heads * spec.head_dim
        self.q = Linear(rngs, spec.embed, heads, ("embed", "heads"), bias=spec.bias)
        self.k = Linear(rngs, spec.embed, kv_heads, ("embed", "kv_heads"), bias=spec.bias)
        self.v = Linear(rngs, spec.embed, kv_heads, ("embed", "kv_heads"), bias=spec.bias)
        self.o = Linear(rngs, heads, spec.embed, ("heads", "embed"), bias=spec.output_bias)
        if spec.sinks:
            self.sinks = new_constant(0.0, (spec.heads,), ("heads",))
        self.q_norm = self._norm(spec, "heads", heads)
        self.k_norm = self._norm(spec, "kv_heads", kv_heads)
        self.spec = spec
        self.execution = execution

    def __call__(
        self,
        x: Float[Array, "batch time embed"],
        tokens: Tokens = Tokens(),
        keys: Keys | None = None,
        slot: Any = None,  # a `kv_cache.CacheSlot`
    ) -> tuple[Float[Array, "batch time embed"], Any]:
        """With a `slot`, x continues the tokens in the KV cache, and the updated cache is also returned."""
        inner, outer = fold_keys(keys, 2)
        q, k, v = self._project(self._inner, x, tokens.angles, inner)
        q, k, v = (saved_as(y, f"attention_{of}") for y, of in ((q, "q"), (k, "k"), (v, "v")))
        cache = None
        if slot is not None:
            # XLA's partitioner shards attention to the cache; it cannot shard the kernels in PER_DEVICE.
            implementation = "blockwise" if self.execution.attention in PER_DEVICE else self.execution.attention
            options = {"implementation": implementation, "sinks": _sinks(self._inner)}
            mixed, cache = slot.attend(q, k, v, self.spec.options(tokens.has_window) | options)
            mixed = mixed[..., : self.spec.values]
        else:
            mixed = self._attend(q, k, v, tokens, _sinks(self._inner))
        joined = mixed.reshape(*x.shape[:-1], -1)
        return self.o(constrain(joined, "batch", "time", "heads"), outer), cache

    @staticmethod
    def _norm(spec: AttentionSpec, axis: str, size: int) -> RMSNorm | None:
        if spec.qk_norm is None:
            return None
        size, axis = (size, axis) if spec.joint_qk_norm else (spec.head_dim, "head_dim")
        return RMSNorm(size, spec.qk_norm, axis, spec.norm_offset)

    def in_chunks(
        self,
        norm: Callable[[jax.Array], jax.Array] | None,
        x: Float[Array, "batch time embed"],
        tokens: Tokens,
        keys: Keys | None,
        size: int | None,
        groups: int,
    ) -> Float[Array, "batch time embed"]:
        """Attention of norm(x), one group of heads at a time, with projections in chunks of `size` tokens."""

        inner_keys, outer = (key_data(part_keys) for part_keys in fold_keys(keys, 2))

        def project(modules: Modules, x: jax.Array, others: Tree) -> tuple[jax.Array, ...]:
            angles, data = others
            normal = gather_time(modules["norm"](x) if "norm" in modules else x, "time")
            return tuple(y.reshape(*y.shape[:2], -1) for y in self._project(modules, normal, angles, as_keys(data)))

        def attend(modules: Modules, x: jax.Array) -> jax.Array:
            flat = map_token_chunks(project, modules, x, (tokens.angles, inner_keys), size=size)
            q, k, v = (y.reshape(*y.shape[:2], -1, self.spec.head_dim) for y in flat)
            return self._attend(q, k, v, tokens, _sinks(modules))

        inner = {**({} if norm is None else {"norm": norm}), **self._inner}
        heads = {"heads": self.spec.heads, "kv_heads": self.spec.kv_heads}
        shards = shard_count("activations", "heads") * self._context_shards
        mixed = map_head_groups(attend, inner, x, groups, heads, shards)
        mixed = mixed.reshape(*mixed.shape[:-2], -1)

        def out(modules: Modules, mixed: jax.Array, data: jax.Array | None) -> jax.Array:
            joined = constrain(join_head_groups(mixed, shards), "batch", "time", "heads")
            return scatter_time(modules["o"](joined, as_keys(data)))

        return map_token_chunks(out, {"o": self.o}, mixed, outer, size=size)

    def group_count(self, x: Float[Array, "batch time embed"]) -> int:
        """The number of groups of heads (`memory.head_groups`)."""
        spec = self.spec
        if spec.joint_qk_norm:
            return 1
        return self.execution.chunking.group_count(x, spec.heads, spec.kv_heads, spec.head_dim, self._context_shards)

    @property
    def _context_shards(self) -> int:
        """The number of devices along `context` over which attention shards the heads of each device."""
        return shard_count("activations", "time") if self.execution.context_method == "ulysses" else 1

    @property
    def _inner(self) -> Modules:
        """Attention without the output projection."""
        modules = {name: getattr(self, name, None) for name in self.inner}
        return {name: module for name, module in modules.items() if module is not None}

    def _project(
        self, modules: Modules, x: jax.Array, angles: Angles | None, keys: Keys | None
    ) -> tuple[jax.Array, ...]:
        """Queries, keys and values of all heads, or of the group of heads whose weights are in `modules`."""
        q, k, v = apply_linears(x, [modules[name] for name in "qkv"], fold_keys(keys, 3))
        return (
            self._split_heads(q, "heads", modules.get("q_norm"), angles),
            self._split_heads(k, "kv_heads", modules.get("k_norm"), angles),
            self._split_heads(v, "kv_heads"),
        )

    def _attend(
        self,
        q: Float[Array, "batch time heads dim"],
        k: Float[Array, "batch time kv_heads dim"],
        v: Float[Array, "batch time kv_heads dim"],
        tokens: Tokens,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "batch time heads values"]:
        """`kernels.attention` of arrays sharded over batch, heads and sequence."""
        spec = self.spec
        execution = self.execution
        layout = current()
        segment_ids = tokens.segment_ids
        if execution.attention == "cudnn" and spec.causal and not execution.packed:
            segment_ids = None  # padding is last, so a causal mask hides it from the tokens that have a loss
        over = () if layout is None else layout.over("activations", "time")

        @purpose("attention")
        def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, has_window: Any, sinks: Any) -> jax.Array:
            options = {"implementation": execution.attention, "segment_ids": ids, "sinks": sinks}
            options |= spec.options(has_window) | {"max_segments": execution.max_segments}
            if not over:
                return kernels.attention(q, k, v, causal=spec.causal, kv_segment_ids=ids, **options)
            from jaxmem.kernels.fused_attention.context import attention_over

            return attention_over(over[0], execution.context_method, q, k, v, **options)

        arrays = q, repeat_kv_heads(k), repeat_kv_heads(v), segment_ids, tokens.has_window, sinks
        mapped = local
        if layout is not None and (over or execution.attention in PER_DEVICE):
            heads = layout.spec("activations", HEADS)
            rows = layout.spec("activations", ("batch", "time"))
            array_specs = (
                heads,
                heads,
                heads,
                rows,
                layout.spec("activations", ()),
                layout.spec("activations", ("heads",)),
            )
            specs = tuple(None if x is None else spec for x, spec in zip(arrays, array_specs, strict=True))
            mapped = map_devices(local, specs, heads)
        return mapped(*arrays)[..., : spec.values]

    def _split_heads(
        self,
        x: Float[Array, "batch time width"],
        axis: str,
        norm: RMSNorm | None = None,
        angles: Angles | None = None,
    ) -> Float[Array, "batch time heads head_dim"]:
        if norm is not None and self.spec.joint_qk_norm:
            x = norm(x)
        x = x.reshape(*x.shape[:-1], -1, self.spec.head_dim)
        if norm is not None and not self.spec.joint_qk_norm:
            x = norm(x)
        if angles is not None:
            x = rotate(x, angles)
        return constrain(x, "batch", "time", axis, "head_dim")


def _sinks(modules: Modules) -> Float[Array, " heads"] | None:
    return fetch(modules["sinks"], jnp.float32) if "sinks" in modules else None


def repeat_kv_heads(x: Float[Array, "batch time kv_heads dim"]) -> Float[Array, "batch time more dim"]:
    """Repeats KV heads if their number is not divisible by `tensor`: each device has the KV heads of its queries."""
    shards = shard_count("activations", "heads")
    if x.shape[2] % shards == 0:
        return x
    return constrain(jnp.repeat(x, shards // math.gcd(shards, x.shape[2]), axis=2), *HEADS)


def context_order(layout: Layout | None, length: int, method: str, window: int | None) -> np.ndarray | None:
    """The position stored at each index of a sequence sharded over `context`; None: positions are in order."""
    devices = 1 if layout is None else layout.shard_count("activations", "time")
    if devices == 1 or method == "ulysses" or window is not None:
        return None
    from jaxmem.kernels.fused_attention.ring import places

    return places(length, devices)


def key_data(keys: Keys | None) -> jax.Array | None:
    """Random keys as integers, so that they can be sliced into chunks of tokens like other arrays."""
    return None if keys is None else jax.random.key_data(keys)


def as_keys(data: jax.Array | None) -> Keys | None:
    return None if data is None else jax.random.wrap_key_data(data)


def scatter_time(x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
    """Reduce-scatters partial sums over `tensor` along the sequence dimension."""
    return constrain(x, "batch", "stream", "embed")


def gather_time(x: Float[Array, "batch time embed"], time: str) -> Float[Array, "batch time embed"]:
    """All-gathers the sequence dimension over `tensor`, and reduce-scatters its gradient. `time` is the logical axis of
    the result (for an MLP `mlp_time`). If `tensor` does not shard the weights, the rule of this axis gathers
    nothing."""
    return constrain(scatter_time(x), "batch", time, "embed")
