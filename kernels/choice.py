"""The implementations of an operation: which are known, which a device can run, and the choice of a run."""

import difflib
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jaxmem.kernels.typing import Tree

from .validation import Validator, describe

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
    """The implementation that a run uses for an operation. `kind`: the dtypes and formats of its calls."""

    implementation: str
    why: str
    kind: str


NONE_FAILED: Mapping[str, str] = {}


def choose(
    order: Mapping[str, str], plain: str, capability: int | None, refusal: Callable[[str], str | None], kind: str
) -> Choice:
    """The first implementation that is not refused, and why.

    Args:
      order: fused implementations, and the reason to choose each.
      plain: the implementation in plain JAX, if all others are refused.
      capability: the compute capability of the GPU; None: not a GPU.
      refusal: returns the reason why an implementation cannot be used, with its name; None: it can.
      kind: the dtypes and formats of the calls.
    """
    if capability is None:
        return Choice(plain, "no NVIDIA GPU", kind)
    refused: list[str] = []
    for name, reason in order.items():
        why = refusal(name)
        if why is None:
            return Choice(name, "; ".join([reason, *refused]), kind)
        refused.append(why)
    return Choice(plain, "; ".join(refused), kind)


@dataclass(frozen=True)
class Operation:
    """An operation with several implementations. `implementations`: {name: module, or the name of a module to import at
    the first use}. `portable`: the implementation that a call uses if it names none; it runs on every device of XLA."""

    name: str
    implementations: Mapping[str, Any]
    portable: str

    def load(self, implementation: str) -> Any:
        module = self.implementations[implementation]
        return importlib.import_module(module) if isinstance(module, str) else module

    def run(
        self,
        implementation: Any,
        call: Callable[[Any], Result],
        arrays: tuple[Tree, ...],
        refusal: Callable[[str], str | None] = lambda _: None,
    ) -> Result:
        """Runs `call` with the named implementation; None: the portable implementation. `arrays`: all inputs of the
        call. `refusal`: returns the reason why an implementation does not support the call; None: it supports it."""
        checks = Validator(self.name)
        name = self.portable if implementation is None else self._checked(checks, implementation)
        why = refusal(name)
        checks.require(why is None, why or "")
        checks.unsharded(name, arrays)
        return call(self.load(name))

    def _checked(self, checks: Validator, implementation: Any) -> str:
        names = ", ".join(sorted(self.implementations))
        text = f"implementation is {describe(implementation)}; it should be one of {names}"
        checks.require(isinstance(implementation, str), text)
        near = difflib.get_close_matches(implementation, self.implementations, n=1, cutoff=0.0)[0]
        checks.require(implementation in self.implementations, f"{text}, nearest {near}")
        return implementation


def triton_refusal(capability: int | None) -> str | None:
    """The reason why Triton kernels cannot run on GPUs of compute capability `capability` (90 for 9.0; None: not a
    GPU); None: they can run."""
    if capability is None:
        return "no NVIDIA GPU"
    if capability < 80:
        return f"compute capability is {capability / 10}; the triton implementation needs 8.0 or newer"
    if importlib.util.find_spec("jax_triton") is None:
        return "the triton implementation requires jax-triton; run pip install 'jaxmem[cuda13]'"
    return None


def capability(device: Any = None) -> int | None:
    """The compute capability of a device, by default the device to compile for: 90 for 9.0; None for a CPU."""
    absent = None if device else getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if absent is not None:  # the device to compile for is not installed
        return next((number for name, number in CAPABILITIES.items() if re.search(name, absent.device_kind)), None)
    device = device or jax.devices()[0]
    return round(10 * float(device.compute_capability)) if device.platform == "gpu" else None
