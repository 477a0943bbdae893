"""Adapters: parameters that are added to a frozen model and trained, or parameters of the model that are trained.

    patterns = adapters.lora(model, rank=16, alpha=32, targets=["blocks.attention.*"])   # or prompt, head; in place
    tx = optim.trainable(optax.adam(1e-4), patterns)
    adapters.merge(model)                                                                # into the model's weights

An adapter is a module inside the module that it changes, so that the names of weights do not change, and adapters have
their own (`blocks.attention.q.lora.a`). Sharding, recompute and optimizers treat both in the same way.
"""

from jaxmem.lazy import lazy_names

_MODULES = {
    "Lora": "low_rank",
    "LoraSpec": "low_rank",
    "Prompt": "prompt_tuning",
    "TokenRows": "token_rows",
    "attach": "kinds",
    "base_of": "tree",
    "head": "output_head",
    "lora": "low_rank",
    "merge": "low_rank",
    "merged_weight": "low_rank",
    "weights_to_merge": "low_rank",
    "prompt": "prompt_tuning",
    "tokens": "token_rows",
}
__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
