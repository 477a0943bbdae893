"""LoRA and DoRA: y = x W + s (x A) B with trainable A and B (Hu et al., arXiv:2106.09685).

W [in, out] is frozen; A [in, r] is random, and B [r, out] is zero, so that the outputs do not change at first. s is
alpha / r, or alpha / sqrt(r), with which higher ranks keep learning (rsLoRA: Kalajdzievski, arXiv:2312.03732).
Gradients and optimizer state exist for r (in + out) weights instead of in x out; W + s A B is never computed. A step
does not compute the gradient of W, a third of the FLOPs of a layer, and needs 6 r (in + out) additional FLOPs per
token.

W may be quantized (QLoRA: Dettmers et al., arXiv:2305.14314): it is dequantized for each use in both passes.

DoRA (Liu et al., arXiv:2402.09353) trains the norm of each column of W + s A B apart from its direction: y = m / |W +
s A B| (x W + s (x A) B). Gradients do not pass through the norms (section 4.3). The norms are computed from |W|^2 + 2
s W^T A B + s^2 |A B|^2, without W + s A B: one more read of each W, and matmuls with r more columns.

Layers of a stack with different ranks share arrays of the largest rank, padded with zeros. A column of A and a row of B
that are both zero have no gradient, so they stay zero. A layer without an adapter has only zeros. If the scales of
layers differ, `layer_scale` has one for each layer; it is not trained.

On a mesh, `in` of A and `out` of B are sharded over the axes that shard the same dimension of W. If divisible, they are
also sharded over the other axes that shard stored weights (fsdp, expert, context).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.adapters import flax_layers
from jaxmem.adapters.trained_parts import prompt
from jaxmem.config.adapter import LORA_WEIGHTS, Adapter, LowRank, is_match, low_rank_layers
from jaxmem.config.hf_modules import ALL_MODULES
from jaxmem.config.names import count_layers, is_last_stack, split_stack
from jaxmem.errors import UserError, nearest
from jaxmem.models.decoder import Decoder
from jaxmem.models.embedding import Embedding, lookup_param
from jaxmem.models.experts import ExpertLinear
from jaxmem.models.layers import Keys, add_bias, dropout, fetch
from jaxmem.models.linear import Linear, matmul
from jaxmem.models.network import Network
from jaxmem.quant import QTensor, values_of
from jaxmem.sharding.host import fetch_from_host
from jaxmem.sharding.table import Axes, Axis
from jaxmem.sharding.weights import store_new


class Lora(nnx.Module):
    """The adapter of one linear layer or embedding, or of a stack of them."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        base: Linear | Embedding,
        layers: Sequence[LowRank | None],
        cfg: Adapter,
        order: Sequence[int] | None = None,
    ):
        """`layers`: the adapter of each layer of a stack, or of a single layer. `order`: the number of the layer at
        each position of a stack, where numbers beyond `layers` are identity layers; None: layers are in order."""
        *stack, inputs, outputs = base.weight.get_value().shape  # layers, and experts
        axes: Axes = base.weight.get_metadata()["axes"]
        stacked = axes[: len(stack)]
        first, last = axes[len(stack) :]
        is_shared = cfg.shared_a and "expert" in stacked  # all experts of a layer share A
        stack_of_a, stacked_of_a = (stack[:-1], stacked[:-1]) if is_shared else (stack, stacked)
        rank = max(layer.rank for layer in layers if layer is not None)
        is_embedding = isinstance(base, Embedding) or getattr(base, "is_embedding", False)
        if is_embedding:  # rows of A are looked up, so A instead of B is zero
            a = jnp.zeros((*stack, inputs, rank))
            b = jax.random.normal(rngs.params(), (*stack, rank, outputs))
        else:
            bound = 1 / math.sqrt(inputs)
            a = jax.random.uniform(rngs.params(), (*stack_of_a, inputs, rank), minval=-bound, maxval=bound)
            b = jnp.zeros((*stack, rank, outputs))
        if stack and order is not None:
            a = a[np.asarray(order)]
            b = b[np.asarray(order)]
        scale = 1.0
        layer_scale = None
        if layers[0] is not None and len(set(layers)) == 1:
            scale = layers[0].scale
        else:
            numbers = range(stack[0]) if order is None else order
            by_position = [layers[i] if i < len(layers) else None for i in numbers]
            ranks = np.array([layer.rank if layer else 0 for layer in by_position])
            has_rank = np.arange(rank) < ranks.reshape(-1, *[1] * (a.ndim - 1))
            a = jnp.where(has_rank, a, jnp.zeros((), a.dtype))
            scales = jnp.array([layer.scale if layer else 0.0 for layer in by_position], jnp.float32)
            layer_scale = nnx.Param(scales, axes=stacked[:1])
        self.scale = scale
        self.layer_scale = layer_scale
        self.dropout = cfg.dropout
        inputs_axis, outputs_axis = (
            axis and replace(axis if isinstance(axis, Axis) else Axis(axis), like_storage=True)
            for axis in (first, last)
        )
        self.a = _param(a, (*stacked_of_a, inputs_axis, "rank"))
        self.b = _param(b, (*stacked, "rank", outputs_axis))
        self.magnitude = _param(_column_norms(base), (*stacked, outputs_axis)) if cfg.kind == "dora" else None
        has_bias = cfg.lora_bias and isinstance(base, Linear)
        self.bias = _param(jnp.zeros((*stack, outputs)), (*stacked, outputs_axis)) if has_bias else None

    def __call__(
        self,
        x: Float[Array, "*batch inputs"],
        y: Float[Array, "*batch outputs"],
        w: Callable[[], Float[Array, "inputs outputs"]],
        keys: Keys | None,
    ) -> Float[Array, "*batch outputs"]:
        """The output of a layer with its adapter, from the output `y` of its weight `w`. DoRA needs the norms of
        `w`."""
        a = fetch(self.a, x.dtype)
        b = fetch(self.b, x.dtype)
        scale = self.scale_in(x.dtype)
        y = y + matmul(scale * matmul(dropout(x, self.dropout, keys), a), b)
        if self.bias is not None:
            y = add_bias(y, self.scale_in(jnp.float32) * fetch(self.bias, jnp.float32))
        return y if self.magnitude is None else self._with_magnitude(y, w(), a, b)

    def rows(
        self, x: Float[Array, "batch time embed"], ids: Int[Array, "batch time"], w: Callable[[], jax.Array]
    ) -> Float[Array, "batch time embed"]:
        """The output of an embedding with its adapter, from the rows `x` of its weight `w`."""
        b = fetch(self.b, x.dtype)
        scale = self.scale_in(x.dtype)
        x = x + matmul(scale * lookup_param(self.a, ids, x.dtype), b)
        return x if self.magnitude is None else self._with_magnitude(x, w(), fetch(self.a, x.dtype), b)

    def scale_in(self, dtype: DTypeLike) -> Any:
        return self.scale if self.layer_scale is None else fetch(self.layer_scale, dtype)

    def _with_magnitude(self, y: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        assert self.magnitude is not None
        ratio = fetch(self.magnitude, jnp.float32) / jax.lax.stop_gradient(self._sum_norms(w, a, b))
        if self.layer_scale is not None:
            ratio = jnp.where(self.scale_in(jnp.float32) == 0, jnp.float32(1), ratio)  # a layer without an adapter
        return (y * ratio).astype(y.dtype)

    def _sum_norms(self, w: jax.Array, a: jax.Array, b: jax.Array) -> Float[Array, "outputs"]:
        """Norms of the columns of W + s A B."""
        w, a, b = (jax.lax.stop_gradient(x) for x in (w, a, b))
        cross = jnp.einsum("ro,ro->o", (w.T @ a).T, b, preferred_element_type=jnp.float32)
        square = jnp.einsum("ro,ro->o", (a.T @ a) @ b, b, preferred_element_type=jnp.float32)
        scale = self.scale_in(jnp.float32)
        squares = jnp.sum(jnp.square(w.astype(jnp.float32)), axis=0) + 2 * scale * cross + scale**2 * square
        return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


def lora(model: nnx.Module, *, dora: bool = False, key: jax.Array | None = None, **options: Any) -> tuple[str, ...]:
    """Adds adapters to the linear layers and embeddings of a model whose names match `targets`. `options`: keys of the
    config's section `adapter`, such as `rank`, `alpha`, `targets`. Returns the patterns of the trainable weights."""
    add_low_rank(model, Adapter(kind="dora" if dora else "lora", **options), jax.random.key(0) if key is None else key)
    return (LORA_WEIGHTS,)


def attach(model: Network, cfg: Adapter, key: jax.Array, order: Sequence[int] | None = None) -> None:
    """Adds the adapters of a config to a model, in place. `order`: the layer at each position of a stack. The kinds
    head, last_layers and patterns add no parameters: they train weights of the model."""
    if cfg.kind in ("lora", "dora", "qlora"):
        add_low_rank(model, cfg, key, order)
    if isinstance(model, Decoder) and cfg.kind == "prompt":
        prompt(model, length=cfg.virtual_tokens, key=key)


def add_low_rank(model: Any, cfg: Adapter, key: jax.Array, order: Sequence[int] | None = None) -> None:
    """Adds the low-rank adapters of a config. `order`: the layer at each position of a stack."""
    rngs = nnx.Rngs(params=key)
    targets = [*_targets(model, cfg, order is not None)]
    for name, module, _ in targets:
        _check(name, module, model, cfg)
    for name, module, layers in targets:
        if isinstance(module, flax_layers.LAYERS):
            flax_layers.add(module, Lora(rngs, flax_layers.as_matrix(module), layers, cfg))
        else:
            is_ordered = order is not None and is_last_stack(name, model.cfg.layers)
            module.lora = Lora(rngs, module, layers, cfg, order if is_ordered else None)


def _check(name: str, module: Any, model: Any, cfg: Adapter) -> None:
    """Raises if the layer would not compute its adapter, or would not equal its merged weight."""
    is_dora = cfg.kind == "dora"
    if isinstance(module, flax_layers.LAYERS) and (is_dora or cfg.dropout or cfg.lora_bias):
        raise UserError(f"{name}: adapters of Flax's layers do not support dora, dropout and lora_bias; remove it")
    if isinstance(module, ExpertLinear) and (is_dora or cfg.dropout):
        raise UserError(f"{name}: adapters of experts do not support dora and dropout; remove it")
    if isinstance(module, Embedding) and getattr(model, "head", module) is None:
        raise UserError(f"{name}: an adapter of a tied embedding is not supported; use targets such as blocks.*")
    if is_dora and cfg.lora_bias:
        raise UserError(f"{name}: dora does not support lora_bias; remove one of them")


def merged_weight(w: Float[Array, "*inputs outputs"], parts: Mapping[str, jax.Array], scale: float) -> jax.Array:
    """A weight or bias in float32 with its adapter merged into it. `parts`: `a` and `b` (DoRA: also `magnitude`), or
    `bias`, with `layer_scale` if the scales of layers differ."""
    f32 = {name: x.astype(jnp.float32) for name, x in parts.items()}
    factor = scale * f32.get("layer_scale", jnp.float32(1))
    summed = w.astype(jnp.float32) + factor * (f32["bias"] if "bias" in f32 else f32["a"] @ f32["b"])
    if "magnitude" not in f32:
        return summed
    norms = jnp.maximum(jnp.linalg.norm(summed, axis=0), jnp.finfo(jnp.float32).tiny)  # a column may be zero
    return summed * jnp.where(factor == 0, jnp.float32(1), f32["magnitude"] / norms)


def weights_to_merge(lora: Lora) -> dict[str, dict[str, jax.Array]]:
    """The arrays that `merged_weight` merges into the `weight` and the `bias` of a layer."""
    parts = {name: x for name, x in nnx.to_pure_dict(nnx.state(lora)).items() if x is not None}
    bias = parts.pop("bias", None)
    scale = {"layer_scale": parts["layer_scale"]} if "layer_scale" in parts else {}
    return {"weight": parts} if bias is None else {"weight": parts, "bias": {"bias": bias, **scale}}


def merge(model: nnx.Module) -> None:
    """Merges low-rank adapters into their weights, one layer after the other, and removes them. Quantized weights that
    have one become bfloat16."""
    modules = [module for _, module in nnx.iter_modules(model)]
    adapted = [module for module in modules if isinstance(module, Linear | Embedding) and module.lora is not None]
    if any(module.lora.bias is not None and getattr(module, "bias", None) is None for module in adapted):
        raise UserError("merge does not support adapter.lora_bias=true for layers without a bias; use export --adapter")
    if getattr(model, "prompt", None) is not None:
        raise UserError("merge does not support adapter.kind=prompt, which changes no weight; use export --adapter")
    for module in adapted:
        for name, parts in weights_to_merge(module.lora).items():
            variable = getattr(module, name)
            variable.set_value(_merged(variable.get_value(), parts, module.lora.scale))
        module.lora = None
    for layer in modules:
        if isinstance(layer, flax_layers.LAYERS):
            flax_layers.merge(layer)


def _merged(w: jax.Array | QTensor, parts: Mapping[str, jax.Array], scale: float) -> jax.Array:
    """A quantized weight becomes bfloat16: values of its format would be rounded to themselves again, since a trained
    adapter is smaller than the distance between them."""

    def merge_layer(pair: tuple[jax.Array | QTensor, Mapping[str, jax.Array]]) -> jax.Array:
        w, parts = fetch_from_host(pair)
        return merged_weight(values_of(w, jnp.float32), parts, scale).astype(w.dtype)

    is_stack = w.ndim > (1 if "bias" in parts else 2)
    return jax.lax.map(merge_layer, (w, parts)) if is_stack else merge_layer((w, parts))


def _targets(
    model: Any, cfg: Adapter, is_padded: bool
) -> Iterator[tuple[str, Linear | Embedding, tuple[LowRank | None, ...]]]:
    """The matching modules and the adapters of their layers, sorted by name, so that random keys depend on names only.
    `is_padded`: whether stacks end with identity layers."""
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    known: dict[str, Any] = {
        name: module
        for name, module in sorted(modules.items())
        if isinstance(module, Linear | Embedding) or flax_layers.can_adapt(module)
    }
    weights = {name: flax_layers.as_matrix(x) if flax_layers.can_adapt(x) else x for name, x in known.items()}
    sizes = {name: x.weight.shape[0] if len(x.weight.shape) > 2 else None for name, x in weights.items()}
    if is_padded:
        sizes = {name: size and model.cfg.layers for name, size in sizes.items()}
    total = count_layers(known)
    every = []  # (name, layers, number of layers in all) of each module
    for name, size in sizes.items():
        module_name, layers_of_stack = split_stack(name)
        every.append((module_name, layers_of_stack or range(size or 1), total if layers_of_stack else size))
    problems = [
        f"adapter.{key}: {pattern} matches no layer{_nearest_target(pattern, [name for name, _, _ in every])}"
        for key in ("targets", "alpha_pattern")
        for pattern in getattr(cfg, key) or ()
        if not any(is_match(pattern, name, i, count) for name, layers, count in every for i in layers)
    ]
    if problems:
        raise UserError("\n".join(problems))
    for name, module in known.items():
        layers = low_rank_layers(cfg, name, sizes[name], total)
        if any(layers):
            yield name, module, layers


def _nearest_target(pattern: str, names: Sequence[str]) -> str:
    """A hint for a pattern that matches no layer: the layer that PEFT calls so (q_proj), or a similar name."""
    if pattern in ("all-linear", "linear"):
        return "; use blocks.*, all linear layers of the blocks"
    peft_name = pattern.rpartition(".")[2]
    target = next((name for name in names if ALL_MODULES.get(name, "").rpartition(".")[2] == peft_name), None)
    return f"; did you mean {target}?" if target is not None else nearest(pattern, names)


def _param(value: jax.Array, axes: Axes) -> nnx.Param:
    return nnx.Param(store_new(value, axes), axes=axes)


def _column_norms(base: Linear | Embedding) -> Float[Array, "*layers outputs"]:
    """The column norms of a weight, computed one layer after the other."""

    def norms(w: jax.Array | QTensor) -> jax.Array:
        values = values_of(fetch_from_host(w), jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(values), axis=-2))

    w = base.weight.get_value()
    return jax.lax.map(norms, w) if w.ndim > 2 else norms(w)
