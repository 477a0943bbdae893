"""The weighted sum of the results of the experts of each token, on the devices that store them.

The tokens are sorted by expert (`kernels.grouped_matmul`). With `memory.experts: triton` a matmul computes all tokens
at once, and dequantizes frozen quantized weights in registers; recompute policies treat its results as those of a dense
MLP. With `blockwise` the tokens of each expert are computed in blocks: no result of a matmul exists for all choices of
tokens, and a frozen quantized weight is dequantized for one expert at a time. The backward pass recomputes each block,
whatever the recompute policy saves.

Each device computes the experts that it stores. Along the mesh axis `expert`, `dispatch` brings the tokens of other
devices. The MLPs then run in chunks of a balanced size (usually one chunk), instead of in arrays with room for all
tokens of all devices, and the backward pass recomputes them, with `triton` too. Along `tensor`, the hidden units of
each expert are sharded.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmem.config import networks
from jaxmem.config.base import Scaling
from jaxmem.config.recompute import MATMUL
from jaxmem.errors import UserError
from jaxmem.kernels.grouped_matmul import Groups, map_chunks, map_groups, sort_rows, sum_of_groups
from jaxmem.models.block import GATES
from jaxmem.models.dispatch import all_gather, all_to_all, uses_all_to_all
from jaxmem.models.layers import add_bias
from jaxmem.models.linear import matmul
from jaxmem.quant import QTensor, values_of
from jaxmem.sharding.arrays import map_devices
from jaxmem.sharding.layout import Layout
from jaxmem.sharding.table import Axes
from jaxmem.stack.remat import saved_as
from jaxmem.typing import Tree

# Along `expert`, a device computes its choices in chunks of this multiple of the mean number of choices per device.
MAX_LOAD_RATIO = 1.25


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The weighted sum of the results of the experts of each token, on one device."""

    cfg: networks.Experts
    activation: str
    implementation: str
    experts: int = 1  # number of devices along `expert`
    gathers: bool = False  # whether the devices along `expert` have different tokens
    tensor: tuple[str, ...] = ()  # mesh axes that shard hidden units
    parts: int = 1  # number of devices along the axes `tensor`
    scalings: tuple[Scaling | None, ...] = (None,) * 3  # of matmuls in FP8: of gate, up and down
    scatters: bool = False  # whether the devices along `tensor` store different tokens of the result

    def over(self, layout: Layout) -> "Mixture":
        tensor = layout.over("compute", "mlp")
        stream = layout.over("activations", "stream")
        return dataclasses.replace(
            self,
            experts=layout.shard_count("compute", "expert"),
            gathers="expert" in layout.over("activations", "batch"),
            tensor=tensor,
            parts=layout.size(tensor),
            scatters=bool(tensor) and set(tensor) <= set(stream),
        )

    def __call__(self, trainable: Tree, frozen: Tree, x: jax.Array, choices: jax.Array, shares: jax.Array) -> jax.Array:
        run = partial(self._run, trainable, frozen)
        if not self.gathers:
            y = self._sum_parts(run(x, choices, shares))
            return jax.lax.psum(y, "expert") if self.experts > 1 else y
        if uses_all_to_all(self.cfg.top_k, self.experts):
            return self._sum_parts(all_to_all(run, x, choices, shares, self.cfg.count // self.experts))
        return all_gather(lambda *tokens: self._sum_parts(run(*tokens)), x, choices, shares)

    def _run(self, trainable: Tree, frozen: Tree, x: jax.Array, choices: jax.Array, shares: jax.Array) -> jax.Array:
        """The weighted sum over the experts of this device, for its shard of their hidden units."""
        count = self.cfg.count // self.experts
        top_k = self.cfg.top_k
        if self.experts > 1:
            choices = choices - jax.lax.axis_index("expert").astype(choices.dtype) * count
        groups = sort_rows(choices.reshape(-1, top_k), count)
        rows = x.reshape(-1, x.shape[-1])
        inputs = trainable, frozen, rows, shares.reshape(-1)[groups.order], groups
        if self.implementation == "blockwise":
            y = map_groups(self._gated_mlp, *inputs, parts=self.experts).astype(x.dtype)
        elif self.experts == 1:
            y = sum_of_groups(self._fused(True, *inputs), groups, rows.shape[0])
        else:
            chunk = math.ceil(MAX_LOAD_RATIO * choices.size / self.experts)
            y = map_chunks(partial(self._fused, False), chunk, *inputs)
        return y.reshape(x.shape)

    def _gated_mlp(self, trainable: Tree, frozen: Tree, x: jax.Array, shares: jax.Array) -> Float[Array, "rows embed"]:
        """The MLP of one expert, or of a shard of its hidden units."""
        weights = {name: trainable[name] | frozen[name] for name in trainable}
        of_gate, of_up, of_down = self.scalings
        gate = _linear(weights["gate"], x, of_gate)
        up = _linear(weights["up"], x, of_up)
        hidden = GATES[self.activation](gate, up)
        return _linear(weights["down"], hidden, of_down, self.parts).astype(jnp.float32) * shares[:, None]

    def _fused(
        self, gathers: bool, trainable: Tree, frozen: Tree, x: jax.Array, shares: jax.Array, groups: Groups
    ) -> Float[Array, "sorted embed"]:
        """The weighted results of the experts for sorted rows; with `gathers`, `groups.rows` selects these rows of x.
        Hidden units instead of results are weighted, so that the backward pass does not need the results."""
        from jaxmem.kernels.grouped_matmul.triton import grouped_matmul

        weights = {name: trainable[name] | frozen[name] for name in trainable}

        def linear(arrays: Tree, x: jax.Array, gathers: bool, shares: jax.Array | None = None) -> jax.Array:
            bias = arrays.get("bias")
            bias = bias if bias is None or shares is None else bias / self.parts
            bias = None if bias is None else bias.astype(x.dtype)  # the kernel sums its gradient in float32
            y = grouped_matmul(x, matrices(arrays["weight"]), bias, shares, groups, gathers)
            if "a" in arrays:
                low = grouped_matmul(x, arrays["a"], None, None, groups, gathers)
                y = y + grouped_matmul(low, arrays["b"], None, None, groups, False)
            return saved_as(y, MATMUL)

        try:
            gate, up = (saved_as(linear(weights[name], x, gathers), f"mlp_{name}") for name in ("gate", "up"))
            shares = shares.astype(x.dtype)
            hidden = saved_as(GATES[self.activation](gate, up) * shares[:, None], "mlp_hidden")
            return linear(weights["down"], hidden, False, shares)
        except ValueError as error:
            raise UserError(f"memory.experts=triton: {error}; use memory.experts=blockwise") from error

    def _sum_parts(self, y: jax.Array) -> jax.Array:
        """The sum over the shards of the hidden units."""
        if self.scatters:
            return jax.lax.psum_scatter(y, self.tensor, scatter_dimension=1, tiled=True)
        return jax.lax.psum(y, self.tensor) if self.tensor else y

    def sharded(self, layout: Layout, axes: Tree, trainable: Tree, frozen: Tree, *tokens: jax.Array) -> jax.Array:
        """The weighted sum for arrays that are sharded over a mesh."""

        def local(axes: Axes, w: jax.Array | QTensor) -> jax.Array | QTensor:
            """The weight, with the static size of the shard of a device."""
            parts = layout.shard_count("compute", axes[1])
            if not isinstance(w, QTensor):
                return w
            if (aligned := w.with_aligned_blocks(parts)) is None:
                raise UserError(
                    f"mesh.tensor={parts} would divide the {w.size} quantized hidden units of an expert inside a byte; "
                    "use a smaller mesh.tensor"
                )
            return dataclasses.replace(aligned, size=w.size // parts)

        def spec(axes: Axes, w: jax.Array | QTensor) -> Tree:
            return jax.tree.map(lambda _: layout.spec("compute", axes), w)

        def map_weights(function: Callable[[Axes, jax.Array | QTensor], Tree], tree: Tree) -> Tree:
            return {
                name: {key: function(axes[name][key], w) for key, w in arrays.items()} for name, arrays in tree.items()
            }

        frozen = map_weights(local, frozen)
        into = layout.spec("activations", ("batch", "mlp_time", None))
        out = layout.spec("activations", ("batch", "stream" if self.scatters else "mlp_time", None))
        in_specs = map_weights(spec, trainable), map_weights(spec, frozen), *[into] * len(tokens)
        run = map_devices(self, in_specs, out)
        return run(trainable, frozen, *tokens)


def matrices(w: jax.Array | QTensor) -> Any:
    """The weight as the kernel reads it."""
    from jaxmem.kernels.codes import KERNEL_FORMATS
    from jaxmem.kernels.grouped_matmul.quantized_tiles import QuantizedMatrices, QuantizedScales

    if not isinstance(w, QTensor):
        return w
    double_quant = isinstance(w.scale, QTensor)
    scale = QuantizedScales(w.scale.codes, w.scale.scale, w.scale.offset) if double_quant else w.scale
    return QuantizedMatrices(w.codes, scale, KERNEL_FORMATS[w.format], w.block_size, *w.shape[-2:])


def _linear(arrays: Tree, x: jax.Array, scaling: Scaling | None, parts: int = 1) -> jax.Array:
    w = values_of(arrays["weight"], x.dtype)
    y = x @ w if scaling is None else matmul(x, w, scaling)
    if "a" in arrays:
        y = y + x @ arrays["a"] @ arrays["b"]
    return add_bias(y, arrays["bias"] / parts) if "bias" in arrays else y
