"""All configs that a search considers: a config with every combination of the settings that may change.

Each is estimated, which takes a millisecond. If there are more than MAX_SIZE configs, the search begins with a fixed
sample, and with all configs that differ from the given config in a single setting; then it adds neighbours of the best.
"""

import contextlib
import functools
import itertools
import math
import random
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmem.config import Config, Decoder
from jaxmem.config.combinations import value_of
from jaxmem.config.devices import for_devices, resolve
from jaxmem.config.load import config_of
from jaxmem.config.user import UserObjects
from jaxmem.errors import UserError, as_yaml, one_line
from jaxmem.estimate.memory import Estimate
from jaxmem.estimate.passes import loss_chunk, mlp_chunk
from jaxmem.planning.advice import FASTER, slow_settings
from jaxmem.planning.budget import estimated, resolved_on
from jaxmem.planning.result import PlanWarning
from jaxmem.planning.targets import Target
from jaxmem.quant.precision import compute_dtype
from jaxmem.search.knobs import Change, Knob
from jaxmem.search.worker import StepCost
from jaxmem.sharding.share import share_of
from jaxmem.sharding.table import STORAGE_AXES
from jaxmem.typing import JsonDict, JsonView

MAX_SIZE = 4000  # configs; more are sampled
MIN_MEMORY_GAIN = 0.01  # a config on a front needs at least this share less memory than each faster config


@dataclass(eq=False)
class Candidate:
    """A config of a search. Its bytes and seconds are estimated, corrected by other results, or compiled."""

    cfg: Config  # with its mesh resolved
    given: Config  # the config that the user wrote
    settings: Change  # dotted key -> value, for all settings that differ between candidates
    distance: int  # number of settings that differ from the given config
    estimate: Estimate
    refusal: str | None = None  # the reason if the config cannot be traced or compiled
    cost: StepCost | None = None  # the cost of the compiled step
    phases: dict[str, int] | None = None  # bytes of each compiled phase besides the step, such as initialise
    bytes_ratio: float = 1.0  # compiled / estimated bytes of the most similar compiled configs
    seconds_ratio: float = 1.0

    @property
    def total(self) -> float:
        """Bytes per device in the largest phase."""
        if self.cost is None:
            return self.bytes_ratio * self.estimate.total
        return max([self.cost.total, *(self.phases or {}).values()])

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.cost.seconds if self.cost else self.seconds_ratio * (self.estimate.seconds or 0.0)

    @property
    def rate(self) -> float:
        """Tokens per second on all devices; for image models, images per second."""
        length = self.cfg.data.sequence_length if isinstance(self.cfg.model, Decoder) else 1
        return self.cfg.batch.global_size * length / self.seconds

    @property
    def changes(self) -> Change:
        return difference(self.given, self.cfg)

    @property
    def overrides(self) -> list[str]:
        return overrides(self.changes)

    @property
    def description(self) -> str:
        return shlex.join(self.overrides) or "no change"

    def as_json(self, *, fits: bool) -> JsonDict:
        size = int(self.total)
        return {"config": dict(self.changes), "total": size, "estimated_step_seconds": self.seconds, "fits": fits}

    def slow_settings(self, target: Target, limit: int) -> list[PlanWarning]:
        """Settings that the search did not change, each with a value for which a step is much shorter."""
        keys = [key for key in FASTER if key not in self.settings]
        return list(slow_settings(self.cfg, target, limit, keys))

    @property
    def is_pending(self) -> bool:
        return self.cost is None and self.refusal is None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory per device."""
        return self.cost.host if self.cost else self.estimate.host

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of a step by kind."""
        if self.cost:
            return dict(self.cost.kinds)
        categories = {name: size for name, size in self.estimate.categories.items() if name != "activations"}
        return categories | self.estimate.kinds


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that need less memory than all faster ones, fastest first."""
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.total)):
        if candidate.refusal is None and (not chosen or candidate.total < (1 - MIN_MEMORY_GAIN) * chosen[-1].total):
            chosen.append(candidate)
    return chosen


def difference(old: Config, new: Config) -> JsonDict:
    """The settings of `new` that differ from `old`, by dotted key."""
    changes: JsonDict = {}
    for section, fields in new.model_dump(mode="json").items():
        before = getattr(old, section)
        after = getattr(new, section)
        if before == after:
            continue
        if not isinstance(fields, dict) or type(before) is not type(after):
            changes[section] = fields
        else:
            changed = (field for field, value in after if value != getattr(before, field))
            changes |= {f"{section}.{field}": fields[field] for field in changed}
    return changes


def overrides(changes: Change) -> list[str]:
    """Changes as `key=value` for the command line."""
    return [f"{key}={as_yaml(value)}" for key, value in changes.items()]


class Space:
    """All configs that differ from one config in the settings of some knobs."""

    def __init__(self, cfg: Config, target: Target, knobs: Sequence[Knob], original: Config | None = None) -> None:
        """`original`: the config as the user wrote it, if it differs: its `memory.remat` may be auto."""
        self._cfg = cfg
        self._target = target
        start = resolve(cfg, target.count)[0]
        listed = [_with_given(start, list(knob.choices(cfg, target))) for knob in knobs]
        self._choices = [choices for choices in listed if choices]
        self._keys = sorted({key for choice in itertools.chain(*self._choices) for key in choice})
        self.is_sampled = math.prod(map(len, self._choices)) > MAX_SIZE
        self._seen: set[Config] = set()
        self._given = resolve(original or cfg, target.count)[0]

    def start(self) -> list[Candidate]:
        """The config itself if the target supports it, then all others, or a sample of them."""
        candidates = self._new(self._cfg, itertools.chain([{}], _combinations(self._choices)))
        if not candidates:
            for_devices(self._cfg, self._target.count)  # raises with the reason
            raise UserError(
                f"{self._cfg.name}: no combination of the settings of --allow is valid on {self._target.name};"
                " use --allow mesh, or another number of devices"
            )
        return candidates

    def neighbors(self, candidate: Candidate) -> list[Candidate]:
        """New candidates that differ from this one in a single setting."""
        return self._new(candidate.cfg, itertools.chain(*self._choices))

    def _new(self, cfg: Config, all_changes: Iterable[Change]) -> list[Candidate]:
        raw = cfg.model_dump(mode="json")
        candidates: list[Candidate] = []
        for changes in all_changes:
            other = _changed(raw, changes, self._target, cfg.user)
            if other is None:
                continue
            if all(getattr(other.mesh, axis) == 1 for axis in (*STORAGE_AXES, *other.rules.optimizer)):
                # ZeRO shards nothing.
                other = other.replace(zero=self._cfg.zero)
            canonical = _canonical(other, self._target)
            if canonical not in self._seen:
                self._seen.add(canonical)
                candidates.append(self._candidate(other))
        return candidates

    def _candidate(self, cfg: Config) -> Candidate:
        settings = {key: value_of(cfg, key) for key in self._keys}
        distance = sum(value != value_of(self._given, key) for key, value in settings.items())
        try:
            return Candidate(cfg, self._given, settings, distance, estimated(cfg, self._target))
        except Exception as failure:  # noqa: BLE001 - a config that cannot be traced must not end the search
            return Candidate(cfg, self._given, settings, distance, Estimate({}, {}, None), one_line(failure))


def _with_given(cfg: Config, choices: list[Change]) -> list[Change]:
    """The choices, and the values of the config itself if they are not among them."""
    if not choices:
        return []
    raw = cfg.model_dump()
    given = {key: functools.reduce(dict.__getitem__, key.split("."), raw) for key in choices[0]}
    return choices if given in choices else [given, *choices]


def _combinations(choices: Sequence[Sequence[Change]]) -> Iterator[Change]:
    sizes = [len(alternatives) for alternatives in choices]
    total = math.prod(sizes)
    if total <= MAX_SIZE:
        picked: Iterable[Sequence[Change]] = itertools.product(*choices)
    else:
        places = random.Random(0).sample(range(total), MAX_SIZE)  # noqa: S311 - the same in every run
        indices = zip(*np.unravel_index(places, sizes, order="F"), strict=True)
        picked = ([alternatives[i] for alternatives, i in zip(choices, row, strict=True)] for row in indices)
        yield from itertools.chain(*choices)
    for changes in picked:
        yield {key: value for change in changes for key, value in change.items()}


def _changed(raw: JsonView, changes: Change, target: Target, user: UserObjects) -> Config | None:
    """The config with these changes; None if it is not valid on the target."""
    given = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for key, value in changes.items():
        *section, name = key.split(".")
        (given[section[0]] if section else given)[name] = value
    if given["mesh"]["stage"] == 1:
        given["pipeline"] = {}
    if given["mesh"]["context"] == 1:
        given["mesh"]["context_method"] = "auto"
    try:
        cfg = config_of(given, user)
    except UserError:
        return None
    resolved, problems = resolve(cfg, target.count)
    return None if problems else resolved


def _canonical(cfg: Config, target: Target) -> Config:
    """One config for all configs that compile to the same program."""
    with contextlib.suppress(UserError):  # a kernel does not support the config, which the estimate reports
        cfg = resolved_on(cfg, target)
    compute = compute_dtype(cfg.precision, target.platform)
    arguments = cfg.memory, share_of(cfg), compute
    chunks = {"loss_chunk": loss_chunk(*arguments) or "auto", "mlp_chunk": mlp_chunk(*arguments) or "auto"}
    return cfg.replace(precision={"compute": compute.name}, memory=chunks)
