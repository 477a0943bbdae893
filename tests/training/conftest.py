"""Runs of these tests differ in names, folders and numbers of steps, seldom in what they compile."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxmem.planning import result
from jaxmem.planning.compile import compile_program
from jaxmem.step.batches import batch_spec
from jaxmem.step.programs import Program

LOWERED: dict[tuple[Any, ...], Any] = {}
COMPILED: dict[Any, Any] = {}


def kept(name: str, lower: Callable[[Program], Any]) -> Callable[[Program], Any]:
    """The lowered program of an earlier test whose config differs only in what no program depends on."""

    def lowered(built: Program) -> Any:
        cfg = built.cfg
        relevant = cfg.model_dump(mode="json", exclude={"name", "output", "checkpoint", "train"})
        relevant["data"].pop("path")
        relevant["train"] = [cfg.train.deterministic, cfg.train.on_nan]
        relevant["train"] += [cfg.steps] if cfg.optimizer.schedule != "constant" else []
        user = cfg.user
        given = (user.model, user.network, user.layers, user.loss, user.loss_with_keys, user.optimizer)
        devices = str(built.layout.mesh.devices.tolist())
        key = (name, json.dumps(relevant, sort_keys=True), devices, *given, str(batch_spec(cfg)))
        if key not in LOWERED:
            LOWERED[key] = lower(built)
        return LOWERED[key]

    return lowered


def compiled_once(step: Any, **options: Any) -> Any:
    if step not in COMPILED:
        COMPILED[step] = compile_program(step, **options)
    return COMPILED[step]


@pytest.fixture(autouse=True, scope="module")
def programs_are_shared():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lower_step", "lower_initialise", "lower_evaluate"):
            patch.setattr(Program, name, kept(name, getattr(Program, name)))
        patch.setattr(result, "compile_program", compiled_once)
        yield
