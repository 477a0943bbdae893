"""Trains and plans with what docs/contributing.md adds, where its diffs have been applied; prints what came of it."""

import json
from typing import Any

import jax

import jaxmem
from jaxmem.config import Config
from jaxmem.estimate.memory import predict
from jaxmem.step.programs import program
from tests.step.golden import DECODER, config, losses, off

IMAGES = {"objective": "classify", "data": {"source": "digits"}, "optimizer": {"learning_rate": 1e-2}}
DEEP = {"model": {**DECODER, "layers": 6}}


def optimizer() -> dict[str, Any]:
    cfg = config("decoder, adamw", optimizer={"name": "adabelief"})
    built = program(cfg, jax.devices()[:1])
    predicted = predict(built)
    return {"losses": losses(cfg), "bytes per parameter": predicted["optimizer"] / built.model.parameter_count}


def policy() -> dict[str, Any]:
    """Compared with `full`, which saves the input of every layer."""
    cases = {remat: config("decoder, adamw", memory={"remat": remat}, **DEEP) for remat in ("full", "thirds")}
    found = {remat: losses(cfg) for remat, cfg in cases.items()}
    predicted = {remat: predict(program(cfg, jax.devices()[:1]))["activations"] for remat, cfg in cases.items()}
    sharded = config("decoder, adamw", memory={"remat": "thirds"}, mesh={"pod": 2, "fsdp": 2, "tensor": 2}, **DEEP)
    return {
        "off": off(found["thirds"], found["full"]),
        "bytes": predicted,
        "off on a mesh": off(losses(sharded, 8), found["full"]),
    }


def mesh_axis() -> dict[str, Any]:
    cfg = config("decoder, adamw", mesh={"pod": 2, "fsdp": 2, "tensor": 2})
    refused = config("decoder, adamw", mesh={"pod": 3})
    return {
        "mesh": dict(program(cfg, jax.devices()).layout.mesh.shape),
        "refused": refusal(refused, 3),
    }


def refusal(cfg: Config, devices: int) -> str:
    try:
        program(cfg, jax.devices()[:devices])
    except jaxmem.UserError as error:
        return str(error)
    return ""


def family() -> dict[str, Any]:
    cfg = jaxmem.load_config(
        {"name": "mixer", "model": {"family": "mixer"}, "batch": {"global_size": 8}, "train": {"steps": 10}, **IMAGES}
    )
    sharded = jaxmem.load_config({**cfg.model_dump(exclude_unset=True), "mesh": {"fsdp": 2, "tensor": 2}})
    found = losses(cfg)
    return {"losses": found, "off": off(losses(sharded, 4), found)}


if __name__ == "__main__":
    examples = {"optimizer": optimizer, "policy": policy, "mesh axis": mesh_axis, "family": family}
    print(json.dumps({name: example() for name, example in examples.items()}))
