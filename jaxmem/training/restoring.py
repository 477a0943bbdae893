"""A run's state out of its checkpoints: where it goes on, and where it goes back to."""

from __future__ import annotations

from typing import Any

import jax

from jaxmem.checkpoint import Checkpoints
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Train
from jaxmem.hf.initial import add_adapters, initial_state
from jaxmem.inference.load import base_from, base_of_run
from jaxmem.step import Program
from jaxmem.step.state import TrainState
from jaxmem.training.telemetry import DivergedError


def restored(built: Program, checkpoints: Checkpoints) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Step, state and the data's position of the newest whole checkpoint. Of imported weights the position is empty:
    nothing was trained."""
    saved = SavedState(built)
    if (imported := checkpoints.read_latest()) and not imported[0]:
        return 0, built.begin(add_adapters(built, base_from(built, checkpoints, 0))), {}
    found = checkpoints.restore_latest(saved.shapes)
    if found is None:
        return None
    step, state, position, config = found
    return step, saved.restored(state, config), position


def begun(built: Program) -> TrainState:
    """The state that a run begins with: of the weights that `model.hf` or `adapter.base_run` names, or of new ones."""
    run = built.cfg.adapter.base_run
    return initial_state(built) if run is None else built.begin(add_adapters(built, base_of_run(built, run)))


class Rollback:
    """Back to the newest checkpoint, while the data goes on from where it is: what a run diverged on is not seen again.

    It costs the updates since that checkpoint, and no memory: the state that is given up makes room first.
    """

    def __init__(self, built: Program, checkpoints: Checkpoints, train: Train) -> None:
        self._built, self._checkpoints, self._train = built, checkpoints, train
        self._to: int | None = None
        self._times = 0

    def __call__(self, error: DivergedError, state: TrainState) -> tuple[int, TrainState]:
        """Step and state to go on from; raises what was found where the run is to stop."""
        if getattr(self._train, error.key) != "rollback":
            raise error
        latest = self._checkpoints.latest()
        self._times = self._times + 1 if latest == self._to else 1
        self._to = latest
        if latest is None or self._times > self._train.max_skipped:
            raise error
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        found = restored(self._built, self._checkpoints)
        assert found is not None
        return found[:2]
