"""An operation with several implementations: finds the one that a call names, and checks that it supports the call."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxmem.kernels.typing import Tree

from .validation import Validator, describe

Result = TypeVar("Result")


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
