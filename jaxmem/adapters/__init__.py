"""What learns beside a model whose own weights stay as they are, or of them.

    learns = adapters.lora(model, rank=16, alpha=32, targets=["blocks.attention.*"])     # or prompt, head; in place
    tx = optim.trainable(optax.adam(1e-4), learns)
    adapters.merge(model)                                                                # into the model's own weights

An adapter is a module inside the module that it changes, so that weights keep their names and adapters have names of
their own (`blocks.attention.q.lora.a`); every way of running, laying out and updating a model treats both alike.
"""

from jaxmem.adapters.attach import attach
from jaxmem.adapters.head import head
from jaxmem.adapters.lora import Lora, lora, merge, merged
from jaxmem.adapters.prompt import Prompt, prompt
from jaxmem.adapters.tree import base_of, owns

__all__ = ["Lora", "Prompt", "attach", "base_of", "head", "lora", "merge", "merged", "owns", "prompt"]
