"""Which implementation runs a call: the one that is named, or the one that was fastest when this device was measured.

`tuned.json` holds what `jaxmem bench tune` found: for each operation and kind of device the sizes that were measured,
and the winner. A call takes the winner of the nearest sizes. On a device that nobody measured it is the implementation
that runs wherever XLA does. Each new choice is one line of the log `jaxmem.kernels`.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

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


def choose(
    operation: str, given: str | None, names: Iterable[str], *, portable: str, kind: str, sizes: tuple[int, ...]
) -> Choice:
    """`kind`: what of a call (a dtype, a format) changes everything; `sizes`: what changes it gradually."""
    choice = _chosen(operation, given, list(names), portable, kind, sizes)
    if (made := _listening.get()) is not None:
        made.append(choice)
    return choice


def _chosen(
    operation: str, given: str | None, names: list[str], portable: str, kind: str, sizes: tuple[int, ...]
) -> Choice:
    if given is not None:
        if given not in names:
            known, near = ", ".join(sorted(names)), difflib.get_close_matches(given, names, n=1, cutoff=0.0)[0]
            raise ValueError(f"{operation}: implementation is {given!r}; it should be one of {known}, nearest {near}")
        return Choice(given, "named", kind, sizes)
    return _measured(operation, device_kind(), portable, kind, sizes)


@functools.cache
def _measured(operation: str, device: str, portable: str, kind: str, sizes: tuple[int, ...]) -> Choice:
    found = fastest(tuned(), operation, device, kind, sizes)
    if found is None:
        choice = Choice(portable, f"{device} was not measured: {portable} runs everywhere", kind, sizes)
    else:
        choice = Choice(found["implementation"], f"the fastest of {found['sizes']} on {device}", kind, sizes)
    LOG.info("%s %s %s: %s, %s", operation, kind, "x".join(map(str, sizes)), choice.implementation, choice.why)
    return choice


def fastest(
    table: dict[str, Any], operation: str, device: str, kind: str, sizes: tuple[int, ...]
) -> dict[str, Any] | None:
    """The entry of the nearest sizes that were measured, by their ratios."""
    entries = [entry for entry in table.get(operation, {}).get(device, []) if entry["kind"] == kind]

    def distance(entry: dict[str, Any]) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(entry["sizes"], sizes, strict=True))

    return min(entries, key=distance, default=None)


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
