"""Adds optimizers and families of networks to the config of this process. A script registers them first, and then runs
commands by `jaxmem.cli.main()`."""

import dataclasses
from collections.abc import Callable
from typing import get_args

import optax

from jaxmem.config.networks import FAMILIES, Family, Network
from jaxmem.config.optimizers import HYPERPARAMETERS, OPTIMIZERS, AdamWSettings, Entry
from jaxmem.config.sections import Config
from jaxmem.errors import UserError


def register_optimizer(
    name: str,
    scale: Callable[..., optax.GradientTransformation],
    settings: type = AdamWSettings,
    summary: str = "",
) -> None:
    """Adds an optimizer, which `optimizer.name` can then select.

    Args:
        name: The value of `optimizer.name`.
        scale: `scale(settings, axes=...)` returns the transformation of gradients, without weight decay and learning
            rate. `axes`: the names of the dimensions of each weight.
        settings: A frozen dataclass of hyperparameters with their defaults.
        summary: One line, with the bytes of state per parameter.
    """
    unknown = {field.name for field in dataclasses.fields(settings)} - {*HYPERPARAMETERS}
    if unknown:
        known = ", ".join(sorted(HYPERPARAMETERS))
        raise UserError(
            f"register_optimizer: {', '.join(sorted(unknown))} is not a hyperparameter; expected one of {known}"
        )
    OPTIMIZERS[name] = Entry(settings, scale, summary)


def is_registered(cfg: Config) -> bool:
    """Whether a script registered the optimizer or the family of models of a config."""
    is_known = type(cfg.model) in get_args(Network)  # the family of a script may be a subclass
    return callable(OPTIMIZERS[cfg.optimizer.name].implementation) or not is_known


def register_family(section: type[Family]) -> str:
    """Adds a section for `model`, and returns the name of the family: the default of its field `family`."""
    name = section.model_fields["family"].default
    if not isinstance(name, str):
        raise UserError(f"register_family: {section.__name__} must have a field `family: Literal[NAME] = NAME`")
    FAMILIES[name] = section
    return name
