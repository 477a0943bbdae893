"""Activation checkpointing: what a layer saves for the backward pass. With N layers whose boundary (input) takes B
bytes and whose intermediates take A bytes, the backward pass holds

    none   N * A          no recomputation
    dots   N * (matmuls)  recomputes all but matmuls
    full   N * B + A      one extra forward pass (Chen et al., arXiv:1604.06174)
    names  N * (named)    recomputes all but activations with these names

and with `schedule.py` fewer boundaries than N, for more forward passes.

Under every policy a weight gathered over `fsdp` is gathered again in the backward pass and never saved: saved, each
device would hold the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxmem.config.names import BOUNDARY
from jaxmem.config.recompute import POLICIES, policy_of
from jaxmem.errors import UserError, nearest
from jaxmem.sharding.host import HOST

Policy = Callable[..., bool]
Remat = str | tuple[str, ...]
Forms = set[tuple[int, ...]]

# The primitives of `sharding.gather` and of pipeline stages, each of which keeps the weight's shape; and, last, those
# that index a layer's weight in a stack, or fetch it from host memory.
_FETCH = (
    "custom_vjp_call", "convert_element_type", "sharding_constraint", "name", "optimization_barrier", "dynamic_slice",
    "squeeze", "device_put",
)  # fmt: skip


def _save_all_but_weights(weights: Forms) -> Policy:
    """Everything may be saved but a weight between storage and compute, which is recognised by its shape."""

    def policy(primitive: Any, *operands: Any, **_: Any) -> bool:
        return not (primitive.name in _FETCH and operands[0].shape in weights)

    return policy


def policy(remat: Remat, weights: Forms, host: tuple[str, ...] = ()) -> Policy:
    """The `jax.checkpoint` policy. `weights`: the shapes of one layer's weights; `host`: names of activations that are
    offloaded to host memory, beside what else is saved. With BOUNDARY all that is saved is offloaded."""
    if isinstance(remat, tuple):
        saved: tuple[str, ...] | None = remat
    elif (known := policy_of(remat)) is not None:  # scheduled policies save the inputs of layers only
        saved = known.saved
    else:
        raise UserError(f"memory.remat: unknown policy {remat!r}{nearest(remat, POLICIES)}")
    if saved is None:
        return _save_all_but_weights(weights)
    if host:
        offloaded = (*host, *saved) if BOUNDARY in host else host
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[name for name in saved if name not in offloaded],
            names_which_can_be_offloaded=list(dict.fromkeys(offloaded)),
            offload_src="device",
            offload_dst=HOST,
        )
    return jax.checkpoint_policies.save_only_these_names(*saved)


def recompute_from_inputs(function: Callable[..., jax.Array], *inputs: jax.Array) -> jax.Array:
    """function(*inputs), of which only the inputs are saved for the backward pass: for element-wise functions, whose
    recomputation costs no matmul and is fused into the kernels that need it."""

    @jax.custom_vjp
    def run(*inputs: jax.Array) -> jax.Array:
        return function(*inputs)

    run.defvjp(lambda *saved: (function(*saved), saved), lambda saved, g: jax.vjp(function, *saved)[1](g))
    return run(*inputs)
