"""Applying a stack of layers: one signature with several implementations. Models do not depend on which one is used.

The weights of all layers are stacked, so that a layer is compiled once for any number of layers.

    call.py     a stack that is about to be applied, its settings, and replacing its computation
    apply.py    one layer after the other
    remat.py    activation checkpointing; recompute_plan.py, scheduled.py: recomputing the inputs of layers too
    reverse.py  forward and backward pass that passes the gradient of each layer to a function
"""

from jaxmem.lazy import lazy_names

__getattr__, __all__ = lazy_names(
    __name__,
    apply="apply_call checkpointed result_shapes stack_call stacked",
    call="LayerOrder StackCall StackOptions creating_in intercept_with",
    remat="recompute_from_inputs saved_as",
    reverse="ForwardPass Visitor forward merge_micro_batches",
    scheduled="inexact_leaves with_inexact",
)
