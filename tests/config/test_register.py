"""Optimizers and families that a script registers are checked, explained and described like those of jaxmem."""

from collections.abc import Iterator
from typing import Any, Literal

import optax
import pytest

from jaxmem import register_optimizer
from jaxmem.config import load_config
from jaxmem.config.base import setting
from jaxmem.config.networks import FAMILIES, Mlp, register_family
from jaxmem.config.optimizers import OPTIMIZERS, AdamSettings, Optimizer
from jaxmem.config.schema import json_schema
from jaxmem.errors import UserError


class Perceptron(Mlp):
    family: Literal["perceptron"] = setting("perceptron", "kind of network")  # type: ignore[assignment]


def scale(settings: AdamSettings, *, axes: Any = None) -> optax.GradientTransformation:
    del axes
    return optax.scale_by_adam(settings.beta1)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_optimizer("mine", scale, AdamSettings)
    register_family(Perceptron)
    yield
    del OPTIMIZERS["mine"], FAMILIES["perceptron"]


def config(**sections: Any) -> Any:
    run = {"name": "x", "data": {"source": "digits"}, "objective": "classify", "train": {"steps": 1}}
    return load_config({**run, "model": {"family": "perceptron"}, **sections})


def test_a_registered_name_is_read_and_written() -> None:
    cfg = config(optimizer={"name": "mine", "beta1": 0.8})
    assert isinstance(cfg.model, Perceptron)
    assert cfg.optimizer.hyperparameters == {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-8}
    assert load_config(cfg.model_dump(mode="json")) == cfg


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"optimizer": {"name": "mie"}}, r"optimizer.name=mie must be adamw, .* or mine; did you mean mine\?"),
        (
            {"model": {"family": "perceptrn"}},
            r"model.family=perceptrn must be .*; did you mean perceptron",
        ),
        ({"model": {"family": "perceptron", "layer": 1}}, r"model.layer: unknown key; did you mean model.layers\?"),
        ({"model": {"family": "perceptron", "layers": 0}}, r"model.layers=0 must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}"):
        config(**sections)


def test_the_schema_describes_them() -> None:
    schema = json_schema()
    assert "mine" in schema["$defs"]["Optimizer"]["properties"]["name"]["enum"]
    assert schema["properties"]["model"]["discriminator"]["mapping"]["perceptron"] == "#/$defs/Perceptron"
    assert "layers" in schema["$defs"]["Perceptron"]["properties"]


def test_what_is_not_registered_is_refused() -> None:
    del OPTIMIZERS["mine"]
    with pytest.raises(UserError, match="name=mine must be"):
        config(optimizer={"name": "mine"})
    OPTIMIZERS["mine"] = OPTIMIZERS["adam"]
    assert Optimizer(name="mine").name == "mine"
