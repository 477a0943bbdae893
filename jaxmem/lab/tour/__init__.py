"""`jaxmem tour TOPIC` shows a technique with numbers. A stop of the tour is an entry of stops.yaml and a module of the
same name, which is imported when the stop is visited."""

from pathlib import Path

import yaml

from jaxmem.errors import UserError, nearest
from jaxmem.lab.tour.stop import Stop
from jaxmem.lab.tour.table import Table

_ENTRIES = yaml.safe_load(Path(__file__).with_name("stops.yaml").read_text(encoding="utf-8"))
STOPS = {topic: Stop(topic, **entry) for topic, entry in _ENTRIES.items()}


def find_stop(topic: str) -> Stop:
    if topic not in STOPS:
        raise UserError(f"tour: unknown topic {topic!r}{nearest(topic, STOPS)}")
    return STOPS[topic]


def list_stops() -> Table:
    return Table("", [{"jaxmem tour": stop.topic, "shows": stop.about} for stop in STOPS.values()])
