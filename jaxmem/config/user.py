"""The model, loss, data and optimizer that a script passes to `train`, `plan`, `fit` and `evaluate` as Python objects.

They are the attribute `user` of a config, which is neither saved nor part of the schema.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from jaxmem.errors import UserError, nearest
from jaxmem.typing import JsonDict, JsonView

if TYPE_CHECKING:  # importing the config imports no jax
    import jax
    import optax
    from flax import nnx

Loss: TypeAlias = "jax.Array | tuple[jax.Array, Mapping[str, jax.Array]]"  # of a micro-batch, and metrics
AxesByPattern = Mapping[str, tuple[str | None, ...]]  # pattern of names of weights -> logical axes
UserData = Iterable[JsonView]


class ModelParts(TypedDict, total=False):
    """The model and the loss of a script.

    `model(rngs)` returns a Flax NNX module, or `network(rngs, execution)` a module of jaxmem's layers. `axes`: logical
    axes of the weights of a Flax module, by patterns of their names. `layers`: the name of a list of equal blocks of a
    Flax module, or several, which are computed as a stack. `loss(model, batch)` returns the loss of the rows of a
    micro-batch, or (loss, metrics), as does `loss_with_keys(model, batch, keys)`, with a random key for each row. It
    gets all rows of a micro-batch, from all devices; an update follows the mean over micro-batches. A Flax model gets
    floating-point arrays, also targets, in the compute dtype; the mask of data from the config is not cast.
    """

    model: Callable[..., nnx.Module] | None
    network: Callable[..., nnx.Module] | None
    axes: AxesByPattern | None
    layers: str | Sequence[str] | None
    loss: Callable[..., Loss] | None
    loss_with_keys: Callable[..., Loss] | None


class Parts(ModelParts, total=False):
    """Arguments of `train`, `plan` and `fit` that a config cannot contain.

    `data`, `held_out`: iterables of dicts of arrays, each with the rows of this process. `optimizer`: an optax
    transformation that includes the learning rate; it must be elementwise if layers are updated one at a time
    (`memory.update=during`, `memory.offload=optimizer`).
    """

    data: UserData | None
    held_out: UserData | None
    optimizer: optax.GradientTransformation | None


def _described(part: object) -> str:
    if isinstance(part, str):
        return f"the text {part}"
    if isinstance(part, FunctionType):
        return f"the function {part.__name__}"
    return f"an instance of {type(part).__name__}"


def _builds_modules(part: object) -> bool:
    from flax import linen, nnx

    return callable(part) and not isinstance(part, nnx.Module | linen.Module)


def _is_transformation(part: object) -> bool:
    return hasattr(part, "init") and hasattr(part, "update")


def _are_axes(part: object) -> bool:
    """Whether the part is a mapping of patterns to tuples."""
    return isinstance(part, Mapping) and all(isinstance(axes, tuple | list) for axes in part.values())


def _are_names(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, Sequence) and all(isinstance(name, str) for name in part))


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "model": (_builds_modules, "a function of rngs that returns a Flax NNX module, such as the class of the module"),
    "network": (_builds_modules, "a function of (rngs, execution) that returns a module of jaxmem's layers"),
    "axes": (_are_axes, "a dict such as {'*.up.kernel': ('embed', 'mlp')}"),
    "layers": (_are_names, "the name of a list of blocks, or a list of names"),
    "loss": (callable, "a function loss(model, batch)"),
    "loss_with_keys": (callable, "a function loss(model, batch, keys)"),
    "optimizer": (
        _is_transformation,
        "an optax transformation such as optax.adamw(1e-3), or optimizer.name in the config",
    ),
}


@dataclass(frozen=True, eq=False)  # compared by identity, like functions: traces of a config are cached
class UserObjects:
    """The parts that a script passed; None: the config describes this part."""

    model: Callable[..., nnx.Module] | None = None
    network: Callable[..., nnx.Module] | None = None
    axes: AxesByPattern | None = None
    layers: tuple[str, ...] = ()
    loss: Callable[..., Loss] | None = None
    loss_with_keys: Callable[..., Loss] | None = None
    data: UserBatches | None = None
    held_out: UserBatches | None = None
    optimizer: optax.GradientTransformation | None = None

    @property
    def is_empty(self) -> bool:
        return all(part is None or part == () for part in vars(self).values())

    @property
    def has_model(self) -> bool:
        return self.model is not None or self.network is not None


NO_USER_OBJECTS = UserObjects()  # shared by all configs without parts, so that configs with equal settings are equal


class UserBatches:
    """An iterable of batches. The first batch is read early, for the names, shapes and dtypes of the arrays."""

    def __init__(self, source: UserData, argument: str):
        if isinstance(source, Mapping | str) or not isinstance(source, Iterable):
            given = f"{type(source).__name__} {source!r:.60}"
            raise UserError(f"{argument} must be an iterable of batches (dicts of arrays), not the {given}")
        self.source = source
        self.argument = argument

    @cached_property
    def _started(self) -> tuple[JsonDict, Iterator[JsonView]]:
        batches = iter(self.source)
        first = next(batches, None)
        if first is None:
            raise UserError(f"{self.argument} is empty; pass an iterable of batches (dicts of arrays)")
        return self.arrays(first), itertools.chain([first], batches)

    @property
    def first(self) -> JsonDict:
        return self._started[0]

    @cached_property  # a torch DataLoader starts processes for each iterator
    def repeats(self) -> bool:
        """Whether the iterable can be read again from its beginning."""
        return iter(self.source) is not self.source

    def __iter__(self) -> Iterator[JsonView]:
        return iter(self.source) if self.repeats else self._started[1]

    def arrays(self, batch: object) -> JsonDict:
        """The arrays of a batch."""
        if not isinstance(batch, Mapping) or not batch:
            given = "an empty dict" if isinstance(batch, Mapping) else type(batch).__name__
            raise UserError(f"{self.argument}: a batch must be a dict of arrays, not {given}")
        import numpy as np  # importing the config is fast

        arrays = {name: np.asarray(value) for name, value in batch.items()}
        for name, array in arrays.items():
            if array.dtype.kind in "OSU" or not array.ndim:
                given = {"O": "an array of objects", "S": "text", "U": "text"}.get(array.dtype.kind, "a scalar")
                expected = "an array of numbers of shape [rows, ...]"
                raise UserError(f"{self.argument}: batch[{name!r}] must be {expected}, not {given}")
        return arrays


_EXCLUSIVE = (("model", "network"), ("loss", "loss_with_keys"))
_REQUIRES = {"axes": "model", "layers": "model", "held_out": "data"}


def user_objects(parts: Mapping[str, object]) -> UserObjects:
    """The parts as the attribute `user` of a config. Parts that `Parts` does not describe are refused."""
    for name in parts:
        if name not in Parts.__annotations__:
            raise UserError(f"unknown argument {name}{nearest(name, Parts.__annotations__)}")
    given: JsonDict = {name: part for name, part in parts.items() if part is not None}
    for name, part in given.items():
        if name in _KINDS:
            is_valid, expected = _KINDS[name]
            if not is_valid(part):
                raise UserError(f"the argument {name} must be {expected}, not {_described(part)}")
        else:
            given[name] = UserBatches(part, name)
    layers = given.pop("layers", ())
    if layers:
        given["layers"] = (layers,) if isinstance(layers, str) else tuple(layers)
    for name, other in _EXCLUSIVE:
        if {name, other} <= given.keys():
            raise UserError(f"the arguments {name} and {other} exclude each other; pass one of them")
    for name, other in _REQUIRES.items():
        if name in given and other not in given:
            raise UserError(f"the argument {name} requires the argument {other}; remove {name}, or pass {other}")
    return UserObjects(**given)
