"""Loss scaling: float16 gradients, which vanish below 6e-8, are computed larger than they are.

The loss is multiplied by a scale and the gradients divided by it (Micikevicius et al., arXiv:1710.03740). An update
whose gradients overflowed is left out; a dynamic scale is then halved, and doubled again after a while of sound ones.
It takes 12 bytes in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

START, LEAST = 2.0**15, 1.0
PATIENCE = 2000  # sound updates before the scale is doubled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    scale: jax.Array
    sound: jax.Array  # updates since the scale was last changed
    skipped: jax.Array  # updates left out, in all


def initial(setting: Literal["none", "dynamic"] | float) -> LossScale | None:
    """The state for `precision.loss_scale`; None: gradients are not scaled, and no update is left out."""
    if setting == "none":
        return None
    zero = jnp.zeros((), jnp.int32)
    return LossScale(jnp.asarray(START if setting == "dynamic" else setting, jnp.float32), zero, zero)


def after(state: LossScale, finite: jax.Array, *, dynamic: bool) -> LossScale:
    """The state after an update whose gradients were finite or not."""
    sound = jnp.where(finite, state.sound + 1, 0)
    scale = state.scale
    if dynamic:
        grown = sound == PATIENCE
        scale = jnp.where(finite, jnp.where(grown, scale * 2, scale), jnp.maximum(scale / 2, LEAST))
        sound = jnp.where(grown, 0, sound)
    return LossScale(scale, sound, state.skipped + jnp.where(finite, 0, 1))
