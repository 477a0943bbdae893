"""Low-rank adapters: y = x W + s (x A) B, of which only A and B learn (Hu et al., arXiv:2106.09685).

W of [in, out] numbers stays; A is [in, r], random, B is [r, out], zeros, so that nothing changes at first. s is
alpha / r, or alpha / sqrt(r), with which larger ranks keep learning (rsLoRA: Kalajdzievski, arXiv:2312.03732). What
learns, and so what has a gradient and a state, is r (in + out) numbers in place of in x out; W + s A B is never made.
A step loses the product that would make W's gradient, a third of a layer's arithmetic, and gains 6 r (in + out) FLOPs
a token.

W may rest in codes (QLoRA: Dettmers et al., arXiv:2305.14314): it is decoded where it is used, one layer at a time,
forward and again backward.

DoRA (Liu et al., arXiv:2402.09353) learns the length of each column of W + s A B apart from its direction:
y = m / |W + s A B| (x W + s (x A) B). The lengths count as constants in gradients (section 4.3); they are found from
|W|^2 + 2 s W^T A B + s^2 |A B|^2, without the sum: one more read of each W, and r more products with it.

On a mesh A and B rest split over all that splits weights: `in` of A and `out` of B as W's, and over what else there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.errors import UserError, nearest
from jaxmem.models import parts
from jaxmem.models.parts import Embedding, Keys, Linear, fetch, product
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, Axis
from jaxmem.sharding.host import fetch_from_host
from jaxmem.sharding.storage import store_new

LEARNS = ("*.lora.*",)


class Lora(nnx.Module):
    def __init__(
        self,
        rngs: nnx.Rngs,
        base: Linear | Embedding,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        *,
        magnitude: bool = False,
        order: Sequence[int] | None = None,
    ):
        """`order`: which layer stands at each place of a stack; by default its own."""
        *layers, inputs, outputs = base.weight.get_value().shape
        axes: Axes = base.weight.get_metadata()["axes"]
        stacked, (first, last) = axes[: len(layers)], axes[len(layers) :]
        if isinstance(base, Embedding):  # looked up, so that A is what is zero
            a = jnp.zeros((*layers, inputs, rank))
            b = jax.random.normal(rngs.params(), (*layers, rank, outputs))
        else:
            bound = 1 / math.sqrt(inputs)
            a = jax.random.uniform(rngs.params(), (*layers, inputs, rank), minval=-bound, maxval=bound)
            b = jnp.zeros((*layers, rank, outputs))
        if layers and order is not None:
            a, b = a[np.asarray(order)], b[np.asarray(order)]
        self.a = _weight(a, (*stacked, _also(first), "rank"))
        self.b = _weight(b, (*stacked, "rank", _also(last)))
        self.magnitude = _weight(_lengths(base), (*stacked, _also(last))) if magnitude else None
        self.scale, self.dropout = scale, dropout

    def __call__(
        self,
        x: Float[Array, "*batch inputs"],
        y: Float[Array, "*batch outputs"],
        w: Callable[[], Float[Array, "inputs outputs"]],
        keys: Keys | None,
    ) -> Float[Array, "*batch outputs"]:
        """What the layer gives, of what its own weight `w` gave, which DoRA looks at too."""
        a, b = fetch(self.a, x.dtype), fetch(self.b, x.dtype)
        y = y + product(self.scale * product(parts.dropout(x, self.dropout, keys), a), b)
        if self.magnitude is None:
            return y
        learned = fetch(self.magnitude, jnp.float32) / jax.lax.stop_gradient(self._length(w(), a, b))
        return (y * learned).astype(x.dtype)

    def rows(self, ids: Int[Array, "batch time"], dtype: DTypeLike) -> Float[Array, "batch time embed"]:
        """What it adds to the rows of an embedding."""
        return product(self.scale * parts.rows(self.a, ids, dtype), fetch(self.b, dtype))

    def _length(self, w: jax.Array, a: jax.Array, b: jax.Array) -> Float[Array, "outputs"]:
        w, a, b = (jax.lax.stop_gradient(x) for x in (w, a, b))
        add = jnp.einsum("ro,ro->o", (w.T @ a).T, b, preferred_element_type=jnp.float32)
        square = jnp.einsum("ro,ro->o", (a.T @ a) @ b, b, preferred_element_type=jnp.float32)
        squares = jnp.sum(jnp.square(w.astype(jnp.float32)), axis=0) + 2 * self.scale * add + self.scale**2 * square
        return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


def lora(
    model: nnx.Module,
    *,
    rank: int = 16,
    alpha: float = 16.0,
    targets: Sequence[str] | Mapping[str, int] = ("blocks.*",),
    stabilized: bool = False,
    dropout: float = 0.0,
    magnitude: bool = False,
    key: jax.Array | None = None,
    order: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """Puts adapters into the linear layers and embeddings of a model whose names match. `magnitude`: DoRA. `order`:
    which layer stands at each place of a stack. What learns is given back, as patterns."""
    ranks = dict(targets) if isinstance(targets, Mapping) else dict.fromkeys(targets, rank)
    rngs = nnx.Rngs(params=jax.random.key(0) if key is None else key)
    for module, own in _targets(model, ranks):
        scale = alpha / (math.sqrt(own) if stabilized else own)
        dora = magnitude and isinstance(module, Linear)
        module.lora = Lora(rngs, module, own, scale, dropout, magnitude=dora, order=order)
    return LEARNS


def merged(w: Float[Array, "inputs outputs"], own: Mapping[str, jax.Array], scale: float) -> jax.Array:
    """The weight that a layer's own and its adapter (`a`, `b`, with DoRA `magnitude`) stand for, in float32."""
    f32 = {name: x.astype(jnp.float32) for name, x in own.items()}
    summed = w.astype(jnp.float32) + scale * f32["a"] @ f32["b"]
    if "magnitude" not in f32:
        return summed
    return summed * (f32["magnitude"] / jnp.linalg.norm(summed, axis=0))


def merge(model: nnx.Module) -> None:
    """Puts low-rank adapters into the weights that they stand beside, in what these rest in, one layer after the other,
    and takes them away. Into codes the sum is rounded anew."""
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, Linear | Embedding) and module.lora is not None:
            own = {name: x for name, x in nnx.to_pure_dict(nnx.state(module.lora)).items() if x is not None}
            module.weight.set_value(_summed(module.weight.get_value(), own, module.lora.scale))
            module.lora = None
    if getattr(model, "prompt", None) is not None:
        raise UserError("merge: a prompt stands before what is read, and has no weight to go into")


def _summed(w: jax.Array | QTensor, own: Mapping[str, jax.Array], scale: float) -> jax.Array | QTensor:
    def one(given: tuple[jax.Array | QTensor, Mapping[str, jax.Array]]) -> jax.Array | QTensor:
        w, own = fetch_from_host(given)
        if isinstance(w, QTensor):
            return w.requantize(merged(w.dequantize(jnp.float32), own, scale))
        return merged(w, own, scale).astype(w.dtype)

    return jax.lax.map(one, (w, own)) if w.ndim > 2 else one((w, own))


def _targets(model: nnx.Module, ranks: Mapping[str, int]) -> list[tuple[Linear | Embedding, int]]:
    """In an order that only the names decide, and with each the rank that it has."""
    found = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    known = {name: module for name, module in sorted(found.items()) if isinstance(module, Linear | Embedding)}
    if idle := [pattern for pattern in ranks if not any(fnmatchcase(name, pattern) for name in known)]:
        raise UserError(
            f"adapter.targets: no layer is called {idle[0]!r}{nearest(idle[0], known)}; there are {', '.join(known)}"
        )
    chosen = []
    for name, module in known.items():
        pattern = next((pattern for pattern in ranks if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            chosen.append((module, ranks[pattern]))
    return chosen


def _weight(value: jax.Array, axes: Axes) -> nnx.Param:
    return nnx.Param(store_new(value, axes), axes=axes)


def _also(axis: str | None) -> Axis | None:
    return axis and Axis(axis, like_storage=True)


def _lengths(base: Linear | Embedding) -> Float[Array, "*layers outputs"]:
    """Of a weight's columns, one layer after the other."""

    def one(w: jax.Array | QTensor) -> jax.Array:
        w = fetch_from_host(w)
        w = w.dequantize(jnp.float32) if isinstance(w, QTensor) else w.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(w), axis=-2))

    w = base.weight.get_value()
    return jax.lax.map(one, w) if w.ndim > 2 else one(w)
