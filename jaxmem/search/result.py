"""What a search found, and of each config that did not win, why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxmem.config import Config, save_config
from jaxmem.errors import UserError
from jaxmem.planning import Target, readable
from jaxmem.search.candidates import overrides
from jaxmem.search.entries import Entries, Entry

TOGETHER = ("mesh", "optimizer", "rules", "adapter")  # sections that change as one
SHOWN = 2  # kinds of bytes that a reason names


@dataclass(frozen=True)
class Fit:
    """The result of a search."""

    given: Config
    target: Target
    known: Entries
    allow: tuple[str, ...]
    seconds: float
    helps: str | None = None  # the change that would help most, where nothing fits

    @cached_property
    def front(self) -> list[Entry]:
        """Fastest first: each next one needs less memory. All compiled, in every phase of a run."""
        return self.known.front()

    @property
    def best(self) -> Entry | None:
        return self.front[0] if self.front else None

    @property
    def smallest(self) -> Entry:
        """Of all that were compiled."""
        return min(self.known.compiled, key=lambda one: one.total)

    @cached_property
    def ranked(self) -> list[Entry]:
        """What fits, fastest first; then the rest, smallest first. Compiled ones before estimated ones."""

        def order(one: Entry) -> tuple[bool, bool, float]:
            fits = self.known.fits(one)
            return not fits, one.facts is None, one.seconds if fits else one.total

        return sorted(self.known.all, key=order)

    def why(self, one: Entry) -> str:
        """Why it is not the best."""
        if one is self.best:
            return "the fastest that fits"
        if one.refused:
            return one.refused
        about = "" if one.facts else "about "
        if not self.known.fits(one):
            host = f"{readable(one.host)} of host memory, of which there are {readable(self.target.host_memory)}"
            device = f"{readable(one.total)}: {_largest(one)}"
            reason = f"needs {about}{device if one.total > self.known.limit else host}"
            cure = self._cure(one)
            return f"{reason}; try {cure}" if cure else reason
        if one in self.front:
            return f"the fastest in {readable(one.total)}"
        assert self.best
        return f"{about}{one.seconds / self.best.seconds:.2f} x the time of the fastest"

    def _cure(self, one: Entry) -> str | None:
        """The one setting that would make it fit, at the least cost of time."""
        fitting = [other for other in self._neighbours(one) if self.known.fits(other)]
        if not fitting:
            return None
        cure = min(fitting, key=lambda other: (other.facts is None, other.seconds))
        old, new = one.candidate.settings, cure.candidate.settings
        return " ".join(overrides(cure.cfg, {key: value for key, value in new.items() if value != old[key]}))

    @cached_property
    def _by_settings(self) -> dict[tuple[Any, ...], Entry]:
        return {tuple(one.candidate.settings.values()): one for one in self.known.all}

    @cached_property
    def _values(self) -> dict[tuple[int, ...], set[tuple[Any, ...]]]:
        """Of each group of settings that change together (a section's), which values were tried."""
        groups: dict[str, list[int]] = {}
        for place, key in enumerate(self.known.all[0].candidate.settings):
            section = key.partition(".")[0]
            groups.setdefault(section if section in TOGETHER else key, []).append(place)
        rows = list(self._by_settings)
        return {tuple(places): {tuple(row[p] for p in places) for row in rows} for places in groups.values()}

    def _neighbours(self, one: Entry) -> list[Entry]:
        own, found = list(one.candidate.settings.values()), []
        for places, values in self._values.items():
            for value in values:
                changed = list(own)
                for place, new in zip(places, value, strict=True):
                    changed[place] = new
                if changed != own and (other := self._by_settings.get(tuple(changed))):
                    found.append(other)
        return found

    def write(self, path: str | Path) -> None:
        """The best config, as a file that `train` runs as it is."""
        save_best(self.best.cfg if self.best else None, path)

    def as_json(self) -> dict[str, Any]:
        return {
            "target": target_json(self.target, self.known.limit),
            "allow": list(self.allow),
            "considered": len(self.known.all),
            "compiled": len(self.known.compiled),
            "estimate_error": self.known.error,
            "candidates": [self._json(one) for one in self.ranked],
            "front": [self._json(one) for one in self.front],
            "best": self._json(self.best) if self.best else None,
            "smallest": self._json(self.smallest) if self.known.compiled else None,
            "helps": self.helps,
            "seconds": self.seconds,
        }

    def _json(self, one: Entry) -> dict[str, Any]:
        return {
            "config": dict(one.candidate.told),
            "total": int(one.total),
            "estimated_step_seconds": one.seconds,
            "fits": self.known.fits(one),
            "compiled": one.facts is not None,
            "why": self.why(one),
        }

    def table(self) -> Any:
        """For people."""
        from jaxmem.search.show import Report

        return Report(self)

    def figure(self, path: str | Path) -> None:
        """Memory against time of everything, as a PNG."""
        from jaxmem.search.show import draw

        draw(self, path)


def save_best(cfg: Config | None, path: str | Path) -> None:
    if cfg is None:
        raise UserError(f"{path}: nothing fits, so nothing was written")
    save_config(cfg, path)


def target_json(target: Target, limit: int) -> dict[str, Any]:
    return {"name": target.name, "devices": target.count, "limit_bytes": limit}


def _largest(one: Entry) -> str:
    kinds = sorted(one.kinds.items(), key=lambda kind: -kind[1])[:SHOWN]
    return ", ".join(f"{name} {readable(size)}" for name, size in kinds)
