"""Applying a stack of layers: one signature, several ways; the model does not know which.

Layers are stored stacked, so that one layer is compiled once, whatever the depth.

    apply.py         one layer after the other
    pipeline.py      over pipeline stages; stages.py has their schedule
    remat.py         activation checkpointing; schedule.py and scheduled.py recompute boundaries too
    reverse.py       forward and backward pass with each layer's gradient in sight
    layer_ranges.py  stacks with some trainable layers
    cuts.py          taking the place of a stack within a network
"""

from jaxmem.lazy import lazy_names

_MODULES = {
    "ForwardPass": "reverse",
    "Pipeline": "stages",
    "Schedule": "schedule",
    "StackCall": "apply",
    "StackOptions": "apply",
    "apply_stack": "apply",
    "cut": "cuts",
    "cut_by": "cuts",
    "forward": "reverse",
    "inexact_leaves": "scheduled",
    "merge_micro_batches": "reverse",
    "recompute_from_inputs": "remat",
    "stacked": "apply",
    "with_inexact": "scheduled",
}
__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
