"""Elementwise optimizers with state in 8 or 4 bits, quantized in blocks.

8-bit Adam has 2.03 bytes of state per parameter instead of 8, with the same final loss (Dettmers et al.,
arXiv:2110.02861): a dynamic code for each moment, and a float32 scale for each block of 256. In 4 bits (Li et al.,
arXiv:2309.01507) it has 1.06 bytes, with blocks of 128. A second moment that would be rounded to zero is rounded up to
the smallest nonzero code: with zero and a nonzero first moment, the update would be unbounded.

Vectors, scalars and parameters of fewer than 4096 elements have float32 state. An update dequantizes, steps and
quantizes part by part, so that at most 32 MiB of each moment exist in float32.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxmem import kernels
from jaxmem.config.optimizers import AdamSettings, AdamW8bitSettings, AdamWSettings, LionSettings, MomentumSettings
from jaxmem.errors import UserError
from jaxmem.optim.layers import MatrixRule, ParameterSpec, State, UpdateContext, by_layer
from jaxmem.optim.rules.plain import Adam, Lion, Momentum, bias_correction
from jaxmem.optim.transformation import Rate, Transformation, with_learning_rate
from jaxmem.quant import FORMATS, QTensor, even_block_size, quantize
from jaxmem.sharding.leaves import per_device
from jaxmem.sharding.weights import is_matrix
from jaxmem.typing import AxesTree

MIN_SIZE = 4096  # elements below which quantized state saves too little
MAX_SHARDS = 8  # if possible, a dimension has a multiple of this number of blocks, so that shards have complete blocks
SPLIT_FINELY = ("embed", "projected")  # dimensions without blocks if possible: sharded finely, or of any size

Formats = tuple[tuple[str, str], ...]  # (name of a state array, its format)
ADAM8: Formats = (("m", "dynamic8"), ("v", "udynamic8"))
ADAM4: Formats = (("m", "dynamic4"), ("v", "udynamic4"))
MOMENTUM8: Formats = (("m", "dynamic8"),)


@dataclass(frozen=True)
class Quantized(MatrixRule):
    """An elementwise rule with quantized state."""

    rule: MatrixRule
    formats: Formats
    block_size: int = 256
    elementwise: ClassVar = True

    def init(self, spec: ParameterSpec) -> State:
        axis, block = blocks(spec, self.block_size)
        return {name: spec.state_array(zeros(spec.shape, form, block, axis)) for name, form in self.formats}

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        values = {name: q.dequantize(jnp.float32) for name, q in state.items()}
        u, new = self.rule.update(g, values, context)
        return u.astype(g.dtype), {name: _above_zero(q.requantize(new[name])) for name, q in state.items()}


@dataclass(frozen=True)
class FusedAdam8bit(Quantized):
    """Adam in 8 bits with the fused kernel `kernels.adam8_update`: one pass over memory without float32 copies, with a
    stack of layers as one array. On a mesh each device updates its shard."""

    updates_stacks: ClassVar = True
    elementwise: ClassVar = False

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        m = state["m"]
        v = state["v"]
        settings = self.rule.settings  # type: ignore[attr-defined]
        run = partial(
            kernels.adam8_update,
            adam=kernels.AdamHyperparameters(settings.beta1, settings.beta2, settings.epsilon),
            axis=m.axis,
            block_size=m.block_size,
            implementation="triton",
        )
        corrections = jnp.stack([bias_correction(beta, context.count) for beta in (settings.beta1, settings.beta2)])
        arrays = g, kernels.Moments8(m.codes, v.codes, m.scale, v.scale), corrections
        try:
            u, new = per_device(run, arrays, context.spec.axes, g.shape)
        except ValueError as error:
            raise UserError(f"optimizer.kernel=triton: {error}; use optimizer.kernel=none") from error
        moments = {"m": (new.m, new.m_scale), "v": (new.v, new.v_scale)}
        return u, {name: dataclasses.replace(state[name], codes=c, scale=s) for name, (c, s) in moments.items()}


def quantized(
    rule: MatrixRule, formats: Formats, block_size: int = 256, kind: type[Quantized] = Quantized
) -> Callable[[ParameterSpec], MatrixRule]:
    """The rule with quantized state for matrices of at least MIN_SIZE elements."""

    def rule_for(spec: ParameterSpec) -> MatrixRule:
        is_large = is_matrix(spec.axes) and spec.size * spec.experts >= MIN_SIZE
        return kind(rule, formats, block_size) if is_large else rule

    return rule_for


def scale_by_adam8bit(settings: AdamW8bitSettings = AdamW8bitSettings(), *, axes: AxesTree = None) -> Transformation:
    """Adam with block-wise dynamic codes: 2.03 bytes per parameter. `kernel`: `triton`, a fused update on GPUs;
    `auto`, the same for arrays whose blocks are all complete; `none`, plain JAX.

    >>> state = scale_by_adam8bit().init({"w": jnp.zeros((256, 2048))}).arrays
    >>> {name: array["w"].nbytes for name, array in state.items()}
    {'m_codes': 524288, 'm_scale': 8192, 'v_codes': 524288, 'v_scale': 8192}
    """

    def rule_for(spec: ParameterSpec) -> MatrixRule:
        axis, size = blocks(spec, 256) if spec.shape else (0, 1)
        is_even = bool(spec.shape) and spec.shape[axis] % size == 0
        is_fused = settings.kernel == "triton" or (settings.kernel == "auto" and is_even)
        return quantized(Adam(settings), ADAM8, kind=FusedAdam8bit if is_fused else Quantized)(spec)

    return by_layer(rule_for, axes)


def adamw8bit(
    learning_rate: Rate,
    *,
    beta1: float = AdamW8bitSettings.beta1,
    beta2: float = AdamW8bitSettings.beta2,
    epsilon: float = AdamW8bitSettings.epsilon,
    weight_decay: float = AdamW8bitSettings.weight_decay,
    kernel: str = AdamW8bitSettings.kernel,
    axes: AxesTree = None,
) -> Transformation:
    """AdamW in 8 bits per moment: 2.03 bytes per parameter. `kernel`: as in `scale_by_adam8bit`. The other arguments
    are those of `adamw`."""
    settings = AdamW8bitSettings(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay, kernel=kernel)
    return with_learning_rate(scale_by_adam8bit(settings, axes=axes), learning_rate, weight_decay, axes)


def scale_by_adam4bit(settings: AdamSettings = AdamSettings(), *, axes: AxesTree = None) -> Transformation:
    """Adam in 4 bits per moment: 1.06 bytes per parameter."""
    return by_layer(quantized(Adam(settings), ADAM4, block_size=128), axes)


def adamw4bit(
    learning_rate: Rate,
    *,
    beta1: float = AdamWSettings.beta1,
    beta2: float = AdamWSettings.beta2,
    epsilon: float = AdamWSettings.epsilon,
    weight_decay: float = AdamWSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """AdamW in 4 bits per moment: 1.06 bytes per parameter. The arguments are those of `adamw`."""
    settings = AdamWSettings(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)
    return with_learning_rate(scale_by_adam4bit(settings, axes=axes), learning_rate, weight_decay, axes)


def scale_by_lion8bit(settings: LionSettings = LionSettings(), *, axes: AxesTree = None) -> Transformation:
    """Lion with its moment in 8 bits: 1.02 bytes per parameter."""
    return by_layer(quantized(Lion(settings), MOMENTUM8), axes)


def lion8bit(
    learning_rate: Rate,
    *,
    beta1: float = LionSettings.beta1,
    beta2: float = LionSettings.beta2,
    weight_decay: float = LionSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """Lion in 8 bits: 1.02 bytes per parameter. The arguments are those of `lion`."""
    settings = LionSettings(beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    return with_learning_rate(scale_by_lion8bit(settings, axes=axes), learning_rate, weight_decay, axes)


def trace8bit(settings: MomentumSettings = MomentumSettings(), *, axes: AxesTree = None) -> Transformation:
    """Momentum in 8 bits: 1.02 bytes per parameter."""
    return by_layer(quantized(Momentum(settings.momentum), MOMENTUM8), axes)


def momentum8bit(
    learning_rate: Rate,
    *,
    momentum: float = MomentumSettings.momentum,
    weight_decay: float = MomentumSettings.weight_decay,
    axes: AxesTree = None,
) -> Transformation:
    """SGD with momentum in 8 bits: 1.02 bytes per parameter. The arguments are those of `sgd`."""
    settings = MomentumSettings(momentum=momentum, weight_decay=weight_decay)
    return with_learning_rate(trace8bit(settings, axes=axes), learning_rate, weight_decay, axes)


def blocks(spec: ParameterSpec, most: int) -> tuple[int, int]:
    """The dimension (negative) of the blocks, and their size (`even_block_size`). They are the same on every mesh.

    >>> blocks(ParameterSpec((4096, 14336), jnp.float32, ("embed", "mlp"), (0, 1)), 256)
    (-1, 256)
    >>> blocks(ParameterSpec((11008, 4096), jnp.float32, ("mlp", "embed"), (0, 1)), 256)
    (-2, 172)

    Never along a vocabulary: gradients of rare tokens are smaller by orders of magnitude, and with a scale that
    frequent tokens set, their second moments are rounded up to the smallest code.

    >>> blocks(ParameterSpec((49152, 576), jnp.float32, ("vocab", "embed"), (0, 1)), 256)
    (-1, 72)
    >>> blocks(ParameterSpec((49152, 16), jnp.float32, ("vocab", "rank"), (0, 1)), 256)
    (-1, 16)
    """
    dims = [d for d in range(len(spec.shape)) if d != spec.vocab_dim] or [0]
    sizes = {d: even_block_size(spec.shape[d], most, MAX_SHARDS) or 0 for d in dims}
    dim = max(dims, key=lambda d: (sizes[d] >= most // 2, sizes[d] >= most // 16, spec.axes[d] not in SPLIT_FINELY, d))
    if not sizes[dim]:  # no dimension has a suitable divisor: the last block is shorter
        dim = dims[-1]
        return dim - len(spec.shape), min(most, spec.shape[dim])
    return dim - len(spec.shape), sizes[dim]


def zeros(shape: tuple[int, ...], form: str, block: int, axis: int) -> QTensor:
    """A quantized array of zeros: in every format, a block with scale zero."""
    like = jax.eval_shape(lambda: quantize(jnp.zeros(shape, jnp.float32), form, block, axis))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def _above_zero(q: QTensor) -> QTensor:
    """For unsigned formats: replaces code 0, which is zero, by the smallest nonzero code."""
    if not q.format.startswith("udynamic"):
        return q
    if FORMATS[q.format].bits == 8:
        return dataclasses.replace(q, codes=jnp.maximum(q.codes, 1))
    first = q.codes & 0xF0
    second = q.codes & 0x0F  # two codes per byte
    return dataclasses.replace(q, codes=jnp.maximum(first, 0x10) | jnp.maximum(second, 0x01))
