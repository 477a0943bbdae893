"""A new classifier on a frozen backbone: features of one task serve another (Donahue et al., arXiv:1310.1531).

embed x outputs weights are trained. The backward pass ends at the classifier: a step saves no activations of the
backbone and takes the time of its forward pass, a third of a step that trains all weights.
"""

import jax
from flax import nnx

from jaxmem.errors import UserError
from jaxmem.models.decoder import Decoder
from jaxmem.models.linear import Linear
from jaxmem.models.network import Network

TRAINABLE = ("head.*",)


def head(model: Network, *, outputs: int | None = None, key: jax.Array | None = None) -> tuple[str, ...]:
    """Replaces the output layer of an image network by a new one with `outputs`, by default as many as before; a
    decoder keeps its output layer. Returns the patterns of the trainable weights."""
    if isinstance(model, Decoder):
        if model.head is None:
            raise UserError("adapters.head does not support tied embeddings; train embedding.weight instead")
        return TRAINABLE
    inputs, before = model.head.weight.get_value().shape
    rngs = nnx.Rngs(params=jax.random.key(0) if key is None else key)
    model.head = Linear(rngs, inputs, outputs or before, ("embed", "classes"), bias=True)
    return TRAINABLE
