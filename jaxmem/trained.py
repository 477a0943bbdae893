"""Open what a run left behind: its config, and the weights of a checkpoint on the devices at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmem.checkpoint import Checkpoints, place
from jaxmem.config import Mesh, load_config
from jaxmem.errors import UserError
from jaxmem.program import Program, program


def open_run(directory: str | Path, overrides: Sequence[str] = ()) -> tuple[Program, Any]:
    """(program, parameters) of the newest checkpoint. Where the run's mesh does not fit these devices, one of them
    holds the model."""
    directory = Path(directory)
    if not (directory / "config.yaml").is_file():
        raise UserError(f"{directory}: no run is there (no config.yaml); give the directory that `jaxmem train` wrote")
    cfg = load_config(directory / "config.yaml", overrides)
    devices = jax.devices()
    mesh = cfg.mesh
    if mesh.replica * mesh.fsdp * mesh.tensor * mesh.context * mesh.stage != len(devices):
        cfg, devices = cfg.model_copy(update={"mesh": Mesh()}), devices[:1]
    built = program(cfg, devices)
    with Checkpoints(place(cfg, directory), read_only=True) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"{directory}: no checkpoint is there yet")
        _, config = checkpoints.read(step)
        params = checkpoints.restore_params(step, built.saved_state(config).params)
        return built, built.restored_params(params, config)
