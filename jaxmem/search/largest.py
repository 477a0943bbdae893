"""The largest model, sequence length or batch that fits.

The estimate proposes a value; this value and the next larger value are compiled in parallel. If the first fits and the
second does not, the search ends; otherwise their bytes correct the estimate, and the search continues between the
largest value that is known to fit and the smallest value that is known not to fit. Both bounds of the answer are
compiled.
"""

import bisect
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem.config import Config, Decoder
from jaxmem.config.combinations import value_of
from jaxmem.config.devices import batch_step, for_devices, resolve, time_parts
from jaxmem.config.load import config_of, read_config
from jaxmem.errors import UserError, nearest
from jaxmem.planning.targets import Target, usable_memory
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.search.candidates import Candidate, Space
from jaxmem.search.compilers import CompilerPool, RefusedError, compile_target
from jaxmem.search.fastest import SearchResult, Trials, target_json
from jaxmem.search.knobs import allowed
from jaxmem.typing import JsonDict

UNITS = {"model.layers": 1, "data.sequence_length": 128, "batch.global_size": 1}  # the unit in which each key grows
SEQUENCE = "data.sequence_length"
BATCH = "batch.global_size"  # for this key, powers of two below the largest value are compiled too
MAX_VALUE = 2**24  # layers, tokens or sequences at which the search ends
BISECT_AFTER = 6  # after this number of compiled values the search bisects, since the estimates do not converge


@dataclass(frozen=True)
class Point:
    """A value of the key, and the compiled config that needs the least memory for it."""

    value: int
    candidate: Candidate
    fits: bool

    @property
    def cfg(self) -> Config:
        return self.candidate.cfg


@dataclass(frozen=True)
class Largest(SearchResult):
    """The result of `maximize`: the largest value that fits, and the next value, which does not fit or is not valid."""

    given: Config
    key: str
    target: Target
    limit: int  # bytes per device
    points: tuple[Point, ...]  # ordered by value
    compiled: int
    seconds: float
    refusal: str | None = None  # why the next value is not valid; None: it is compiled

    @property
    def best(self) -> Point | None:
        return next((point for point in reversed(self.points) if point.fits), None)

    @property
    def beyond(self) -> Point | None:
        return next((point for point in self.points if not point.fits), None)

    def __repr__(self) -> str:
        largest = self.best.value if self.best else "none"
        return f"Largest({self.given.name} on {self.target.name}: {self.key}={largest} fits)"

    def as_json(self) -> JsonDict:
        points = {
            point.value: {"value": point.value, "rate": point.candidate.rate} | point.candidate.as_json(fits=point.fits)
            for point in self.points
        }
        return {
            "key": self.key,
            "target": target_json(self.target, self.limit),
            "best": points[self.best.value] if self.best else None,
            "beyond": points[self.beyond.value] if self.beyond else None,
            "points": list(points.values()),
            "refusal": self.refusal,
            "compiled": self.compiled,
            "seconds": self.seconds,
        }

    def table(self) -> str:
        unit = "tokens/s" if isinstance(self.given.model, Decoder) else "images/s"
        rows = [(self.key.split(".")[1], "memory", "step", unit, "")]
        for point in self.points:
            numbers = (
                f"{point.value:,}",
                format_bytes(point.candidate.total),
                format_seconds(point.candidate.seconds),
                f"{point.candidate.rate:,.0f}",
            )
            rows.append((*numbers, "fits" if point.fits else "does not fit"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [("  ".join(map(str.rjust, row[:-1], widths)) + f"  {row[-1]}").rstrip() for row in rows]
        best = f"{self.key}={self.best.value}" if self.best else "no value fits"
        if self.best and (changes := self.best.candidate.overrides):
            best += f" with {shlex.join(changes)}"
        head = f"{self.given.name} on {self.target.name}, {format_bytes(self.limit)} per device"
        lines += [self.refusal] if self.refusal else []
        return "\n".join([f"{head}: {self.compiled} compiled in {self.seconds:.0f} s", f"largest: {best}", *lines])


def maximize(
    cfg: Config,
    key: str,
    target: str | None = None,
    *,
    allow: Sequence[str] = (),
    reserve_gib: float | None = None,
) -> Largest:
    """The largest `model.layers`, `data.sequence_length` or `batch.global_size` that fits.

    Args:
        cfg: The config.
        key: The setting that grows.
        target: Devices such as `h100-80gb:8`; by default those of this machine.
        allow: Words for other settings that may change; for each value, the config that needs the least memory is
            compiled.
        reserve_gib: Memory of each GPU outside the compiled program.
    """
    aim = compile_target(target)
    with CompilerPool(aim, reserve_gib) as compilers:
        return search_largest(cfg, key, allow, compilers)


def search_largest(cfg: Config, key: str, allow: Sequence[str], compilers: CompilerPool) -> Largest:
    start = time.perf_counter()
    if key not in UNITS:
        raise UserError(f"--maximize {key} is unknown{nearest(key, UNITS)}")
    if key == BATCH and "batch" in allow:  # with more micro-batches any batch fits
        raise UserError(f"--maximize {key} does not support --allow batch; remove batch from --allow")
    search = _Search(cfg, key, allow, compilers)
    search.run()
    points = tuple(sorted(search.points.values(), key=lambda point: point.value))
    limit = search.trials.limit
    seconds = time.perf_counter() - start
    return Largest(cfg, key, compilers.target, limit, points, compilers.compiled, seconds, search.refusal)


class _Search:
    """A search for the largest value. Values are counted in units of the key."""

    def __init__(self, cfg: Config, key: str, allow: Sequence[str], compilers: CompilerPool) -> None:
        self._raw = cfg.model_dump(mode="json")
        self._user = cfg.user
        self._key = key
        self._compilers = compilers
        self._knobs = allowed(allow)
        target = compilers.target
        self.trials = Trials(target, usable_memory(target, cfg.memory, compilers.reserve_gib))
        self._unit = UNITS[key]
        if key == BATCH:  # one sequence per micro-batch on each device that shards the batch
            self._unit = batch_step(for_devices(cfg, target.count))
        elif key == SEQUENCE:
            self._unit = math.lcm(self._unit, time_parts(resolve(cfg, target.count)[0].mesh))
        self._given = max(1, (value_of(cfg, key) or 0) // self._unit)
        self._candidates: dict[int, Candidate | None] = {}
        self._ratio = 1.0  # compiled bytes / estimated bytes
        self.points: dict[int, Point] = {}
        self._refusals: dict[int, str] = {}  # for values without a valid config
        self.refusal: str | None = None  # why the value after the largest is not valid

    def run(self) -> None:
        """Compile values until `low` fits (or is below the first valid value) and `low + 1 == high` does not, or is not
        valid."""
        # Fewer layers than pipeline stages, or than kinds of layers, are not valid.
        least = next((units for units in range(1, self._given + 1) if self._candidate(units)), None)
        if least is None:
            raise UserError(self._refusals[1])
        low = least - 1
        high: int | None = None
        while high is None or high - low > 1:
            guess = self._guess(low, high)
            values = [units for units in (guess, guess + 1) if high is None or units < high]
            valid = [units for units in values if self._candidate(units)]
            if valid != values:
                high = min(units for units in values if units not in valid)
                valid = [units for units in valid if units < high]
            for point in self._compile(valid):
                units = point.value // self._unit
                if point.fits:
                    low = max(low, units)
                else:
                    high = units if high is None else min(high, units)
            if low * self._unit > MAX_VALUE:
                return
        self.refusal = self._refusals.get(high)
        if self._key == BATCH:
            powers = [1 << power for power in range(low.bit_length())]
            open_powers = [units for units in powers if units * self._unit not in self.points]
            self._compile([units for units in open_powers if self._candidate(units)])

    def _guess(self, low: int, high: int | None) -> int:
        """The largest value, strictly between the bounds, that fits by the estimate."""
        if high is None:
            high = low + 2
            while self._fits_by_estimate(high):
                high *= 2
        elif len(self.points) > BISECT_AFTER:
            return (low + high) // 2
        between = range(low + 1, high)
        fitting = bisect.bisect_left(between, True, key=lambda units: not self._fits_by_estimate(units))
        return between[max(fitting - 1, 0)]

    def _fits_by_estimate(self, units: int) -> bool:
        candidate = self._candidate(units)
        return candidate is not None and candidate.estimate.total * self._ratio <= self.trials.limit

    def _candidate(self, units: int) -> Candidate | None:
        """The config with the least estimated memory for a value; None: no config is valid, for the reason in
        `_refusals`."""
        if units not in self._candidates:
            value = units * self._unit
            reason: str | None = None
            valid: list[Candidate] = []
            try:
                original = config_of(read_config(self._raw, [f"{self._key}={value}"]), self._user)
                # The largest value leaves no memory for saved activations.
                cfg = original.replace(memory={"remat": "full"}) if original.memory.remat == "auto" else original
                all_candidates = Space(cfg, self._compilers.target, self._knobs, original=original).start()
                valid = [candidate for candidate in all_candidates if candidate.refusal is None]
                reason = all_candidates[0].refusal
            except UserError as error:
                reason = str(error)
            if not valid:
                self._refusals[units] = f"{self._key}={value} is not valid with this config: {reason}"
            self._candidates[units] = min(valid, key=lambda candidate: candidate.estimate.total, default=None)
        return self._candidates[units]

    def _compile(self, values: Sequence[int]) -> list[Point]:
        chosen = {}
        for units in values:
            candidate = self._candidate(units)
            assert candidate is not None
            chosen[candidate.cfg] = units * self._unit, candidate
        points = []
        for cfg, cost in self._compilers.ask_all(self._compilers.step, chosen):
            value, candidate = chosen[cfg]
            if isinstance(cost, RefusedError):
                raise UserError(f"{self._key}={value}: {cost}")
            candidate.cost = cost
            if self.trials.fits(candidate):
                try:
                    candidate.phases = self._compilers.phases(cfg)
                except RefusedError as error:
                    raise UserError(f"{self._key}={value}: {error}") from error
            if not cost.recomputed:
                self._ratio = cost.total / candidate.estimate.total
            self.points[value] = Point(value, candidate, self.trials.fits(candidate))
            points.append(self.points[value])
        return points
