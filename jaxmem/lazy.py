"""Names that a package imports from its modules when they are first used, so that `import` loads only the package."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str, **modules: str) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` (PEP 562) and `__all__` of a package, from the public names of each of its modules."""
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return get, sorted(module_of)
