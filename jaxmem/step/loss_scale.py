"""Loss scaling: float16 gradients, which underflow below 6e-8, are computed multiplied by a scale.

The loss is multiplied by a scale and the gradients divided by it (Micikevicius et al., arXiv:1710.03740). An update
whose gradients overflow is skipped; a dynamic scale is then halved, and doubled after 2,000 finite updates. The
state is 12 bytes.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

INITIAL, MINIMUM = 2.0**15, 1.0
GROWTH_INTERVAL = 2000  # finite updates before the scale is doubled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    scale: jax.Array
    sound: jax.Array  # number of finite updates since the last change of the scale
    skipped: jax.Array  # number of all skipped updates


def initial(setting: Literal["none", "dynamic"] | float) -> LossScale | None:
    """The state for `precision.loss_scale`; None: gradients are not scaled, and no update is skipped."""
    if setting == "none":
        return None
    zero = jnp.zeros((), jnp.int32)
    return LossScale(jnp.asarray(INITIAL if setting == "dynamic" else setting, jnp.float32), zero, zero)


def after(state: LossScale, finite: jax.Array, *, dynamic: bool) -> LossScale:
    """The state after an update with finite or non-finite gradients."""
    sound = jnp.where(finite, state.sound + 1, 0)
    scale = state.scale
    if dynamic:
        grows = sound == GROWTH_INTERVAL
        scale = jnp.where(finite, jnp.where(grows, scale * 2, scale), jnp.maximum(scale / 2, MINIMUM))
        sound = jnp.where(grows, 0, sound)
    return LossScale(scale, sound, state.skipped + jnp.where(finite, 0, 1))
