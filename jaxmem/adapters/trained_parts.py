"""Small parts that are trained while all other weights are frozen.

- Prompt tuning: embeddings before every text (Lester et al., arXiv:2104.08691). A prompt of P tokens has P x embed
  parameters, and needs the memory and time of P tokens in activations and KV cache. Gradients pass through all layers,
  so a step saves the same activations as with LoRA.
- A new classifier on the features of another task (Donahue et al., arXiv:1310.1531). It has embed x outputs
  parameters. The backward pass ends at the classifier: a step saves no activations of the layers before it and takes
  the time of their forward pass, a third of a step that trains all weights.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmem.errors import UserError
from jaxmem.models.decoder import Decoder
from jaxmem.models.embedding import take_rows
from jaxmem.models.layers import Features, Ids, fetch
from jaxmem.models.linear import Linear
from jaxmem.models.network import Network
from jaxmem.sharding.weights import store_new
from jaxmem.typing import Tree

NAMES = ("lora", "prompt")  # the attributes of modules that contain adapters


class Prompt(nnx.Module):
    """Embeddings of the token ids `vocab`, `vocab + 1`, ..., beyond the vocabulary."""

    def __init__(self, initial: Float[Array, "length embed"], vocab: int):
        self.weight = nnx.Param(store_new(initial, (None, "embed")), axes=(None, "embed"))
        self.length = initial.shape[0]
        self.vocab = vocab

    @property
    def tokens(self) -> Int[Array, "length"]:
        return jnp.arange(self.vocab, self.vocab + self.length, dtype=jnp.int32)

    def __call__(self, ids: Ids, x: Features, dtype: DTypeLike) -> Features:
        """The embeddings `x` of all tokens, with the embeddings of the prompt at its tokens."""
        rows = jnp.clip(ids - self.vocab, 0, self.length - 1)
        prompt = take_rows(fetch(self.weight, jnp.float32), rows, dtype)
        return jnp.where((ids >= self.vocab)[..., None], prompt, x)


def prompt(model: Decoder, *, length: int = 20, key: jax.Array | None = None) -> tuple[str, ...]:
    """Adds a prompt of `length` tokens to a decoder, initialized with the embeddings of random tokens. Returns the
    patterns of the trainable weights."""
    ids = jax.random.randint(jax.random.key(0) if key is None else key, (length,), 0, model.cfg.vocab, jnp.int32)
    embeddings = take_rows(model.embedding.weight.get_value(), ids, jnp.float32) * model.embedding_scale
    model.prompt = Prompt(embeddings, model.cfg.vocab)
    return ("prompt.*",)


def head(model: Network, *, outputs: int | None = None, key: jax.Array | None = None) -> tuple[str, ...]:
    """Replaces the output layer of an image network by a new one with `outputs`, by default as many as before; a
    decoder keeps its output layer. Returns the patterns of the trainable weights."""
    if isinstance(model, Decoder):
        if model.head is None:
            raise UserError("adapters.head does not support tied embeddings; train embedding.weight instead")
    else:
        inputs, before = model.head.weight.get_value().shape
        rngs = nnx.Rngs(params=jax.random.key(0) if key is None else key)
        model.head = Linear(rngs, inputs, outputs or before, ("embed", "classes"), bias=True)
    return ("head.*",)


def base_of(tree: Tree) -> Tree:
    """A nested dict of parameters, or of a value for each parameter, without adapters.

    >>> base_of({"q": {"weight": 1, "lora": {"a": 2}}})
    {'q': {'weight': 1}}
    """
    if not isinstance(tree, dict):
        return tree
    return {name: base_of(value) for name, value in tree.items() if name not in NAMES}
