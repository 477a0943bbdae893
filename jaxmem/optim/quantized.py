"""State in 8 bits or 4: an elementwise optimizer whose numbers rest as codes, with a constant for each block.

8-bit Adam keeps 2.03 bytes a parameter in place of 8, with the same final loss (Dettmers et al., arXiv:2110.02861):
a code for each moment, evenly dense in every decade, and a float32 for each block of 256. In 4 bits (Li et al.,
arXiv:2309.01507) it is 1.06 bytes, with blocks of 128. A second moment is never rounded to zero, where the first may
not be zero and the update would have no bound: it becomes the least that a code can hold, and the update a small one.

Vectors, scalars and what has fewer than 4096 numbers stay in float32. An update decodes, steps and encodes part by
part, so that no more than 32 MiB of each number are ever held in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from jaxmem import kernels
from jaxmem.errors import UserError
from jaxmem.optim.adam import Adam, Moments, unbiased
from jaxmem.optim.by_layer import At, Leaf, Rule, by_layer
from jaxmem.quant import FORMATS, QTensor, even_block_size, quantize
from jaxmem.sharding import per_device
from jaxmem.sharding.leaves import Derived

LEAST = 4096  # numbers below which codes save nothing worth having
SHARDS = 8  # so many blocks, or a multiple, along a dimension where they can: meshes then cut between them
SPLIT_FINELY = ("embed", "projected", "vocab")  # over many devices, or of any size: blocks run along these last

Formats = tuple[tuple[str, str], ...]  # the rule's names for its numbers, and what they are kept in
ADAM8: Formats = (("m", "dynamic8"), ("v", "udynamic8"))
ADAM4: Formats = (("m", "dynamic4"), ("v", "udynamic4"))
MOMENTUM8: Formats = (("m", "dynamic8"),)


@dataclass(frozen=True)
class Lion:
    """The sign of an average that is one gradient ahead of the one it keeps (Chen et al., arXiv:2302.06675)."""

    beta1: float = 0.9
    beta2: float = 0.99

    def init(self, leaf: Leaf) -> dict[str, Derived]:
        return {"m": leaf.zeros()}

    def divides(self, _: int, /) -> bool:
        return True

    def update(self, g: jax.Array, state: dict[str, Any], _: At, /) -> tuple[jax.Array, dict[str, Any]]:
        g, m = g.astype(jnp.float32), state["m"]
        return jnp.sign(self.beta1 * m + (1 - self.beta1) * g), {"m": self.beta2 * m + (1 - self.beta2) * g}


@dataclass(frozen=True)
class Momentum:
    decay: float = 0.9

    def init(self, leaf: Leaf) -> dict[str, Derived]:
        return {"m": leaf.zeros()}

    def divides(self, _: int, /) -> bool:
        return True

    def update(self, g: jax.Array, state: dict[str, Any], _: At, /) -> tuple[jax.Array, dict[str, Any]]:
        m = self.decay * state["m"] + g.astype(jnp.float32)
        return m, {"m": m}


@dataclass(frozen=True)
class Quantized:
    """An elementwise rule with its numbers in codes."""

    rule: Rule
    formats: Formats
    block_size: int = 256

    @property
    def in_parts(self) -> bool:
        return True

    def init(self, leaf: Leaf) -> dict[str, Derived]:
        axis, block = blocks(leaf, self.block_size)
        return {name: leaf.keep(zeros(leaf.shape, form, block, axis)) for name, form in self.formats}

    def divides(self, dim: int, /) -> bool:
        return self.rule.divides(dim)

    def update(self, g: jax.Array, state: dict[str, Any], at: At, /) -> tuple[jax.Array, dict[str, Any]]:
        values = {name: q.dequantize(jnp.float32) for name, q in state.items()}
        u, new = self.rule.update(g, values, at)
        return u.astype(g.dtype), {name: _above_zero(q.requantize(new[name])) for name, q in state.items()}


@dataclass(frozen=True)
class InOnePass(Quantized):
    """Adam in 8 bits by `kernels.adam8_update`: each number is read once and written once, nothing is held in float32,
    and a stack of layers is one array. On a mesh each device goes through its own part."""

    takes_stacks: ClassVar = True
    in_parts: ClassVar = False

    def update(self, g: jax.Array, state: dict[str, Any], at: At, /) -> tuple[jax.Array, dict[str, Any]]:
        m, v, moments = state["m"], state["v"], self.rule.moments  # type: ignore[attr-defined]
        run = partial(
            kernels.adam8_update,
            beta1=moments.beta1,
            beta2=moments.beta2,
            epsilon=moments.epsilon,
            axis=m.axis,
            block_size=m.block_size,
            implementation="triton",
        )
        unbiased_by = jnp.stack([unbiased(beta, at.count) for beta in (moments.beta1, moments.beta2)])
        arrays = g, kernels.Moments8(m.codes, v.codes, m.scale, v.scale), unbiased_by
        try:
            u, new = per_device(run, arrays, at.leaf.axes, g.shape)
        except ValueError as error:
            raise UserError(f"optimizer.kernel: {error}; use none") from error
        kept = {"m": (new.m, new.m_scale), "v": (new.v, new.v_scale)}
        return u, {name: dataclasses.replace(state[name], codes=c, scale=s) for name, (c, s) in kept.items()}


def quantized(
    rule: Rule, formats: Formats, block_size: int = 256, kind: type[Quantized] = Quantized
) -> Callable[[Leaf], Rule]:
    """The rule in codes where that is worth it."""

    def rule_for(leaf: Leaf) -> Rule:
        return kind(rule, formats, block_size) if len(leaf.shape) > 1 and leaf.size >= LEAST else rule

    return rule_for


def scale_by_adam8bit(
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    *,
    kernel: Literal["none", "triton"] = "none",
    axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with block-wise dynamic codes: 2.03 bytes a parameter. `kernel`: in one pass over memory, on GPUs.

    >>> state = scale_by_adam8bit().init({"w": jnp.zeros((256, 2048))}).leaves["w"]
    >>> state["m"].value.nbytes, state["v"].value.nbytes
    (532480, 532480)
    """
    kind = Quantized if kernel == "none" else InOnePass
    return by_layer(quantized(Adam(Moments(beta1, beta2, epsilon)), ADAM8, kind=kind), axes)


def scale_by_adam4bit(
    beta1: float = 0.9, beta2: float = 0.95, epsilon: float = 1e-8, *, axes: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Adam in 4 bits a number: 1.06 bytes a parameter."""
    return by_layer(quantized(Adam(Moments(beta1, beta2, epsilon)), ADAM4, block_size=128), axes)


def scale_by_lion8bit(
    beta1: float = 0.9, beta2: float = 0.99, *, axes: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Lion with its average in 8 bits: 1.02 bytes a parameter."""
    return by_layer(quantized(Lion(beta1, beta2), MOMENTUM8), axes)


def trace8bit(momentum: float = 0.9, *, axes: Any = None) -> optax.GradientTransformationExtraArgs:
    """Momentum in 8 bits: 1.02 bytes a parameter."""
    return by_layer(quantized(Momentum(momentum), MOMENTUM8), axes)


def blocks(leaf: Leaf, most: int) -> tuple[int, int]:
    """The dimension (negative) that blocks run along, and their size: `even_block_size`. The same on every mesh.

    >>> blocks(Leaf((4096, 14336), jnp.float32, ("embed", "mlp"), (0, 1)), 256)
    (-1, 256)
    >>> blocks(Leaf((11008, 4096), jnp.float32, ("mlp", "embed"), (0, 1)), 256)
    (-2, 172)
    """
    found = [even_block_size(size, most, SHARDS) or 0 for size in leaf.shape]
    dim = max(
        range(len(found)),
        key=lambda d: (found[d] >= most // 2, found[d] >= most // 16, leaf.axes[d] not in SPLIT_FINELY, d),
    )
    if not found[dim]:  # no dimension divides well: a last block is shorter
        return -1, min(most, leaf.shape[-1])
    return dim - len(found), found[dim]


def zeros(shape: tuple[int, ...], form: str, block: int, axis: int) -> QTensor:
    """Zeros in any format, since a block's constant is zero."""
    like = jax.eval_shape(lambda: quantize(jnp.zeros(shape, jnp.float32), form, block, axis))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def _above_zero(q: QTensor) -> QTensor:
    """Of positive formats the least code that is not zero in the place of zero, which is code 0."""
    if not q.format.startswith("udynamic"):
        return q
    if FORMATS[q.format].bits == 8:
        return dataclasses.replace(q, codes=jnp.maximum(q.codes, 1))
    first, second = q.codes & 0xF0, q.codes & 0x0F  # two codes to a byte
    return dataclasses.replace(q, codes=jnp.maximum(first, 0x10) | jnp.maximum(second, 0x01))
