"""All configs that a search considers: the given one with every combination of what may change, each with an estimate.

A millisecond each, so thousands are looked at and few compiled. Of a space larger than MOST a fixed sample is taken,
with everything that is one change away from the given config; a search then looks around the best of it.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.config import Config, Optimizer, Rules, load_config
from jaxmem.config.devices import for_devices, resolve
from jaxmem.errors import UserError
from jaxmem.machine.gpus import CPU
from jaxmem.planning import Target
from jaxmem.planning.predict import Estimate, estimate
from jaxmem.planning.share import loss_chunk, mlp_chunk
from jaxmem.quant.precision import compute_dtype
from jaxmem.search.knobs import Change, Knob
from jaxmem.sharding import STORAGE_AXES

MOST = 4000


@dataclass(frozen=True)
class Candidate:
    cfg: Config  # its mesh filled in
    settings: Change  # dotted key -> value, of everything that differs between candidates or from the given config
    changes: Change  # of those, what differs from the given config
    estimate: Estimate

    @property
    def told(self) -> Change:
        """The changes as one would write them."""
        return written(self.cfg, self.changes)

    @property
    def overrides(self) -> list[str]:
        """For the command line."""
        return overrides(self.cfg, self.changes)


def written(cfg: Config, changes: Change) -> Change:
    """Another optimizer as its whole section: each has other defaults, and none need be said."""
    others = {key: value for key, value in changes.items() if not key.startswith("optimizer.")}
    if len(others) == len(changes):
        return changes
    plain = Optimizer(name=cfg.optimizer.name)
    given = {field: value for field, value in cfg.optimizer if value != getattr(plain, field)}
    return {**others, "optimizer": {"name": cfg.optimizer.name, **given}}


def overrides(cfg: Config, changes: Change) -> list[str]:
    return [f"{key}={_yaml(value)}" for key, value in written(cfg, changes).items()]


class Space:
    """All configs that some knobs make of one."""

    def __init__(self, cfg: Config, target: Target, knobs: Sequence[Knob]) -> None:
        self._cfg, self._target = cfg, target
        given = resolve(cfg, target.count)[0]
        self._choices = [choices for knob in knobs if (choices := _with_own(given, list(knob.choices(cfg, target))))]
        self._keys = sorted({key for choice in itertools.chain(*self._choices) for key in choice})
        self._known: set[Config] = set()
        self._given = given.model_copy(update={"rules": _plain(given)})
        self.is_sampled = math.prod(map(len, self._choices)) > MOST

    def begin(self) -> list[Candidate]:
        """The config itself, where it is valid on the target, then all others, or a sample of them."""
        return self._new(self._cfg, itertools.chain([{}], _combined(self._choices)))

    def around(self, one: Candidate) -> list[Candidate]:
        """Those not seen yet that differ from one in a single setting."""
        return self._new(one.cfg, itertools.chain(*self._choices))

    def _new(self, cfg: Config, all_changes: Iterable[Change]) -> list[Candidate]:
        raw = cfg.model_dump(mode="json")
        found = []
        for changes in all_changes:
            other = _changed(raw, changes, self._target)
            if other is not None:
                if other.mesh.fsdp == 1:  # no stage of ZeRO has anything to do
                    other = other.model_copy(update={"zero": self._cfg.zero})
                other = other.model_copy(update={"rules": _plain(other)})
                same = _same(other, self._target)
                if same not in self._known:
                    self._known.add(same)
                    found.append(other)
        return [self._candidate(other) for other in found]

    def _candidate(self, cfg: Config) -> Candidate:
        settings = {key: _at(cfg, key) for key in self._keys}
        changes = {key: value for key, value in settings.items() if value != _at(self._given, key)}
        return Candidate(cfg, settings, changes, estimated(cfg, self._target))


def candidates(cfg: Config, target: Target, knobs: Sequence[Knob]) -> list[Candidate]:
    """What a space begins with; an error that says why where it has nothing."""
    return begun(Space(cfg, target, knobs), cfg, target)


def begun(space: Space, cfg: Config, target: Target) -> list[Candidate]:
    found = space.begin()
    if not found:
        for_devices(cfg, target.count)  # says why not
        raise UserError(f"{cfg.name}: nothing that may change makes a valid config on {target.name}")
    return found


def estimated(cfg: Config, target: Target) -> Estimate:
    """Of a CPU, seconds only compare."""
    platform = "cpu" if target.is_cpu else "gpu"
    return estimate(cfg, platform, target.gpu or CPU, target.per_host)


def _with_own(cfg: Config, choices: list[Change]) -> list[Change]:
    """What the config itself says is a choice too."""
    raw = cfg.model_dump()
    own = (
        {key: functools.reduce(lambda section, name: section[name], key.split("."), raw) for key in choices[0]}
        if choices
        else {}
    )
    return choices if own in choices else [own, *choices]


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
    given = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for key, value in changes.items():
        *section, name = key.split(".")
        (given[section[0]] if section else given)[name] = value
    try:
        cfg = load_config(given)
    except UserError:
        return None
    resolved, problems = resolve(cfg, target.count)
    return None if problems else resolved


def _same(cfg: Config, target: Target) -> Config:
    """One form for configs that come to the same program."""
    platform = "cpu" if target.is_cpu else "gpu"
    precision = cfg.precision.model_copy(update={"compute": compute_dtype(cfg.precision, platform).name})
    chunks = {"loss_chunk": loss_chunk(cfg, platform) or "auto", "mlp_chunk": mlp_chunk(cfg, platform) or "auto"}
    memory = cfg.memory.model_copy(update=chunks)
    return cfg.model_copy(update={"precision": precision, "memory": memory})


def _plain(cfg: Config) -> Rules:
    """The same table in the most usual words: what it says of axes of one device, or where all is whole, is nothing."""
    split = [axis for axis in ("tensor", *(STORAGE_AXES if cfg.zero else ())) if getattr(cfg.mesh, axis) > 1]
    usual = Rules().table
    plain: dict[str, Any] = {}
    for dim, over in cfg.rules.table.items():
        forms = (
            [usual[dim], ()] if dim in ("embed", "vocab") else [usual[dim], ("tensor", *STORAGE_AXES), STORAGE_AXES, ()]
        )
        acts = [axis for axis in over if axis in split]
        plain[dim] = next((form for form in forms if [axis for axis in form if axis in split] == acts), over)
    return Rules(**plain)


def _at(cfg: Config, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _yaml(value: Any) -> str:
    """As an override is written.

    >>> _yaml(None), _yaml(True), _yaml(2), _yaml("full")
    ('null', 'true', '2', 'full')
    >>> _yaml({"name": "lion", "beta1": 0.8}), _yaml(("fsdp",))
    ('{name: lion, beta1: 0.8}', '[fsdp]')
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_yaml, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
