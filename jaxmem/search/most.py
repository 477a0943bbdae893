"""The inverse question: how large may one number of a config become until it fits no more.

The estimate proposes a value; it and the next one up are compiled side by side. Where the first fits and the second
does not, that is the answer; otherwise what they took corrects the estimate, and the search goes on between what is
known to fit and what is known not to. Both bounds of the answer are compiled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmem.config import Config, Decoder, load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError, nearest
from jaxmem.planning import Target, readable
from jaxmem.planning.targets import usable
from jaxmem.planning.text import duration
from jaxmem.search.candidates import Candidate, candidates
from jaxmem.search.compilers import Compilers, RefusedError
from jaxmem.search.entries import Entries
from jaxmem.search.facts import Facts
from jaxmem.search.knobs import allowed
from jaxmem.search.result import save_best, target_json

# What can be maximized, the unit in which it grows, and the words of `allow` that would make it grow without end.
UNITS = {"model.layers": 1, "data.sequence_length": 128, "batch.global_size": 1}
ENDLESS = {"batch.global_size": "batch"}  # in more micro-batches any batch fits
CURVES = ("batch.global_size",)  # of which also each power of two below is compiled
MOST = 2**24


@dataclass(frozen=True)
class Tried:
    """One value, with the config that needs least."""

    value: int
    candidate: Candidate
    total: int
    fits: bool
    seconds: float  # of a step, estimated from the compiled program

    @property
    def rate(self) -> float:
        """Tokens a second, of all devices; of pictures, pictures."""
        cfg = self.candidate.cfg
        length = cfg.data.sequence_length if isinstance(cfg.model, Decoder) else 1
        return cfg.batch.global_size * length / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "config": dict(self.candidate.told),
            "total": self.total,
            "fits": self.fits,
            "estimated_step_seconds": self.seconds,
            "rate": self.rate,
        }


@dataclass(frozen=True)
class Most:
    """The largest value that fits, and the next, which does not."""

    key: str
    target: Target
    limit: int
    tried: tuple[Tried, ...]
    compiled: int
    seconds: float

    @property
    def best(self) -> Tried | None:
        return max((one for one in self.tried if one.fits), key=lambda one: one.value, default=None)

    @property
    def beyond(self) -> Tried | None:
        return min((one for one in self.tried if not one.fits), key=lambda one: one.value, default=None)

    @property
    def curve(self) -> list[Tried]:
        """Of a batch's size: what is tried up to the largest that fits, and the next."""
        return list(self.tried) if self.key in CURVES else []

    def figure(self, path: str | Path) -> None:
        """Memory and rate by the size of a batch, as a PNG."""
        from jaxmem.search.show import draw_curve

        check_drawn(self.key, path)
        draw_curve(self, path)

    def write(self, path: str | Path) -> None:
        save_best(self.best.candidate.cfg if self.best else None, path)

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "target": target_json(self.target, self.limit),
            "best": self.best.as_json() if self.best else None,
            "beyond": self.beyond.as_json() if self.beyond else None,
            "curve": [one.as_json() for one in self.curve],
            "tried": [one.as_json() for one in self.tried],
            "compiled": self.compiled,
            "seconds": self.seconds,
        }

    def table(self) -> str:
        lines = [f"{self.key} on {self.target.name}: {self.compiled} compiled in {self.seconds:.0f} s"]
        for one, said in ((self.best, "fits"), (self.beyond, "does not fit")):
            if one:
                settings = " ".join([f"{self.key}={one.value}", *one.candidate.overrides])
                lines.append(f"{said}: {settings}: {readable(one.total)} of {readable(self.limit)}")
        lines += [
            f"  {one.value:>8,}  {readable(one.total):>10}  {duration(one.seconds):>8}  {one.rate:>12,.0f} a second"
            for one in self.curve
        ]
        return "\n".join(lines)


def check_drawn(key: str, path: str | Path) -> None:
    """Before a search: whether its result is a figure."""
    if key in UNITS and key not in CURVES:
        raise UserError(f"--png {path}: --maximize {key} draws none; leave one out, or maximize {', '.join(CURVES)}")


def maximize(cfg: Config, target: Target, key: str, allow: Sequence[str], compilers: Compilers) -> Most:
    """`key` is one of UNITS; of each value the config with the least memory that `allow` permits is tried."""
    start = time.perf_counter()
    if key not in UNITS:
        raise UserError(f"maximize: {key!r} is not among {', '.join(UNITS)}{nearest(key, UNITS)}")
    if ENDLESS.get(key) in allow:
        raise UserError(f"maximize: with allow {ENDLESS[key]}, {key} grows without end; leave it out")
    search = _Search(cfg, target, key, allow, compilers)
    search.run()
    tried = tuple(sorted(search.tried.values(), key=lambda one: one.value))
    return Most(key, target, search.limit, tried, compilers.compiled, time.perf_counter() - start)


class _Search:
    def __init__(self, cfg: Config, target: Target, key: str, allow: Sequence[str], compilers: Compilers) -> None:
        self._raw, self._target, self._key, self._compilers = cfg.model_dump(mode="json"), target, key, compilers
        self._knobs = allowed(allow)
        self._entries = Entries(target, usable(target, cfg, compilers.reserve_gib))
        self._unit = UNITS[key] if key != "batch.global_size" else _rows(cfg, target)
        self._least: dict[int, Candidate | None] = {}
        self._ratio = 1.0  # compiled to estimated
        self.tried: dict[int, Tried] = {}

    @property
    def limit(self) -> int:
        return self._entries.limit

    def run(self) -> None:
        """In units: `low` fits (0 is nothing), `high` does not."""
        low, high = 0, None
        while high is None or high - low > 1:
            guess = self._expected(low, high)
            wanted = [value for value in (guess, guess + 1) if high is None or value < high]
            for value in self._compile(wanted):
                if value.fits:
                    low = max(low, value.value // self._unit)
                else:
                    units = value.value // self._unit
                    high = units if high is None else min(high, units)
            if low * self._unit > MOST:
                return
        if self._key in CURVES:
            doubled = [1 << power for power in range(low.bit_length())]
            self._compile([units for units in doubled if units * self._unit not in self.tried])

    def _expected(self, low: int, high: int | None) -> int:
        """The largest that the estimate lets fit, strictly between what is known."""
        top = low + 1
        while high is None and self._hopeful(top):
            top *= 2
        bottom, top = low, high if high is not None else top
        while top - bottom > 1:
            middle = (bottom + top) // 2
            bottom, top = (middle, top) if self._hopeful(middle) else (bottom, middle)
        least, most = low + 1, (high - 1 if high is not None else top)
        if len(self.tried) > 6 and high is not None:  # estimates that do not converge: halves do
            return (low + high) // 2
        return min(max(bottom, least), most)

    def _hopeful(self, units: int) -> bool:
        one = self._smallest(units)
        return one is not None and one.estimate.total * self._ratio <= self.limit

    def _smallest(self, units: int) -> Candidate | None:
        """The config with the least memory for a value, by estimate."""
        if units not in self._least:
            try:
                cfg = load_config(self._raw, [f"{self._key}={units * self._unit}"])
                every = candidates(cfg, self._target, self._knobs)
            except UserError:
                if units == 1:
                    raise
                every = []
            self._least[units] = min(every, key=lambda one: one.estimate.total, default=None)
        return self._least[units]

    def _compile(self, wanted: Sequence[int]) -> list[Tried]:
        chosen = {one.cfg: (units, one) for units in wanted if (one := self._smallest(units))}
        found = []
        for cfg, facts in self._compilers.each(self._compilers.step, chosen):
            units, candidate = chosen[cfg]
            if isinstance(facts, RefusedError):
                raise UserError(f"{self._key}={units * self._unit}: {facts}")
            found.append(self._judged(units, candidate, facts))
        for units in wanted:
            if units not in {one.value // self._unit for one in found}:
                raise UserError(f"{self._key}={units * self._unit}: no config is valid with it")
        return found

    def _judged(self, units: int, candidate: Candidate, facts: Facts) -> Tried:
        total, fits = facts.total, facts.total <= self.limit and facts.host <= self._target.host_memory
        if fits:
            for _, phases in self._compilers.each(self._compilers.phases, [candidate.cfg]):
                total = max(total, *phases.values())
            fits = total <= self.limit
        if not facts.recomputed:
            self._ratio = facts.total / candidate.estimate.total
        one = Tried(units * self._unit, candidate, total, fits, facts.seconds)
        self.tried[one.value] = one
        return one


def _rows(cfg: Config, target: Target) -> int:
    """By how many sequences a batch grows: one a device that splits it and micro-batch."""
    mesh = for_devices(cfg, target.count).mesh
    return cfg.batch.accumulate * mesh.replica * mesh.fsdp
