"""What learns beside a model whose own weights stay as they are.

    adapters.lora(model, rank=16, alpha=32, targets=["blocks.attention.*"])     # in place
    tx = optim.trainable(optax.adam(1e-4), adapters.LEARNS)

An adapter is a module inside the module that it changes, so that weights keep their names and adapters have names of
their own (`blocks.attention.q.lora.a`); every way of running, laying out and updating a model treats both alike.
"""

from jaxmem.adapters.lora import LEARNS, Lora, attach, lora, merged
from jaxmem.adapters.tree import base_of, owns

__all__ = ["LEARNS", "Lora", "attach", "base_of", "lora", "merged", "owns"]
