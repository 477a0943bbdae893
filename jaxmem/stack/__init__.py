"""Apply a stack of layers: one signature, several ways; the model does not know which.

Layers are stored stacked, so one layer is compiled once whatever the depth. `apply.py` runs one after the other,
`pipeline.py` runs them on stages of devices, `remat.py` says what the backward pass keeps, `reverse.py` goes back
through them with each layer's gradient in sight.
"""

from jaxmem.stack.apply import StackCall, StackOptions, apply_stack, stacked
from jaxmem.stack.cuts import cut, cut_by
from jaxmem.stack.pipeline import Pipeline
from jaxmem.stack.remat import recompute_from_inputs
from jaxmem.stack.reverse import ForwardPass, forward, merge_micro_batches, take_layer
from jaxmem.stack.schedule import Schedule, schedule
from jaxmem.stack.scheduled import inexact_leaves, with_inexact

__all__ = [
    "ForwardPass",
    "Pipeline",
    "Schedule",
    "StackCall",
    "StackOptions",
    "apply_stack",
    "cut",
    "cut_by",
    "forward",
    "inexact_leaves",
    "merge_micro_batches",
    "recompute_from_inputs",
    "schedule",
    "stacked",
    "take_layer",
    "with_inexact",
]
