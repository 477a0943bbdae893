"""Apply a stack of layers: one signature, several ways; the model does not know which.

Layers are stored stacked, so one layer is compiled once whatever the depth. `apply.py` runs one after the other,
`pipeline.py` runs them on stages of devices, `remat.py` says what the backward pass keeps.
"""

from jaxmem.stack.apply import Way, apply_stack, stacked
from jaxmem.stack.pipeline import Pipeline
from jaxmem.stack.remat import PRODUCT, REMAT

__all__ = ["PRODUCT", "REMAT", "Pipeline", "Way", "apply_stack", "stacked"]
