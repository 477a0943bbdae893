"""Apply a stack of layers: one signature, several ways; the model does not know which.

Layers are stored stacked, so one layer is compiled once whatever the depth. `apply.py` runs one after the other,
`pipeline.py` runs them on stages of devices, `remat.py` says what the backward pass keeps, `reverse.py` goes back
through them with each layer's gradient in sight.
"""

from jaxmem.stack.apply import Applied, Way, apply_stack, stacked
from jaxmem.stack.cuts import cut, cut_by
from jaxmem.stack.pipeline import Pipeline
from jaxmem.stack.remat import from_inputs
from jaxmem.stack.reverse import Passed, forward, layer_of, together
from jaxmem.stack.schedule import Schedule, schedule
from jaxmem.stack.scheduled import merged, real

__all__ = [
    "Applied",
    "Passed",
    "Pipeline",
    "Schedule",
    "Way",
    "apply_stack",
    "cut",
    "cut_by",
    "forward",
    "from_inputs",
    "layer_of",
    "merged",
    "real",
    "schedule",
    "stacked",
    "together",
]
