"""All configs that a search considers: the given one with every combination of what may change, each with an estimate.

A millisecond each, so thousands are looked at and few compiled. Of a space larger than MOST a fixed sample is taken,
with everything that is one change away from the given config.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.config import Config, load_config
from jaxmem.config.mesh import resolve
from jaxmem.errors import UserError
from jaxmem.hardware import CPU
from jaxmem.planning import Target
from jaxmem.planning.predict import Estimate, estimate, loss_chunk
from jaxmem.precision import compute_dtype
from jaxmem.search.knobs import Change, Knob

MOST = 8000


@dataclass(frozen=True)
class Candidate:
    cfg: Config  # its mesh filled in
    settings: Change  # dotted key -> value, of everything that differs between candidates or from the given config
    changes: Change  # of those, what differs from the given config
    estimate: Estimate

    @property
    def overrides(self) -> list[str]:
        """For the command line."""
        return [f"{key}={_yaml(value)}" for key, value in self.changes.items()]

    def distance(self, other: Candidate) -> int:
        """How many settings differ."""
        return sum(self.settings[key] != other.settings[key] for key in self.settings)


def candidates(cfg: Config, target: Target, knobs: Sequence[Knob]) -> list[Candidate]:
    """The config itself, where it is valid on the target, then all others."""
    choices = [list(knob.choices(cfg, target)) for knob in knobs]
    raw = cfg.model_dump(mode="json")
    found: dict[Config, Config] = {}
    for changes in itertools.chain([{}], _combined(choices)):
        with_changes = _changed(raw, changes, target)
        if with_changes is not None:
            if with_changes.mesh.fsdp == 1:  # no stage of ZeRO has anything to do
                with_changes = with_changes.model_copy(update={"zero": cfg.zero})
            found.setdefault(_same(with_changes, target), with_changes)
    given = next(iter(found.values()), None)
    if given is None:
        cfg.for_devices(target.count)  # says why not
        raise UserError(f"{cfg.name}: nothing that may change makes a valid config on {target.name}")
    given = resolve(cfg, target.count)[0]
    keys = sorted({key for choice in itertools.chain(*choices) for key in choice})
    return [_candidate(one, given, keys, target) for one in found.values()]


def estimated(cfg: Config, target: Target) -> Estimate:
    """Of a CPU, seconds only compare."""
    platform = "cpu" if target.is_cpu else "gpu"
    return estimate(cfg, platform, target.gpu or CPU, target.per_host)


def _combined(choices: Sequence[Sequence[Change]]) -> Iterator[Change]:
    sizes = [len(each) for each in choices]
    total = math.prod(sizes)
    if total <= MOST:
        picked: Iterator[Sequence[Change]] = itertools.product(*choices)
    else:
        places = random.Random(0).sample(range(total), MOST)  # noqa: S311 - the same in every run
        picked = ([each[i] for each, i in zip(choices, _digits(place, sizes), strict=True)] for place in places)
        yield from itertools.chain(*choices)
    for changes in picked:
        yield {key: value for change in changes for key, value in change.items()}


def _digits(place: int, sizes: Sequence[int]) -> list[int]:
    digits = []
    for size in sizes:
        place, digit = divmod(place, size)
        digits.append(digit)
    return digits


def _changed(raw: Mapping[str, Any], changes: Change, target: Target) -> Config | None:
    try:
        cfg = load_config(raw, [f"{key}={_yaml(value)}" for key, value in changes.items()])
    except UserError:
        return None
    resolved, problems = resolve(cfg, target.count)
    return None if problems else resolved


def _same(cfg: Config, target: Target) -> Config:
    """One form for configs that come to the same program."""
    platform = "cpu" if target.is_cpu else "gpu"
    precision = cfg.precision.model_copy(update={"compute": compute_dtype(cfg.precision, platform).name})
    memory = cfg.memory.model_copy(update={"loss_chunk": loss_chunk(cfg, platform) or "auto"})
    return cfg.model_copy(update={"precision": precision, "memory": memory})


def _candidate(cfg: Config, given: Config, keys: Sequence[str], target: Target) -> Candidate:
    settings = {key: _at(cfg, key) for key in keys}
    changes = {key: value for key, value in settings.items() if value != _at(given, key)}
    return Candidate(cfg, settings, changes, estimated(cfg, target))


def _at(cfg: Config, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _yaml(value: Any) -> str:
    """As an override is written.

    >>> _yaml(None), _yaml(True), _yaml(2), _yaml("full")
    ('null', 'true', '2', 'full')
    """
    return json.dumps(value) if value is None or isinstance(value, bool | list | tuple | dict) else str(value)
