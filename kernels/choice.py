"""Which implementation runs a call: the one that is named, or the one that was fastest when this device was measured.

`tuned.json` holds what `jaxmem bench tune` found: for each operation and kind of device the sizes that were measured,
and the winner. A call takes the winner of the nearest sizes. On a device that nobody measured it is the implementation
that runs wherever XLA does; so it is where the winner cannot run the call. Each new choice is one line of the log
`jaxmem.kernels`.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from .given import Given, shown

LOG = logging.getLogger("jaxmem.kernels")
# By names that devices give themselves.
CAPABILITIES = {
    r"A100|A30\b": 80,
    r"A10\b|A40\b|A6000|RTX 30": 86,
    r"L4\b|L40|RTX 40": 89,
    r"H100|H200|GH200": 90,
    r"B200": 100,
    r"RTX 50|RTX PRO": 120,
}


_Way = TypeVar("_Way")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Choice:
    implementation: str
    why: str
    kind: str
    sizes: tuple[int, ...]


_instead: ContextVar[dict[str, Any] | None] = ContextVar("instead", default=None)
_listening: ContextVar[list[Choice] | None] = ContextVar("listening", default=None)


@contextmanager
def choices() -> Iterator[list[Choice]]:
    """What is chosen in here, in order."""
    made: list[Choice] = []
    token = _listening.set(made)
    try:
        yield made
    finally:
        _listening.reset(token)


def run(
    operation: str,
    given: Any,
    implementations: Mapping[str, _Way],
    call: Callable[[_Way], _Made],
    arrays: tuple[Any, ...],
    *,
    portable: str,
    kind: str,
    sizes: tuple[int, ...],
) -> _Made:
    """`call` of the implementation that is named (`given`), or was the fastest. `kind`: what of a call (a dtype, a
    format) changes everything; `sizes`: what changes it gradually. `arrays`: all that it takes."""
    known = Given(operation)
    if given is not None:
        names = ", ".join(sorted(implementations))
        known.require(isinstance(given, str), f"implementation is {shown(given)}; it should be one of {names}")
        near = difflib.get_close_matches(given, implementations, n=1, cutoff=0.0)[0]
        known.require(
            given in implementations, f"implementation is {given!r}; it should be one of {names}, nearest {near}"
        )

    def made(choice: Choice) -> _Made:
        known.undivided(choice.implementation, arrays)
        done = call(implementations[choice.implementation])
        if (heard := _listening.get()) is not None:
            heard.append(choice)
        return done

    if given is not None:
        return made(Choice(given, "named", kind, sizes))
    choice = chosen(operation, list(implementations), portable=portable, kind=kind, sizes=sizes)
    try:
        return made(choice)
    except (ValueError, NotImplementedError) as refused:
        if choice.implementation == portable:
            raise
        why = f"{choice.implementation}, {choice.why}, cannot: {refused}"
        instead = Choice(portable, why, kind, sizes)
        _log(operation, instead)
        return made(instead)


def chosen(operation: str, names: list[str], *, portable: str, kind: str, sizes: tuple[int, ...]) -> Choice:
    """Where none is named. A `reference` holds what the others are there not to hold: it is taken where there is none
    but it and kernels."""
    device = device_kind()
    candidates = {name for name in names if name != "reference" or name == portable}
    entries = tuple(
        (entry["implementation"], tuple(entry["sizes"]))
        for entry in tuned().get(operation, {}).get(device, [])
        if entry["kind"] == kind and entry["implementation"] in candidates
    )
    return _measured(operation, device, portable, kind, sizes, entries)


@functools.cache
def _measured(
    operation: str,
    device: str,
    portable: str,
    kind: str,
    sizes: tuple[int, ...],
    entries: tuple[tuple[str, tuple[int, ...]], ...],
) -> Choice:
    if entries:
        winner, measured = min(entries, key=lambda entry: _distance(entry[1], sizes))
        choice = Choice(winner, f"the fastest of {list(measured)} on {device}", kind, sizes)
    else:
        choice = Choice(portable, f"{device} was not measured: {portable} runs everywhere", kind, sizes)
    _log(operation, choice)
    return choice


@functools.cache
def _log(operation: str, choice: Choice) -> None:
    sizes = "x".join(map(str, choice.sizes))
    LOG.info("%s %s %s: %s, %s", operation, choice.kind, sizes, choice.implementation, choice.why)


def fastest(
    table: dict[str, Any], operation: str, device: str, kind: str, sizes: tuple[int, ...]
) -> dict[str, Any] | None:
    """The entry of the nearest sizes that were measured."""
    entries = [entry for entry in table.get(operation, {}).get(device, []) if entry["kind"] == kind]
    return min(entries, key=lambda entry: _distance(entry["sizes"], sizes), default=None)


def _distance(measured: Sequence[int], sizes: Sequence[int]) -> float:
    """By their ratios."""
    return sum(abs(math.log(a / b)) for a, b in zip(measured, sizes, strict=True))


@contextmanager
def supplied(table: dict[str, Any]) -> Iterator[None]:
    """Another table in place of the package's, to measure with what was just found."""
    token = _instead.set(table)
    try:
        yield
    finally:
        _instead.reset(token)


def tuned() -> dict[str, Any]:
    instead = _instead.get()
    return _kept() if instead is None else instead


@functools.cache
def _kept() -> dict[str, Any]:
    return json.loads(importlib.resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8"))


def device_kind() -> str:
    """Of the device that this is compiled for, which need not be here."""
    absent = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return absent.device_kind if absent is not None else jax.devices()[0].device_kind


def capability() -> int | None:
    """Of the GPU that this is compiled for, 90 for 9.0; None on a CPU."""
    absent = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if absent is None and jax.devices()[0].platform == "gpu":
        return round(10 * float(jax.devices()[0].compute_capability))
    return next((number for name, number in CAPABILITIES.items() if re.search(name, device_kind())), None)
