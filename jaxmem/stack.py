"""Apply a stack of layers: one signature, several ways; the model does not know which.

Layers are stored stacked, so one layer is compiled once whatever the depth. With N layers whose
boundary (input) takes B bytes and whose intermediates take A bytes, the backward pass holds

    none   N * A          no recomputation
    dots   N * (products) recomputes what lies between the matrix products
    full   N * B + A      one extra forward pass (Chen et al., arXiv:1604.06174)

Under every policy a weight gathered over `fsdp` is gathered again for the backward pass and never
kept: kept, it would hold the whole model on each device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxmem.errors import UserError, nearest

Layer = Callable[[Any, Any, Any], tuple[Any, Any]]  # (module, x, this layer's input) -> (x, this layer's output)
Policy = Callable[..., bool]

PRODUCT = "product"  # the checkpoint name of every product with a weight

# `sharding.gather` is made of these; each keeps the weight's shape.
_FETCH = ("custom_vjp_call", "convert_element_type", "sharding_constraint", "name")


def _save_nothing(_: Any) -> Policy:
    return jax.checkpoint_policies.nothing_saveable


def _save_dots(_: Any) -> Policy:
    return jax.checkpoint_policies.save_only_these_names(PRODUCT)


def _save_all_but_weights(weights: Any) -> Policy:
    """Everything may be kept but a weight on its way from rest to use, which is recognised by its shape."""
    shapes = {leaf.shape[1:] for leaf in jax.tree.leaves(weights)}

    def policy(primitive: Any, *operands: Any, **_: Any) -> bool:
        return not (primitive.name in _FETCH and operands[0].shape in shapes)

    return policy


REMAT: dict[str, Callable[[Any], Policy]] = {
    "none": _save_all_but_weights,
    "dots": _save_dots,
    "full": _save_nothing,
}


def apply_stack(
    blocks: nnx.Module, layer: Layer, x: Any, inputs: Any = None, *, remat: str = "none"
) -> tuple[Any, Any]:
    """Run `x` through `blocks`, modules of one kind stacked by `stacked`: `layer(block, x, input)` for each.

    `inputs` holds something for each layer (keys, caches), stacked likewise; what the layers give beside
    `x` comes back stacked.
    """
    if remat not in REMAT:
        raise UserError(f"memory.remat: {remat!r} is no policy{nearest(remat, REMAT)}")
    graphdef, state = nnx.split(blocks)
    weights = nnx.to_pure_dict(state)

    def run(weights: Any, x: Any, one: Any) -> tuple[Any, Any]:
        return layer(nnx.merge(graphdef, weights), x, one)

    # Inside scan the loop already keeps XLA from merging the recomputation with the first pass.
    run = jax.checkpoint(run, policy=REMAT[remat](weights), prevent_cse=False)
    return jax.lax.scan(lambda x, one: run(one[0], x, one[1]), x, (weights, inputs))


def stacked(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """`count` modules of one kind as one, its weights stacked along a first dimension `layer`.

    They are made one after the other, so that initialising never needs more than one layer beside the weights.
    """
    template = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graphdef, _ = nnx.split(template)
    keys = jax.random.split(rngs.params(), count)
    weights = jax.lax.map(lambda key: nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1]), keys)
    module = nnx.merge(graphdef, weights)
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable.set_metadata("axes", ("layer", *variable.get_metadata()["axes"]))
    return module
