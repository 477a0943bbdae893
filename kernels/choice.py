"""Chooses the implementation of a call: the named implementation, or the fastest that was measured on this kind of
device.

`tuned.json` has the measurements of `jaxmem bench tune`: for each operation and kind of device, sizes and the fastest
implementation. A call uses the entry of the nearest sizes. If the device was not measured, or the fastest
implementation does not support the call, the portable implementation runs, which supports every device of XLA. Each new
choice is one line of the log `jaxmem.kernels`.
"""

import difflib
import functools
import importlib
import importlib.resources
import importlib.util
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from .validation import Validator, describe

LOG = logging.getLogger("jaxmem.kernels")
# Keys are the names that devices report.
CAPABILITIES = {
    r"A100|A30\b": 80,
    r"A10\b|A40\b|A6000|RTX 30": 86,
    r"L4\b|L40|RTX 40": 89,
    r"H100|H200|GH200": 90,
    r"B200": 100,
    r"RTX 50|RTX PRO": 120,
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Choice:
    implementation: str
    why: str
    kind: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """An operation with several implementations. `implementations`: {name: module, or the name of a module to import at
    the first use}. `portable`: the name of the implementation that runs on every device of XLA."""

    name: str
    implementations: Mapping[str, Any]
    portable: str

    def load(self, implementation: str) -> Any:
        found = self.implementations[implementation]
        return importlib.import_module(found) if isinstance(found, str) else found

    def run(
        self,
        implementation: Any,
        call: Callable[[Any], Result],
        arrays: tuple[Any, ...],
        *,
        kind: str,
        sizes: tuple[int, ...],
        refusal: Callable[[str], str | None] = lambda _: None,
    ) -> Result:
        """Runs `call` with the named implementation, or with the fastest. The time of a call depends on its `kind`
        (discrete properties: a dtype, a format) and on its `sizes`. `arrays`: all inputs of the call. `refusal`:
        returns the reason why an implementation does not support the call; None: it supports the call."""
        checks = Validator(self.name)

        def run(choice: Choice) -> Result:
            why = refusal(choice.implementation)
            checks.require(why is None, why or "")
            checks.unsharded(choice.implementation, arrays)
            result = call(self.load(choice.implementation))
            if (recorded := _recorded.get()) is not None:
                recorded.append(choice)
            return result

        if implementation is not None:
            self._check(checks, implementation)
            return run(Choice(implementation, "named", kind, sizes))
        choice = self.choose(kind, sizes)
        try:
            return run(choice)
        except (ValueError, NotImplementedError) as error:
            if choice.implementation == self.portable:
                raise
            why = f"{choice.implementation}, {choice.why}, does not support the call: {error}"
            portable = Choice(self.portable, why, kind, sizes)
            _log(self.name, portable)
            return run(portable)

    def choose(self, kind: str, sizes: tuple[int, ...]) -> Choice:
        """The choice if no implementation is named. `reference` is chosen only if it is the portable implementation,
        since it stores the large intermediates that other implementations avoid."""
        candidates = {name for name in self.implementations if name != "reference" or name == self.portable}
        device = device_kind()
        if entry := nearest_entry(tuned(), self.name, device, kind, sizes, candidates):
            choice = Choice(entry["implementation"], f"the fastest of {entry['sizes']} on {device}", kind, sizes)
        else:
            why = f"{device} was not measured: {self.portable} runs everywhere"
            choice = Choice(self.portable, why, kind, sizes)
        _log(self.name, choice)
        return choice

    def _check(self, checks: Validator, implementation: Any) -> None:
        names = ", ".join(sorted(self.implementations))
        text = f"implementation is {describe(implementation)}; it should be one of {names}"
        checks.require(isinstance(implementation, str), text)
        near = difflib.get_close_matches(implementation, self.implementations, n=1, cutoff=0.0)[0]
        checks.require(implementation in self.implementations, f"{text}, nearest {near}")


# (operation, implementation) -> the reason why this process does not use an implementation that failed its check.
FAILURES: dict[tuple[str, str], str] = {}

_recorded: ContextVar[list[Choice] | None] = ContextVar("recorded", default=None)


@contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """A context that records all choices, in order."""
    choices: list[Choice] = []
    token = _recorded.set(choices)
    try:
        yield choices
    finally:
        _recorded.reset(token)


@functools.cache
def _log(operation: str, choice: Choice) -> None:
    sizes = "x".join(map(str, choice.sizes))
    LOG.info("%s %s %s: %s, %s", operation, choice.kind, sizes, choice.implementation, choice.why)


def nearest_entry(
    table: dict[str, Any],
    operation: str,
    device: str,
    kind: str,
    sizes: Sequence[int],
    implementations: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """The measured entry, among these implementations, whose ratios of sizes to the given sizes are nearest to 1."""
    entries = [
        entry
        for entry in table.get(operation, {}).get(device, [])
        if entry["kind"] == kind and (implementations is None or entry["implementation"] in implementations)
    ]

    def distance(entry: dict[str, Any]) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(entry["sizes"], sizes, strict=True))

    return min(entries, key=distance, default=None)


@functools.cache
def tuned() -> dict[str, Any]:
    """The table of measurements."""
    return json.loads(importlib.resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8"))


def device_kind() -> str:
    """The kind of the device to compile for, which need not be installed."""
    absent = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return absent.device_kind if absent is not None else jax.devices()[0].device_kind


def triton_refusal(operation: str, capability: int | None) -> str | None:
    """The reason why the Triton kernel of an operation cannot run on GPUs of compute capability `capability` (90 for
    9.0; None: not a GPU); None: it can run."""
    if capability is None:
        return "no NVIDIA GPU"
    if capability < 80:
        return f"compute capability is {capability / 10}; the triton implementation needs 8.0 or newer"
    if importlib.util.find_spec("jax_triton") is None:
        return "the triton implementation requires jax-triton; run pip install 'jaxmem[cuda13]'"
    return FAILURES.get((operation, "triton"))


def capability(device: Any = None) -> int | None:
    """The compute capability of a device, by default the device to compile for: 90 for 9.0; None for a CPU."""
    if device is None and getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None:
        return next((number for name, number in CAPABILITIES.items() if re.search(name, device_kind())), None)
    device = device or jax.devices()[0]
    return round(10 * float(device.compute_capability)) if device.platform == "gpu" else None
