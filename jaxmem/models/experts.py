"""Mixtures of experts: a router sends each token to the MLPs of `top_k` of `count` experts (Shazeer et al.,
arXiv:1701.06538), so a token uses top_k / count of the parameters.

The router is computed in float32; the probabilities of the chosen experts weight their results. No token is dropped
unless `capacity_factor` is set. Two losses can be added: the load-balance loss (Fedus et al., arXiv:2101.03961), count
times the sum over experts of (choices per token) x (mean probability), as in transformers: top_k if both are uniform;
and the z-loss (Zoph et al., arXiv:2202.08906), the square of the log of the softmax normalizer. A shared expert (Dai et
al., arXiv:2401.06066) is an MLP that computes every token; as in Qwen2-MoE, a sigmoid weights its result.

The tokens are sorted by expert (`kernels.grouped_matmul`). With `memory.experts: triton` a matmul computes all tokens
at once, and dequantizes frozen quantized weights in registers; recompute policies treat its results as those of a dense
MLP. With `blockwise` the tokens of each expert are computed in blocks: no result of a matmul exists for all choices of
tokens, and a frozen quantized weight is dequantized for one expert at a time. The backward pass recomputes each block,
whatever the recompute policy saves.

Each device computes the experts that it stores. Along the mesh axis `expert`, the tokens of the other devices are
all-gathered first, and the results are reduce-scattered. An all-to-all would send each token to at most top_k devices
instead of to all others. Along `tensor`, the hidden units of each expert are sharded.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.config import networks
from jaxmem.config.recompute import MATMUL
from jaxmem.errors import UserError
from jaxmem.kernels.grouped_matmul import Groups, map_groups, sort_rows
from jaxmem.models.block import GATES, GatedMlp
from jaxmem.models.layers import Features, Keys, axes_of, fetch, new_constant, new_weight
from jaxmem.models.linear import Linear
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, Layout, constrain, current, gather_quantized, map_devices, mean_over_groups
from jaxmem.sharding.weights import StoredWeight

Tree = Any
Activate = Callable[[jax.Array, jax.Array], jax.Array]  # of gate and up
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
        self.lora, self.dequant_matmul = nnx.data(None), None

    def frozen(self, dtype: DTypeLike) -> Tree:
        """The weight, if it has no gradient; quantized weights are not dequantized."""
        value = self.weight.get_value()
        if isinstance(value, StoredWeight) and value.at is None:
            value = value.stored
        elif not isinstance(value, QTensor):
            return {}
        if not isinstance(value, QTensor):
            return {"weight": fetch(self.weight, dtype)}
        return {"weight": gather_quantized(value, axes_of(self.weight, 3))}

    def trainable(self, dtype: DTypeLike) -> Tree:
        """The weight, if it has a gradient, the bias, and the weights of the adapter: A [experts, inputs, rank], B,
        scaled, and its bias, added to the other. An A that all experts share is repeated."""
        own = {} if self.frozen(dtype) else {"weight": fetch(self.weight, dtype)}
        own |= {} if self.bias is None else {"bias": fetch(self.bias, dtype)}
        if self.lora is None:
            return own
        scale, count = self.lora.scale_in(dtype), self.weight.get_value().shape[0]
        factors = {"a": 1, "b": scale, "bias": scale}
        params = {name: getattr(self.lora, name) for name in factors}
        for name, param in params.items():
            if param is not None:
                array = fetch(param, dtype) * factors[name]
                is_shared = "expert" not in param.get_metadata()["axes"]
                array = jnp.broadcast_to(array, (count, *array.shape)) if is_shared else array
                own[name] = own[name] + array if name in own else array
        return own

    @property
    def axes(self) -> dict[str, Axes]:
        """The logical axes of the arrays of `frozen` and `trainable`."""
        expert, first, last = axes_of(self.weight, 3)
        low_rank: dict[str, Axes] = {"a": (expert, first, None), "b": (expert, None, last), "bias": (expert, last)}
        return {"weight": (expert, first, last), **low_rank}


class Experts(nnx.Module):
    """Gated experts (Shazeer, arXiv:2002.05202) with a router, and an optional shared expert."""

    hidden = None  # chunks of tokens would read the weights of all experts several times

    def __init__(self, rngs: nnx.Rngs, model: networks.Decoder, implementation: str = "blockwise"):
        assert model.experts is not None
        cfg, embed, bias = model.experts, model.embed, model.mlp_bias
        self.cfg, self.activation, self.implementation = cfg, model.activation, implementation
        self.router = Router(rngs, embed, cfg.count, bias=bias)
        into, back = (cfg.count, embed, model.mlp), (cfg.count, model.mlp, embed)
        self.gate = ExpertLinear(rngs, into, ("embed", "mlp"), bias=bias)
        self.up = ExpertLinear(rngs, into, ("embed", "mlp"), bias=bias)
        self.down = ExpertLinear(rngs, back, ("mlp", "embed"), bias=bias)
        if cfg.shared is not None:
            self.shared = GatedMlp(rngs, embed, cfg.shared, activation=model.activation)
            self.shared_gate = Router(rngs, embed, 1)

    def __call__(self, x: Features, keys: Keys | None = None) -> tuple[Features, Float[Array, "batch time statistics"]]:
        """Also returns the statistics of the router for each token (STATISTICS)."""
        choices, shares, statistics = self._route(x)
        modules = {"gate": self.gate, "up": self.up, "down": self.down}
        trainable = {name: module.trainable(x.dtype) for name, module in modules.items()}
        frozen = {name: module.frozen(x.dtype) for name, module in modules.items()}
        layout = current()
        arrays = trainable, frozen, x, choices, shares
        mixture = _Mixture(self.cfg, self.activation, self.implementation)
        # Kernels need `jax.shard_map`, from which they know the device to compile for.
        if layout is None or (layout.mesh.size == 1 and self.implementation == "blockwise"):
            y = mixture(*arrays)
        else:
            axes = {name: module.axes for name, module in modules.items()}
            y = mixture.over(layout).sharded(layout, axes, *arrays)
        y = checkpoint_name(y, MATMUL)
        if self.cfg.shared is not None:
            y = y + jax.nn.sigmoid(self.shared_gate(x)).astype(x.dtype) * self.shared(x, keys)
        return y, constrain(statistics, "batch", "stream", None)

    def _route(self, x: Features) -> tuple[Choices, Shares, jax.Array]:
        cfg, logits = self.cfg, self.router(x)
        probabilities = jax.nn.softmax(logits, axis=-1)
        shares, choices = jax.lax.top_k(probabilities, cfg.top_k)
        if cfg.renormalize:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        loads = jnp.mean(jnp.sum(jax.nn.one_hot(choices, cfg.count), axis=-2), axis=(0, 1))  # choices per token
        loads = jax.lax.stop_gradient(mean_over_groups(loads))
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        entropy = normalizer - jnp.sum(probabilities * logits, axis=-1)
        loss = cfg.balance_loss * cfg.count * (probabilities @ loads) + cfg.z_loss * normalizer**2
        largest = jnp.broadcast_to(jnp.max(loads) * (cfg.count / cfg.top_k), loss.shape)
        statistics = jnp.stack([loss, largest, jax.lax.stop_gradient(entropy)], axis=-1)
        return choices, shares, statistics


@dataclasses.dataclass(frozen=True)
class _Mixture:
    """The weighted sum of the results of the experts of each token, on one device."""

    cfg: networks.Experts
    activation: str
    implementation: str
    experts: int = 1  # number of devices along `expert`
    gathers: bool = False  # whether the devices along `expert` have different tokens
    tensor: tuple[str, ...] = ()  # mesh axes that shard hidden units
    parts: int = 1  # number of devices along the axes `tensor`
    scatters: bool = False  # whether the devices along `tensor` store different tokens of the result

    def over(self, layout: Layout) -> "_Mixture":
        tensor, stream = layout.over("compute", "mlp"), layout.over("activations", "stream")
        return dataclasses.replace(
            self,
            experts=layout.parts("compute", "expert"),
            gathers="expert" in layout.over("activations", "batch"),
            tensor=tensor,
            parts=layout.size(tensor),
            scatters=bool(tensor) and set(tensor) <= set(stream),
        )

    def __call__(self, trainable: Tree, frozen: Tree, x: jax.Array, choices: jax.Array, shares: jax.Array) -> jax.Array:
        if self.gathers:
            x, choices, shares = jax.lax.all_gather((x, choices, shares), "expert", axis=0, tiled=True)
        count, top_k = self.cfg.count // self.experts, self.cfg.top_k
        if self.experts > 1:
            choices = choices - jax.lax.axis_index("expert").astype(choices.dtype) * count
        factor = self.cfg.capacity_factor
        capacity = None if factor is None else math.ceil(factor * choices.size / self.cfg.count)
        groups = sort_rows(choices.reshape(-1, top_k), count, capacity)
        inputs = x.reshape(-1, x.shape[-1]), shares.reshape(-1)[groups.order], groups
        activate = GATES[self.activation]
        if self.implementation == "blockwise":
            mlp = partial(_gated_mlp, activate, self.parts)
            y = map_groups(mlp, trainable, frozen, *inputs, counts_blocks=self.experts > 1).astype(x.dtype)
        else:
            own = {name: trainable[name] | frozen[name] for name in trainable}
            y = _fused(activate, self.parts, own, *inputs)
        y = y.reshape(x.shape)
        if self.scatters:
            y = jax.lax.psum_scatter(y, self.tensor, scatter_dimension=1, tiled=True)
        elif self.tensor:
            y = jax.lax.psum(y, self.tensor)
        if self.gathers:
            return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, "expert") if self.experts > 1 else y

    def sharded(self, layout: Layout, axes: Tree, trainable: Tree, frozen: Tree, *tokens: jax.Array) -> jax.Array:
        """The weighted sum for arrays that are sharded over a mesh."""

        def local(axes: Axes, w: jax.Array | QTensor) -> jax.Array | QTensor:
            """The weight, with the static size of the shard of a device."""
            parts = layout.parts("compute", axes[1])
            if not isinstance(w, QTensor):
                return w
            if (aligned := w.with_aligned_blocks(parts)) is None:
                raise UserError(
                    f"mesh.tensor={parts} would split the {w.size} quantized hidden units of an expert within a byte; "
                    "use a smaller mesh.tensor"
                )
            return dataclasses.replace(aligned, size=w.size // parts)

        def specs(tree: Tree) -> Tree:
            return {
                name: {
                    key: jax.tree.map(lambda _, own=axes[name][key]: layout.spec("compute", own), w)
                    for key, w in own.items()
                }
                for name, own in tree.items()
            }

        frozen = {name: {key: local(axes[name][key], w) for key, w in own.items()} for name, own in frozen.items()}
        into = layout.spec("activations", ("batch", "mlp_time", None))
        out = layout.spec("activations", ("batch", "stream" if self.scatters else "mlp_time", None))
        in_specs = specs(trainable), specs(frozen), *[into] * len(tokens)
        run = map_devices(self, in_specs, out)
        return run(trainable, frozen, *tokens)


def _fused(
    activate: Activate, parts: int, own: Tree, x: jax.Array, shares: jax.Array, groups: Groups
) -> Float[Array, "tokens embed"]:
    """The weighted sums over the experts of each token. Hidden units instead of results are weighted, so that the
    backward pass does not need the results."""
    from jaxmem.kernels.grouped_matmul.triton import grouped_matmul, sum_of_groups

    def linear(own: Tree, x: jax.Array, shares: jax.Array | None = None) -> jax.Array:
        gathers, bias = shares is None, own.get("bias")
        bias = bias if bias is None or gathers else bias / parts
        y = grouped_matmul(x, matrices(own["weight"]), bias, shares, groups, gathers)
        if "a" in own:
            low = grouped_matmul(x, own["a"], None, None, groups, gathers)
            y = y + grouped_matmul(low, own["b"], None, None, groups, False)
        return checkpoint_name(y, MATMUL)

    try:
        gate, up = checkpoint_name(linear(own["gate"], x), "mlp_gate"), checkpoint_name(linear(own["up"], x), "mlp_up")
        shares = shares.astype(x.dtype)
        hidden = checkpoint_name(activate(gate, up) * shares[:, None], "mlp_hidden")
        return sum_of_groups(linear(own["down"], hidden, shares), groups, x.shape[0])
    except ValueError as error:
        raise UserError(f"memory.experts=triton: {error}; use memory.experts=blockwise") from error


def matrices(w: jax.Array | QTensor) -> Any:
    """The weight as the kernel reads it."""
    from jaxmem.kernels.grouped_matmul.triton import QuantizedMatrices
    from jaxmem.kernels.quantized_matmul import FORMS, MatmulCall, QuantizedScales

    if not isinstance(w, QTensor):
        return w
    double_quant = isinstance(w.scale, QTensor)
    scale = QuantizedScales(w.scale.codes, w.scale.scale, w.scale.offset) if double_quant else w.scale
    return QuantizedMatrices(w.codes, scale, MatmulCall(FORMS[w.format], w.block_size, *w.shape[-2:]))


def _gated_mlp(
    activate: Activate,
    parts: int,
    trainable: Tree,
    frozen: Tree,
    x: jax.Array,
    shares: jax.Array,
) -> Float[Array, "rows embed"]:
    """The MLP of one expert, or of one of `parts` shards of its hidden units."""
    own = {name: trainable[name] | frozen[name] for name in trainable}
    hidden = activate(_linear(own["gate"], x), _linear(own["up"], x))
    return _linear(own["down"], hidden, parts).astype(jnp.float32) * shares[:, None]


def _linear(own: Tree, x: jax.Array, parts: int = 1) -> jax.Array:
    w = own["weight"]
    y = x @ (w.dequantize(x.dtype) if isinstance(w, QTensor) else w)
    if "a" in own:
        y = y + x @ own["a"] @ own["b"]
    return y + own["bias"] / parts if "bias" in own else y
