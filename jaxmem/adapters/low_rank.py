"""LoRA and DoRA: y = x W + s (x A) B with trainable A and B (Hu et al., arXiv:2106.09685).

W of [in, out] is frozen; A of [in, r] is random, B of [r, out] zeros, so that nothing changes at first. s is alpha / r,
or alpha / sqrt(r), with which higher ranks keep learning (rsLoRA: Kalajdzievski, arXiv:2312.03732). Gradients and
optimizer state are those of r (in + out) weights in place of in x out; W + s A B is never computed. A step saves the
matmul of W's gradient, a third of a layer's arithmetic, and adds 6 r (in + out) FLOPs per token.

W may be quantized (QLoRA: Dettmers et al., arXiv:2305.14314): it is dequantized where it is used, forward and backward.

DoRA (Liu et al., arXiv:2402.09353) trains the norm of each column of W + s A B apart from its direction:
y = m / |W + s A B| (x W + s (x A) B). Gradients do not pass through the norms (section 4.3). They are computed from
|W|^2 + 2 s W^T A B + s^2 |A B|^2, without the sum: one more read of each W, and matmuls with r more columns.

On a mesh A and B are sharded over all axes that shard weights: `in` of A and `out` of B as those of W, and over the
other axes where that is even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.config.sections import Adapter
from jaxmem.errors import UserError, nearest
from jaxmem.models.embedding import Embedding, lookup_param
from jaxmem.models.layers import Keys, dropout, fetch
from jaxmem.models.linear import Linear, matmul
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, Axis, axis_name
from jaxmem.sharding.host import fetch_from_host
from jaxmem.sharding.storage import store_new

TRAINABLE = ("*.lora.*",)


@dataclass(frozen=True)
class LoraSpec:
    """The settings of low-rank adapters: fields of a config's `adapter` section."""

    rank: int = 16
    alpha: float = 16.0
    # Patterns of linear layers and embeddings, or a rank for each pattern; the first that matches applies.
    targets: Sequence[str] | Mapping[str, int] = ("blocks.*",)
    rslora: bool = False  # the scale is alpha / sqrt(rank), not alpha / rank
    dropout: float = 0.0  # of the adapter's input
    dora: bool = False


class Lora(nnx.Module):
    """The adapter of one linear layer or embedding, or of a stack of them."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        base: Linear | Embedding,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        *,
        dora: bool = False,
        order: Sequence[int] | None = None,
    ):
        """`order`: the layer at each position of a stack; None: its own."""
        *layers, inputs, outputs = base.weight.get_value().shape
        axes: Axes = base.weight.get_metadata()["axes"]
        stacked, (first, last) = axes[: len(layers)], axes[len(layers) :]
        if isinstance(base, Embedding):  # looked up, so that A is the one of zeros
            a = jnp.zeros((*layers, inputs, rank))
            b = jax.random.normal(rngs.params(), (*layers, rank, outputs))
        else:
            bound = 1 / math.sqrt(inputs)
            a = jax.random.uniform(rngs.params(), (*layers, inputs, rank), minval=-bound, maxval=bound)
            b = jnp.zeros((*layers, rank, outputs))
        if layers and order is not None:
            a, b = a[np.asarray(order)], b[np.asarray(order)]
        inputs_axis, outputs_axis = (axis and Axis(axis_name(axis), like_storage=True) for axis in (first, last))
        self.a = _param(a, (*stacked, inputs_axis, "rank"))
        self.b = _param(b, (*stacked, "rank", outputs_axis))
        self.magnitude = _param(_column_norms(base), (*stacked, outputs_axis)) if dora else None
        self.scale, self.dropout = scale, dropout

    def __call__(
        self,
        x: Float[Array, "*batch inputs"],
        y: Float[Array, "*batch outputs"],
        w: Callable[[], Float[Array, "inputs outputs"]],
        keys: Keys | None,
    ) -> Float[Array, "*batch outputs"]:
        """The layer's output, from the output `y` of its own weight `w`, of which DoRA needs the norms."""
        a, b = fetch(self.a, x.dtype), fetch(self.b, x.dtype)
        y = y + matmul(self.scale * matmul(dropout(x, self.dropout, keys), a), b)
        if self.magnitude is None:
            return y
        ratio = fetch(self.magnitude, jnp.float32) / jax.lax.stop_gradient(self._sum_norms(w(), a, b))
        return (y * ratio).astype(x.dtype)

    def rows(self, ids: Int[Array, "batch time"], dtype: DTypeLike) -> Float[Array, "batch time embed"]:
        """What it adds to the rows of an embedding."""
        return matmul(self.scale * lookup_param(self.a, ids, dtype), fetch(self.b, dtype))

    def _sum_norms(self, w: jax.Array, a: jax.Array, b: jax.Array) -> Float[Array, "outputs"]:
        """Norms of the columns of W + s A B."""
        w, a, b = (jax.lax.stop_gradient(x) for x in (w, a, b))
        cross = jnp.einsum("ro,ro->o", (w.T @ a).T, b, preferred_element_type=jnp.float32)
        square = jnp.einsum("ro,ro->o", (a.T @ a) @ b, b, preferred_element_type=jnp.float32)
        squares = jnp.sum(jnp.square(w.astype(jnp.float32)), axis=0) + 2 * self.scale * cross + self.scale**2 * square
        return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


def lora(
    model: nnx.Module, *, key: jax.Array | None = None, order: Sequence[int] | None = None, **options: Any
) -> tuple[str, ...]:
    """Adds adapters to the linear layers and embeddings of a model whose names match. `options`: fields of `LoraSpec`.
    `order`: the layer at each position of a stack. Returns the patterns of the trainable weights."""
    spec = LoraSpec(**options)
    ranks = dict(spec.targets) if isinstance(spec.targets, Mapping) else dict.fromkeys(spec.targets, spec.rank)
    rngs = nnx.Rngs(params=jax.random.key(0) if key is None else key)
    for module, rank in _targets(model, ranks):
        scale = spec.alpha / (math.sqrt(rank) if spec.rslora else rank)
        dora = spec.dora and isinstance(module, Linear)
        module.lora = Lora(rngs, module, rank, scale, spec.dropout, dora=dora, order=order)
    return TRAINABLE


def attach_from_config(model: nnx.Module, cfg: Adapter, key: jax.Array, order: Sequence[int] | None) -> None:
    same = {name: getattr(cfg, name) for name in ("rank", "alpha", "targets", "rslora", "dropout")}
    lora(model, **same, dora=cfg.kind == "dora", key=key, order=order)


def merged_weight(w: Float[Array, "inputs outputs"], own: Mapping[str, jax.Array], scale: float) -> jax.Array:
    """A weight with its adapter (`a`, `b`, with DoRA `magnitude`) merged into it, in float32."""
    f32 = {name: x.astype(jnp.float32) for name, x in own.items()}
    summed = w.astype(jnp.float32) + scale * f32["a"] @ f32["b"]
    if "magnitude" not in f32:
        return summed
    return summed * (f32["magnitude"] / jnp.linalg.norm(summed, axis=0))


def merge(model: nnx.Module) -> None:
    """Merges low-rank adapters into their weights, one layer after the other, and removes them. Quantized weights are
    requantized."""
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, Linear | Embedding) and module.lora is not None:
            own = {name: x for name, x in nnx.to_pure_dict(nnx.state(module.lora)).items() if x is not None}
            module.weight.set_value(_merged(module.weight.get_value(), own, module.lora.scale))
            module.lora = None
    if getattr(model, "prompt", None) is not None:
        raise UserError("merge does not support a prompt, which has no weight to be merged into; export the adapter")


def _merged(w: jax.Array | QTensor, own: Mapping[str, jax.Array], scale: float) -> jax.Array | QTensor:
    def one(pair: tuple[jax.Array | QTensor, Mapping[str, jax.Array]]) -> jax.Array | QTensor:
        w, own = fetch_from_host(pair)
        if isinstance(w, QTensor):
            return w.requantize(merged_weight(w.dequantize(jnp.float32), own, scale))
        return merged_weight(w, own, scale).astype(w.dtype)

    return jax.lax.map(one, (w, own)) if w.ndim > 2 else one((w, own))


def _targets(model: nnx.Module, ranks: Mapping[str, int]) -> list[tuple[Linear | Embedding, int]]:
    """The matching modules with their ranks, sorted by name, so that random keys depend on names only."""
    found = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    known = {name: module for name, module in sorted(found.items()) if isinstance(module, Linear | Embedding)}
    if unused := [pattern for pattern in ranks if not any(fnmatchcase(name, pattern) for name in known)]:
        raise UserError(
            f"adapter.targets: no layer matches {unused[0]!r}{nearest(unused[0], known)}; layers: {', '.join(known)}"
        )
    matches = ((module, next((p for p in ranks if fnmatchcase(name, p)), None)) for name, module in known.items())
    return [(module, ranks[pattern]) for module, pattern in matches if pattern is not None]


def _param(value: jax.Array, axes: Axes) -> nnx.Param:
    return nnx.Param(store_new(value, axes), axes=axes)


def _column_norms(base: Linear | Embedding) -> Float[Array, "*layers outputs"]:
    """Of a weight, one layer after the other."""

    def one(w: jax.Array | QTensor) -> jax.Array:
        w = fetch_from_host(w)
        w = w.dequantize(jnp.float32) if isinstance(w, QTensor) else w.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(w), axis=-2))

    w = base.weight.get_value()
    return jax.lax.map(one, w) if w.ndim > 2 else one(w)
