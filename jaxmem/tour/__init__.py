"""Each technique with its number: `jaxmem tour TOPIC`."""

from __future__ import annotations

from jaxmem.errors import UserError, nearest
from jaxmem.tour.finetune import fine_tuned
from jaxmem.tour.gpu import bytes_counted
from jaxmem.tour.memory import by_technique
from jaxmem.tour.stops import Stop, Stopped

STOPS = {
    stop.topic: stop
    for stop in (
        Stop("memory", "one technique after the other, and the bytes that each leaves", by_technique),
        Stop("finetune", "a small model trained, fine-tuned by QLoRA, exported and talked to, here", fine_tuned, True),
        Stop("gpu", "a sliding window, a matrix product: the bytes that they ask for, and times", bytes_counted, True),
    )
}


def visit(topic: str | None = None, target: str | None = None) -> list[Stopped]:
    """One stop; without a topic, the list of them."""
    if topic is None:
        rows = [{"topic": stop.topic, "about": stop.about} for stop in STOPS.values()]
        columns = {"jaxmem tour": lambda row: row["topic"], "shows": lambda row: row["about"]}
        return [Stopped("stops", "", rows, columns, 0.0)]
    if topic not in STOPS:
        raise UserError(f"tour: no stop is called {topic!r}{nearest(topic, STOPS)}")
    return [STOPS[topic].run(target)]


__all__ = ["STOPS", "Stop", "Stopped", "visit"]
