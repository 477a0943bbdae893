"""Each technique with its number: `jaxmem tour TOPIC`. A stop is a module of this folder that has a `STOP`."""

from __future__ import annotations

from jaxmem.errors import UserError, nearest
from jaxmem.lab.tour import (
    adapters,
    attention,
    checkpointing,
    finetune,
    frontier,
    fusion,
    galore,
    gpu,
    memory,
    networks,
    parallel,
    precision,
    qlora,
    quantization,
    stack,
)
from jaxmem.lab.tour.stops import SIMULATED, Found, Shown, Stop, Visit

ORDER = (
    networks,
    gpu,
    memory,
    precision,
    parallel,
    adapters,
    quantization,
    qlora,
    galore,
    checkpointing,
    attention,
    fusion,
    stack,
    frontier,
    finetune,
)
STOPS = {module.STOP.topic: module.STOP for module in ORDER}


def stop(topic: str) -> Stop:
    """The stop of that name."""
    if topic not in STOPS:
        raise UserError(f"tour: no stop is called {topic!r}{nearest(topic, STOPS)}")
    return STOPS[topic]


def stops() -> Shown:
    """The list of them."""
    rows = [{"topic": one.topic, "about": one.about} for one in STOPS.values()]
    return Shown("", rows, {"jaxmem tour": lambda row: row["topic"], "shows": lambda row: row["about"]})


__all__ = ["SIMULATED", "STOPS", "Found", "Shown", "Stop", "Visit", "stop", "stops"]
