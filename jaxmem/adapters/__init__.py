"""Adapters: parameters that are added to a frozen model and trained, or parameters of the model that are trained.

    patterns = adapters.lora(model, rank=16, alpha=32, targets=["blocks.attention.*"])   # changes the model in place
    tx = optim.trainable(optax.adam(1e-4), patterns)
    adapters.merge(model)                                                                # adds adapters to weights

An adapter is a module inside the module that it changes, so that the names of weights do not change, and adapters have
their own (`blocks.attention.q.lora.a`). Sharding, recompute and optimizers treat both in the same way.
"""

from jaxmem.lazy import lazy_names

__getattr__, __all__ = lazy_names(
    __name__,
    low_rank="Lora attach lora merge merged_weight weights_to_merge",
    trained_parts="Prompt base_of head prompt",
)
