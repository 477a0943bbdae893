"""Train large models in JAX in the least memory that the hardware allows, and know the number first.

    cfg = jaxmem.load_config("configs/demo.yaml", ["mesh.fsdp=8"])
    plan = jaxmem.plan(cfg)      # bytes per device, without running
    result = jaxmem.train(cfg)

Everything is imported when it is first used: `import jaxmem` takes milliseconds and does not start jax,
so that a program can still choose its devices (`jaxmem.devices.simulate(8)`).
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_NAMES = {"load_config": "jaxmem.config", "Config": "jaxmem.config", "UserError": "jaxmem.errors"}
_FUNCTIONS = {"plan": "plan", "train": "run"}  # packages that are called like their one function


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"jaxmem.{name}") is not None:
        return importlib.import_module(f"jaxmem.{name}")
    raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")


def __dir__() -> list[str]:
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted({"__version__", "kernels", *_NAMES, *(name for name in modules if not name.startswith("_"))})


class _Callable(ModuleType):
    """`jaxmem.plan(cfg)` is `jaxmem.plan.plan(cfg)`: a package that is also its one function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _FUNCTIONS[self.__name__.removeprefix("jaxmem.")])(*args, **kwargs)


class _Package(ModuleType):
    """Importing jaxmem.plan, by whatever way, sets it here: the moment to make it callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FUNCTIONS and type(value) is ModuleType:
            value.__class__ = _Callable
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
