"""Activation checkpointing: which activations of a layer are saved for the backward pass. With N layers whose boundary
(input) takes B bytes and whose intermediates take A bytes, the backward pass needs

    none   N * A          no recomputation
    dots   N * (matmuls)  recomputes all but matmuls
    full   N * B + A      one extra forward pass (Chen et al., arXiv:1604.06174)
    names  N * (named)    recomputes all but activations with these names

and with `schedule.py` fewer boundaries than N, at the cost of more forward passes.

With every policy, a weight gathered over `fsdp` is gathered again in the backward pass. If it were saved, each device
would store the complete model.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxmem.config.names import BOUNDARY
from jaxmem.config.recompute import POLICIES, policy_of
from jaxmem.errors import UserError, nearest
from jaxmem.sharding.host import HOST_MEMORY

Policy = Callable[..., bool]
Remat = str | tuple[str, ...]
Forms = set[tuple[int, ...]]

# The primitives of `sharding.gather` and of pipeline stages, which preserve the shape of the weight. The last ones
# index the weight of a layer in a stack, or copy it from host memory.
_FETCH = (
    "custom_vjp_call", "convert_element_type", "sharding_constraint", "name", "optimization_barrier", "dynamic_slice",
    "squeeze", "device_put",
)  # fmt: skip


def _save_all_but_weights(weights: Forms) -> Policy:
    """A policy that saves everything except weights between storage and computation, which it recognizes by shape."""

    def policy(primitive: Any, *operands: Any, **_: Any) -> bool:
        return not (primitive.name in _FETCH and operands[0].shape in weights)

    return policy


def policy(remat: Remat, weights: Forms, host: tuple[str, ...] = ()) -> Policy:
    """The `jax.checkpoint` policy. `weights` are the shapes of the weights of a layer. `host` names activations that
    are saved too, but in host memory; with BOUNDARY all saved activations are in host memory."""
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
            offload_dst=HOST_MEMORY,
        )
    return jax.checkpoint_policies.save_only_these_names(*saved)


def recompute_from_inputs(function: Callable[..., jax.Array], *inputs: jax.Array) -> jax.Array:
    """Computes function(*inputs) and saves only the inputs for the backward pass. Use it for element-wise functions,
    whose recomputation needs no matmul and is fused into the kernels that use the result."""

    @jax.custom_vjp
    def run(*inputs: jax.Array) -> jax.Array:
        return function(*inputs)

    run.defvjp(lambda *saved: (function(*saved), saved), lambda saved, g: jax.vjp(function, *saved)[1](g))
    return run(*inputs)
