"""The compiled training step.

step.py       one update: batch -> loss -> gradients -> update -> metrics
model.py      ModelSpec: the network, its weights' axes, which are trainable
state.py      TrainState and StateSpec: shapes and shardings of the state and of a batch
programs.py   Program: the functions that `plan` and `train` compile
"""

from jaxmem.lazy import lazy_names

__getattr__, __all__ = lazy_names(
    __name__,
    programs="Program program",
    state="TrainState",
)
