"""The model, loss, data and optimizer that a script passes to `train`, `plan`, `fit` and `evaluate` as Python objects.

They are the attribute `own` of a config, which is neither saved nor part of the schema.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

from jaxmem.errors import UserError

Axes = Mapping[str, tuple[str | None, ...]]  # pattern of names of weights -> logical axes
OwnData = Iterable[Mapping[str, Any]]


class ModelParts(TypedDict, total=False):
    """The model and the loss of a script.

    `model(rngs)` returns a Flax NNX module; `model(rngs, execution)` a module of jaxmem's layers. `axes`: logical axes
    of its weights, by patterns of their names. `layers`: the name of a list of equal blocks of a Flax module, or
    several, which are computed as a stack. `loss(model, batch)` or `loss(model, batch, keys)` returns the mean loss
    of the rows of a batch, or (loss, metrics); `keys` has a random key for each row.
    """

    model: Callable[..., Any] | None
    axes: Axes | None
    layers: str | Sequence[str] | None
    loss: Callable[..., Any] | None


class Parts(ModelParts, total=False):
    """Arguments of `train`, `plan` and `fit` that a config cannot contain.

    `data`, `held_out`: iterables of dicts of arrays, each with the rows of this process. `optimizer`: an optax
    transformation that includes the learning rate.
    """

    data: OwnData | None
    held_out: OwnData | None
    optimizer: Any


@dataclass(frozen=True, eq=False)  # compared by identity, like functions: traces of a config are cached
class ScriptParts:
    """The parts that a script passed; None: the config describes this part."""

    model: Callable[..., Any] | None = None
    axes: Axes | None = None
    layers: tuple[str, ...] = ()
    loss: Callable[..., Any] | None = None
    data: OwnBatches | None = None
    held_out: OwnBatches | None = None
    optimizer: Any = None

    @property
    def is_empty(self) -> bool:
        return all(part is None or part == () for part in vars(self).values())

    @property
    def passes_execution(self) -> bool:
        """Whether the model consists of jaxmem's layers, which receive the settings of the computation."""
        return self.model is not None and passes_execution(self.model)

    @property
    def loss_needs_keys(self) -> bool:
        return self.loss is not None and _arguments(self.loss) >= 3


NO_SCRIPT_PARTS = ScriptParts()  # shared by all configs without parts, so that configs with equal settings are equal


class OwnBatches:
    """An iterable of batches. The first batch is read early, for the names, shapes and dtypes of the arrays."""

    def __init__(self, source: OwnData, argument: str):
        if isinstance(source, Mapping | str) or not isinstance(source, Iterable):
            given = f"{type(source).__name__} {source!r:.60}"
            raise UserError(f"{argument} must be an iterable of batches (dicts of arrays), not the {given}")
        self.source, self.argument = source, argument

    @cached_property
    def _started(self) -> tuple[dict[str, Any], Iterator[Any]]:
        batches = iter(self.source)
        first = next(batches, None)
        if first is None:
            raise UserError(f"{self.argument} is empty; pass an iterable of batches (dicts of arrays)")
        return self.arrays(first), itertools.chain([first], batches)

    @property
    def first(self) -> dict[str, Any]:
        return self._started[0]

    @property
    def repeats(self) -> bool:
        """Whether the iterable can be read again from its beginning."""
        return iter(self.source) is not self.source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source) if self.repeats else self._started[1]

    def arrays(self, batch: Any) -> dict[str, Any]:
        """The arrays of a batch."""
        if not isinstance(batch, Mapping) or not batch:
            given = "an empty dict" if isinstance(batch, Mapping) else type(batch).__name__
            raise UserError(f"{self.argument}: a batch must be a dict of arrays, not {given}")
        import numpy as np  # importing the config is fast

        found = {name: np.asarray(value) for name, value in batch.items()}
        for name, array in found.items():
            if array.dtype == object or not array.ndim:
                given = "a scalar" if array.dtype != object else "an array of objects"
                raise UserError(f"{self.argument}: batch[{name!r}] must be an array of shape [rows, ...], not {given}")
        return found


def passes_execution(model: Callable[..., Any]) -> bool:
    return _arguments(model, with_defaults=False) >= 2


def _arguments(function: Callable[..., Any], *, with_defaults: bool = True) -> int:
    """The number of positional arguments of a function."""
    # The metaclass of NNX modules hides the arguments of their constructor.
    described: Any = getattr(function, "__init__", function) if isinstance(function, type) else function
    parameters = inspect.signature(described).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    counted = [one for one in parameters if one.kind in kinds and (with_defaults or one.default is one.empty)]
    return len(counted) - (described is not function)  # without `self`
