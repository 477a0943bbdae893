"""Mixtures of experts: a router sends each token to the MLPs of `top_k` of `count` experts (Shazeer et al.,
arXiv:1701.06538), so a token uses top_k / count of the parameters.

The router is computed in float32; the probabilities of the chosen experts weight their results. No token is dropped.
Two losses can be added: the load-balance loss of each layer (Fedus et al., arXiv:2101.03961), count times the sum over
experts of (choices per token) x (mean probability), which is top_k if both are uniform; and the z-loss (Zoph et al.,
arXiv:2202.08906), the square of the log of the softmax normalizer. Choices are counted for all tokens of
documents, without padding; both losses are means over the tokens that have a target. A shared expert (Dai et al.,
arXiv:2401.06066) is an MLP that computes every token; as in Qwen2-MoE, a sigmoid weights its result.

`mixture` computes the experts, and `dispatch` sends tokens to the devices that store their experts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.config import networks
from jaxmem.config.recompute import MATMUL
from jaxmem.models.block import GatedMlp
from jaxmem.models.layers import Features, Keys, axes_of, fetch, new_constant, new_weight
from jaxmem.models.linear import Linear
from jaxmem.models.mixture import Mixture
from jaxmem.quant import QTensor
from jaxmem.sharding.arrays import constrain, mean_over_groups
from jaxmem.sharding.gathering import gather_quantized
from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes
from jaxmem.sharding.weights import frozen_of
from jaxmem.stack.remat import saved_as
from jaxmem.typing import Tree

Choices = Int[Array, "batch time top_k"]  # the experts of each token
Shares = Float[Array, "batch time top_k"]  # the weights of the results of these experts


class Router(nnx.Module):
    """A linear layer whose weight is never quantized."""

    def __init__(self, rngs: nnx.Rngs, embed: int, count: int, *, bias: bool = False):
        self.weight = new_weight(rngs, (embed, count), ("embed", "router"))
        self.bias = new_constant(0.0, (count,), ("router",)) if bias else None

    def __call__(self, x: Features) -> Float[Array, "batch time experts"]:
        # GPUs would round float32 inputs to TF32.
        y = jnp.matmul(x.astype(jnp.float32), fetch(self.weight, jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return y if self.bias is None else y + fetch(self.bias, jnp.float32)


class ExpertLinear(Linear):
    """A matrix for each expert, [experts, inputs, outputs], with an optional adapter for each expert. `Experts` reads
    the arrays itself, since it multiplies with the matrix of one expert at a time."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int, int], axes: tuple[str, str], *, bias: bool = False):
        self.weight = new_weight(rngs, shape, ("expert", *axes), scale=shape[1] ** -0.5)
        self.bias = new_constant(0.0, (shape[0], shape[2]), ("expert", axes[1])) if bias else None
        self.lora = nnx.data(None)

    def frozen(self, dtype: DTypeLike) -> Tree:
        """The weight, if it has no gradient; quantized weights are not dequantized."""
        weight = self.weight.get_value()
        value = weight if isinstance(weight, QTensor) else frozen_of(weight)
        if isinstance(value, QTensor):
            return {"weight": gather_quantized(value, axes_of(self.weight, 3))}
        return {} if value is None else {"weight": fetch(self.weight, dtype)}

    def trainable(self, dtype: DTypeLike) -> Tree:
        """The weight, if it has a gradient; the bias, including that of the adapter, in float32; and the weights of the
        adapter, A [experts, inputs, rank] and the scaled B. An A that all experts share is repeated."""
        arrays = {} if self.frozen(dtype) else {"weight": fetch(self.weight, dtype)}
        arrays |= {} if self.bias is None else {"bias": fetch(self.bias, jnp.float32)}
        if self.lora is None:
            return arrays
        count = self.weight.get_value().shape[0]
        for name in ("a", "b", "bias"):
            param = getattr(self.lora, name)
            if param is None:
                continue
            array = fetch(param, jnp.float32 if name == "bias" else dtype)
            if name != "a":
                array = array * self.lora.scale_in(array.dtype)
            if "expert" not in param.get_metadata()["axes"]:
                array = jnp.broadcast_to(array, (count, *array.shape))
            arrays[name] = arrays[name] + array if name in arrays else array
        return arrays

    @property
    def axes(self) -> dict[str, Axes]:
        """The logical axes of the arrays of `frozen` and `trainable`."""
        expert, first, last = axes_of(self.weight, 3)
        return {
            "weight": (expert, first, last),
            "a": (expert, first, None),
            "b": (expert, None, last),
            "bias": (expert, last),
        }


class Experts(nnx.Module):
    """Gated experts (Shazeer, arXiv:2002.05202) with a router, and an optional shared expert."""

    hidden = None  # chunks of tokens would read the weights of all experts several times

    def __init__(self, rngs: nnx.Rngs, model: networks.Decoder, implementation: str = "blockwise"):
        assert model.experts is not None
        cfg = model.experts
        embed = model.embed
        bias = model.mlp_bias
        self.cfg = cfg
        self.activation = model.activation
        self.implementation = implementation
        self.router = Router(rngs, embed, cfg.count, bias=bias)
        into = (cfg.count, embed, model.mlp)
        back = (cfg.count, model.mlp, embed)
        self.gate = ExpertLinear(rngs, into, ("embed", "mlp"), bias=bias)
        self.up = ExpertLinear(rngs, into, ("embed", "mlp"), bias=bias)
        self.down = ExpertLinear(rngs, back, ("mlp", "embed"), bias=bias)
        if cfg.shared is not None:
            self.shared = GatedMlp(rngs, embed, cfg.shared, activation=model.activation)
            self.shared_gate = Router(rngs, embed, 1) if cfg.shared_gate else None

    def __call__(
        self, x: Features, keys: Keys | None = None, segment_ids: Int[Array, "batch time"] | None = None
    ) -> tuple[Features, Float[Array, "batch time statistics"]]:
        """Also returns the statistics of the router for each token (STATISTICS). The loads of experts do not count
        padding, which has the segment 0."""
        choices, shares, statistics = self._route(x, segment_ids)
        modules = {"gate": self.gate, "up": self.up, "down": self.down}
        trainable = {name: module.trainable(x.dtype) for name, module in modules.items()}
        frozen = {name: module.frozen(x.dtype) for name, module in modules.items()}
        layout = current()
        arrays = trainable, frozen, x, choices, shares
        scalings = tuple(module.scaling for module in modules.values())
        mixture = Mixture(self.cfg, self.activation, self.implementation, scalings=scalings)
        # Kernels need `jax.shard_map`, from which they know the device to compile for.
        if layout is None or (layout.mesh.size == 1 and self.implementation == "blockwise"):
            run: Callable[..., jax.Array] = mixture
        else:
            axes = {name: module.axes for name, module in modules.items()}
            run = partial(mixture.over(layout).sharded, layout, axes)
        y = saved_as(run(*arrays), MATMUL)
        if self.cfg.shared is not None:
            shared = self.shared(x, keys)
            if self.shared_gate is not None:
                shared = jax.nn.sigmoid(self.shared_gate(x)).astype(x.dtype) * shared
            y = y + shared
        return y, constrain(statistics, "batch", "stream", None)

    def _route(self, x: Features, segment_ids: jax.Array | None) -> tuple[Choices, Shares, jax.Array]:
        cfg = self.cfg
        logits = self.router(x)
        probabilities = jax.nn.softmax(logits, axis=-1)
        shares, choices = jax.lax.top_k(_of_top_groups(cfg, probabilities), cfg.top_k)
        if cfg.renormalize:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        shares = shares * cfg.scale if cfg.scale != 1 else shares
        is_token = jnp.float32(1) if segment_ids is None else (segment_ids > 0).astype(jnp.float32)
        is_token = jnp.broadcast_to(is_token, x.shape[:-1])
        loads = jnp.einsum("btke,bt->e", jax.nn.one_hot(choices, cfg.count), is_token)
        tokens = jnp.maximum(mean_over_groups(jnp.sum(is_token)), jnp.finfo(jnp.float32).tiny)
        loads = jax.lax.stop_gradient(mean_over_groups(loads) / tokens)  # choices per token
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        entropy = normalizer - jnp.sum(probabilities * logits, axis=-1)
        loss = cfg.balance_loss * cfg.count * (probabilities @ loads) + cfg.z_loss * normalizer**2
        largest = jnp.broadcast_to(jnp.max(loads) * (cfg.count / cfg.top_k), loss.shape)
        statistics = jnp.stack([loss, largest, jax.lax.stop_gradient(entropy)], axis=-1)
        return choices, shares, statistics


def _of_top_groups(cfg: networks.Experts, x: Float[Array, "batch time experts"]) -> Float[Array, "batch time experts"]:
    """The probabilities, with zeros outside of the `top_groups` groups whose best expert is the most probable."""
    if cfg.top_groups == cfg.groups:
        return x
    grouped = x.reshape(*x.shape[:-1], cfg.groups, -1)
    chosen = jax.lax.top_k(jnp.max(grouped, axis=-1), cfg.top_groups)[1]
    is_chosen = jnp.any(jax.nn.one_hot(chosen, cfg.groups, dtype=bool), axis=-2)
    return jnp.where(is_chosen[..., None], grouped, jnp.zeros_like(grouped)).reshape(x.shape)
