"""The compiled training step.

step.py       one update: batch -> loss -> gradients -> update -> metrics
model.py      ModelSpec: the network, its weights' axes, which are trainable
state.py      TrainState and StateSpec: shapes and shardings of the state and of a batch
programs.py   Program: the functions that `plan` and `train` compile
"""

from typing import Any

__all__ = ["Program", "TrainState", "program"]


def __getattr__(name: str) -> Any:
    if name == "TrainState":
        from jaxmem.step.state import TrainState

        return TrainState
    if name in __all__:
        from jaxmem.step import programs

        return getattr(programs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
