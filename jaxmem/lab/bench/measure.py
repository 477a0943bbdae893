"""One shape of an operation: right first, with results written where NaN stood, then the contestants take turns.

A row says what was found of a contestant's pass as soon as it is known: `check` and its error, then its times, their
ratios to what else there is, and to this device's own product or copy, all of the same turns; or why not.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxmem.lab.bench.contest import CEILING, RIGHT, Contestant, Row, Say, ceilings, error_line, take_turns, times
from jaxmem.lab.bench.operations import OPERATIONS
from jaxmem.lab.bench.torch_kernels import wait
from jaxmem.lab.bench.work import Operation, Work
from jaxmem.machine import devices

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("nvidia-cublas", "nvidia-cuda-nvcc", "triton", "jax-triton", "torch", "bitsandbytes", "torchao"),
)


class Job(NamedTuple):
    operation: str
    shape: str
    seconds: float
    dry: bool = False
    only: tuple[str, ...] = ()  # of these alone, where there are some
    check: bool = False  # with every option, and nothing is timed
    peers: bool = True


def where(_: None, **__: Any) -> Iterator[Row]:
    """What is measured on, and when."""
    device, gpus = jax.devices()[0], devices.nvidia_gpus()
    found = {package: _version(package) for package in PACKAGES}
    yield {
        "device": device.device_kind,
        "dry_run": device.platform == "cpu",
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "driver": gpus[0]["driver"] if gpus else None,
        "gpus": gpus,
        "versions": {package: version for package, version in found.items() if version is not None},
    }


def measured(job: Job, *, done: Sequence[Row], without: Sequence[str], say: Say) -> Iterator[Row]:
    own = OPERATIONS[job.operation]
    shape = own.shape(job.shape, dry=job.dry)
    about = {"operation": job.operation, "shape": job.shape}
    checked = [row for row in done if "check" in row]
    for row in _checks(job, own, shape, checked, without, say):
        checked.append(row)
        yield about | row
    if job.check:
        return
    refused = {(row.get("contestant"), row.get("pass")) for row in (*done, *checked) if "why_not" in row}
    work = own.work(shape)
    contestants: list[Contestant] = []
    for way in (*own.implementations, *(own.beside if job.peers else ())):
        for of, one in work.passes.items():
            if is_selected(way, of, job.only, without) and (way, of) not in refused:
                say(f"{way} {of}")
                try:
                    contestants.append(Contestant(way, of, one.compiled(way, work)))
                except Exception as error:  # noqa: BLE001 (each compiler has errors of its own)
                    yield {**about, "contestant": way, "pass": of, "why_not": error_line(error)}
    for name, make in own.peers.items() if job.peers else ():
        if is_selected(name, "", job.only, without) and (name, None) not in refused:
            say(name)
            try:
                calls = {of: call for of, call in make(shape).items() if is_selected(name, of, job.only, without)}
                contestants += [Contestant(name, of, call, wait) for of, call in calls.items()]
            except Exception as error:  # noqa: BLE001 (of other people's libraries)
                yield {**about, "contestant": name, "why_not": error_line(error)}
    for row in _timed(job, own, work, contestants, checked, say):
        yield about | {"sizes": shape._asdict()} | row


def is_selected(name: str, of: str, only: Sequence[str], without: Sequence[str]) -> bool:
    """A name stands for all that begin with its words: `torch` for `torch flash`, `mosaic` for its passes.

    >>> is_selected("torch flash", "forward", (), ("torch",)), is_selected("mosaic", "forward", ("mosaic forward",), ())
    (False, True)
    """
    words = f"{name} {of} ".replace("  ", " ")
    # Of one who is made with all passes at once, `only` may name one.
    asked = not only or any(words.startswith(f"{one} ") or f"{one} ".startswith(words) for one in only)
    return asked and not any(words.startswith(f"{one} ") for one in without)


def _checks(
    job: Job, own: Operation, shape: Any, done: Sequence[Row], without: Sequence[str], say: Say
) -> Iterator[Row]:
    there = {(row["check"], row["contestant"], row["pass"]) for row in done}
    checks = {"as it is": lambda: own.work(shape)} if own.checks is None else own.checks(shape)
    for check in checks if job.check else list(checks)[:1]:
        say(f"float64 {check}")
        work = checks[check]()
        for of, one in work.passes.items():
            left = [
                way
                for way in own.implementations
                if is_selected(way, of, job.only, without) and (check, way, of) not in there
            ]
            if not left:
                continue
            say(f"float64 {of}")
            wanted = one.wanted(work)
            for way in left:
                say(f"{way} {of}")
                row = {"contestant": way, "pass": of, "check": check}
                try:
                    error = one.error(way, work, wanted)
                except Exception as refusal:  # noqa: BLE001 (each compiler has errors of its own)
                    yield row | {"why_not": error_line(refusal)}
                else:
                    yield row | {"right": error <= RIGHT, "error": error if error < float("inf") else None}


def _timed(
    job: Job, own: Operation, work: Work, contestants: list[Contestant], checked: Sequence[Row], say: Say
) -> Iterator[Row]:
    amounts = {of: (one.amount, work.unit) for of, one in work.passes.items()}
    fastest = {}
    if contestants:
        for one, amount, unit in ceilings(256 if job.dry else 8192):
            contestants.append(one)
            amounts[one.of], fastest[unit] = (amount, unit), one
    take_turns(contestants, job.seconds, say)
    rows = {id(one): times(one, amounts[one.of][0]) for one in contestants if one.failed is None}
    for one in contestants[::-1]:  # the ceilings first
        row = {"contestant": one.name, "pass": one.of}
        if one.failed is not None:
            yield row | {"why_not": one.failed}
            continue
        ratios = {
            peer.name: statistics.median(theirs / mine for theirs, mine in zip(peer.seconds, one.seconds, strict=False))
            for peer in contestants
            if peer.of == one.of
            and peer.name != one.name
            and peer.failed is None
            and (peer.name not in own.implementations or peer.name in ("reference", own.plain))
        }
        unit = amounts[one.of][1]
        if one.name != CEILING and id(fastest[unit]) in rows:
            ratios[CEILING] = rows[id(one)]["rate"] / rows[id(fastest[unit])]["rate"]
        own_check = [found for found in checked if (found["contestant"], found["pass"]) == (one.name, one.of)]
        right = {key: own_check[0][key] for key in ("right", "error")} if own_check else {}
        yield row | {"unit": unit, **rows[id(one)], "ratios": ratios, **right}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
