"""What a process does with one shape of an operation: errors first, with results written over NaN, then times.

A row reports a contestant's pass as soon as it is known: `check` and its error, then its times, their ratios to the
others, and to this device's own matmul or copy, all of the same turns; or the reason for their absence.
"""

import datetime as dt
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxmem.lab.bench.contest import CEILING, RIGHT, Call, Contestant, Row, Say, ceilings, error_line, take_turns
from jaxmem.lab.bench.operations import OPERATIONS
from jaxmem.lab.bench.torch_kernels import PEERS, wait
from jaxmem.lab.bench.work import BenchPass, BenchWork
from jaxmem.machine import devices

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("nvidia-cublas", "nvidia-cuda-nvcc", "triton", "jax-triton", "torch", "bitsandbytes", "torchao"),
)


@dataclass(frozen=True)
class BenchSelection:
    """What a command measures. Empty: the operation's usual shapes, all contestants, all passes."""

    shapes: tuple[str, ...] = ()
    operation: str | None = None
    only: tuple[str, ...] = ()  # contestants, or a contestant's pass
    without: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()  # whose block sizes are tuned
    seconds: float = 5.0  # of each shape or kernel, about

    def has(self, name: str, of: str, without: Sequence[str]) -> bool:
        """Whether a contestant's pass is selected. A name stands for all that begin with its words: `torch` for `torch
        flash`, `mosaic` for its passes.

        >>> BenchSelection().has("torch flash", "forward", ["torch"])
        False
        >>> BenchSelection(only=("mosaic forward",)).has("mosaic", "forward", ())
        True
        """
        words = f"{name} {of} ".replace("  ", " ")
        # `only` may name one pass of a peer that is made with all passes at once.
        asked = not self.only or any(words.startswith(f"{one} ") or f"{one} ".startswith(words) for one in self.only)
        return asked and not any(words.startswith(f"{one} ") for one in without)


@dataclass(frozen=True)
class Job:
    """A shape of an operation, and what to measure of it."""

    operation: str
    shape: str
    selection: BenchSelection
    dry: bool = False
    check: bool = False  # with every option, and without times
    peers: bool = True
    known: tuple[Row, ...] = ()  # entries of the table that need not be measured
    table: Mapping[str, Any] = field(default_factory=dict)  # block sizes of calls

    @property
    def sizes(self) -> Any:
        return OPERATIONS[self.operation].shape(self.shape, dry=self.dry)


def where(_: None, **__: Any) -> Iterator[Row]:
    """The device, its versions, and the time."""
    device, gpus = jax.devices()[0], devices.nvidia_gpus()
    yield {
        "device": device.device_kind,
        "dry_run": device.platform == "cpu",
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "driver": gpus[0]["driver"] if gpus else None,
        "gpus": gpus,
        "versions": devices.package_versions(PACKAGES),
    }


def measured(job: Job, *, done: Sequence[Row], without: Sequence[str], say: Say) -> Iterator[Row]:
    """Errors, then times, of all contestants."""
    checked = [row for row in done if "check" in row]
    for row in _checks(job, checked, without, say):
        checked.append(row)
        yield row
    if job.check:
        return
    refused = {(row.get("contestant"), row.get("pass")) for row in (*done, *checked) if "why_not" in row}
    contestants: list[Contestant] = []
    for name, of, make in _candidates(job):
        if not job.selection.has(name, of or "", without) or (name, of) in refused:
            continue
        say(f"{name} {of or ''}".strip())
        try:
            made = make()
        except Exception as error:  # noqa: BLE001 (each compiler and library has errors of its own)
            yield {"contestant": name} | ({"pass": of} if of else {}) | {"why_not": error_line(error)}
        else:
            contestants += [one for one in made if job.selection.has(name, one.of, without)]
    for row in _timed(job, contestants, checked, say):
        yield {"sizes": job.sizes._asdict()} | row


def _candidates(job: Job) -> Iterator[tuple[str, str | None, Any]]:
    """Name, pass, and a function that makes contestants; a peer makes all its passes at once."""
    own = OPERATIONS[job.operation]
    work = own.work(job.sizes)

    def contestant(name: str, of: str, call: Call, wait: Any = jax.block_until_ready) -> Contestant:
        return Contestant(name, of, call, wait, work.passes[of].amount, work.unit)

    def compile_pass(name: str, of: str) -> list[Contestant]:
        return [contestant(name, of, work.passes[of].compiled(name, work))]

    def make_peer(name: str) -> list[Contestant]:
        calls = PEERS[job.operation][name](job.sizes)
        return [contestant(name, of, call, wait) for of, call in calls.items()]

    for name in (*own.implementations, *(own.others if job.peers else ())):
        for of in work.passes:
            yield name, of, partial(compile_pass, name, of)
    for name in PEERS.get(job.operation, ()) if job.peers else ():
        yield name, None, partial(make_peer, name)


def _checks(job: Job, done: Sequence[Row], without: Sequence[str], say: Say) -> Iterator[Row]:
    own = OPERATIONS[job.operation]
    known = {(row["check"], row["contestant"], row["pass"]) for row in done}
    checks = {"as it is": lambda: own.work(job.sizes)} if own.checks is None else own.checks(job.sizes)
    for check in checks if job.check else list(checks)[:1]:
        say(f"float64 {check}")
        work = checks[check]()
        for of, one in work.passes.items():
            names = [name for name in own.implementations if job.selection.has(name, of, without)]
            names = [name for name in names if (check, name, of) not in known]
            if not names:
                continue
            say(f"float64 {of}")
            wanted = one.wanted(work)
            for name in names:
                say(f"{name} {of}")
                yield {"contestant": name, "pass": of, "check": check} | _error(one, name, work, wanted)


def _error(one: BenchPass, name: str, work: BenchWork, wanted: Any) -> Row:
    try:
        error = one.error(name, work, wanted)
    except Exception as refusal:  # noqa: BLE001 (each compiler has errors of its own)
        return {"why_not": error_line(refusal)}
    return {"right": error <= RIGHT, "error": error if error < float("inf") else None}


def _timed(job: Job, contestants: Sequence[Contestant], checked: Sequence[Row], say: Say) -> Iterator[Row]:
    """Rows of contestants, the device's limits first. A pass is compared with others of its kind, but not with own
    implementations, except those in plain JAX."""
    own = OPERATIONS[job.operation]
    compared = {"reference", own.plain, *own.others, *PEERS.get(job.operation, ())}
    limits = {one.unit: one for one in ceilings(256 if job.dry else 8192)} if contestants else {}
    take_turns([*contestants, *limits.values()], job.selection.seconds, say)
    for one in [*contestants, *limits.values()][::-1]:
        row = {"contestant": one.name, "pass": one.of}
        if one.failed is not None:
            yield row | {"why_not": one.failed}
            continue
        peers = [peer for peer in contestants if peer.of == one.of and peer.name in compared and not peer.failed]
        ratios = {peer.name: _ratio(peer, one) for peer in peers if peer.name != one.name}
        limit = limits[one.unit]
        if one is not limit and limit.failed is None:
            ratios[CEILING] = one.rate / limit.rate
        checks = [found for found in checked if (found["contestant"], found["pass"]) == (one.name, one.of)]
        right = {key: checks[0][key] for key in ("right", "error")} if checks else {}
        yield row | one.times() | {"ratios": ratios} | right


def _ratio(peer: Contestant, one: Contestant) -> float:
    return statistics.median(theirs / mine for theirs, mine in zip(peer.seconds, one.seconds, strict=False))
