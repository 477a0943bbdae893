"""What a layer keeps for the backward pass. With N layers whose boundary (input) takes B bytes and whose
intermediates take A bytes, the backward pass holds

    none   N * A          no recomputation
    dots   N * (products) recomputes what lies between the matrix products
    full   N * B + A      one extra forward pass (Chen et al., arXiv:1604.06174)
    names  N * (named)    recomputes all but what has these names

and by `schedule.py` fewer boundaries than N, for more forward passes.

Under every policy a weight gathered over `fsdp` is gathered again for the backward pass and never
kept: kept, it would hold the whole model on each device.
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

# `sharding.gather` and a pipeline's stages are made of these, each of which keeps the weight's shape; and of the last
# ones what takes a layer's weight out of a stack, or brings it from the host.
_FETCH = (
    "custom_vjp_call", "convert_element_type", "sharding_constraint", "name", "optimization_barrier", "dynamic_slice",
    "squeeze", "device_put",
)  # fmt: skip


def _save_all_but_weights(weights: Forms) -> Policy:
    """Everything may be kept but a weight on its way from rest to use, which is recognised by its shape."""

    def policy(primitive: Any, *operands: Any, **_: Any) -> bool:
        return not (primitive.name in _FETCH and operands[0].shape in weights)

    return policy


def policy(remat: Remat, weights: Forms, host: tuple[str, ...] = ()) -> Policy:
    """`weights`: the shapes in which one layer's weights are seen; `host`: what goes to host memory, by name, beside
    what else is kept. With a layer's boundary goes all that is kept."""
    if isinstance(remat, tuple):
        saved: tuple[str, ...] | None = remat
    elif (known := policy_of(remat)) is not None:  # a scheduled one: of one layer there is nothing to leave out
        saved = known.saved
    else:
        raise UserError(f"memory.remat: unknown policy {remat!r}{nearest(remat, POLICIES)}")
    if saved is None:
        return _save_all_but_weights(weights)
    if host:
        away = (*host, *saved) if BOUNDARY in host else host
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[name for name in saved if name not in away],
            names_which_can_be_offloaded=list(dict.fromkeys(away)),
            offload_src="device",
            offload_dst=HOST,
        )
    return jax.checkpoint_policies.save_only_these_names(*saved)


def recompute_from_inputs(function: Callable[..., jax.Array], *inputs: jax.Array) -> jax.Array:
    """function(*inputs), of which nothing is kept for the backward pass but what goes in. The rest is made again there:
    for work on single numbers, which costs no product and joins the kernels that need it."""

    @jax.custom_vjp
    def run(*given: jax.Array) -> jax.Array:
        return function(*given)

    run.defvjp(lambda *kept: (function(*kept), kept), lambda kept, g: jax.vjp(function, *kept)[1](g))
    return run(*inputs)
