"""The state of a run from its checkpoints, to resume or to roll back."""

from typing import Any

import jax

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Train
from jaxmem.step import Program
from jaxmem.step.state import TrainState
from jaxmem.training.telemetry import DivergedError


def restore(built: Program, checkpoints: Checkpoints) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Step, state and data position of the newest complete checkpoint. The position is empty for imported weights."""
    if (latest := checkpoints.read_latest()) and not latest[1]:  # no data position: imported weights
        from jaxmem.hf.initial import add_adapters
        from jaxmem.inference.load import base_params

        return 0, built.begin(add_adapters(built, base_params(built, checkpoints, 0))), {}
    saved = SavedState(built)
    found = checkpoints.restore_latest(saved.shapes)
    if found is None:
        return None
    step, state, position, config = found
    return step, saved.restored(state, config), position


def starting_state(built: Program) -> TrainState:
    """A state with new weights, or with those of `model.hf` or `adapter.base_run`."""
    run = built.cfg.adapter.base_run
    from jaxmem.hf import initial

    if run is None:
        return initial.initial_state(built)
    from jaxmem.inference.load import load_base_params

    return built.begin(initial.add_adapters(built, load_base_params(built, run)))


class Rollback:
    """Returns to the newest checkpoint, while the data continues, so that the data on which a run diverged is skipped.

    The updates since that checkpoint are lost. No memory is needed, since the old state is freed first.
    """

    def __init__(self, built: Program, checkpoints: Checkpoints, train: Train) -> None:
        self._built, self._checkpoints, self._train = built, checkpoints, train
        self._to: int | None = None
        self._times = 0

    def __call__(self, error: DivergedError, state: TrainState) -> tuple[int, TrainState]:
        """Step and state to continue from; raises the error if the run must stop."""
        if getattr(self._train, error.key) != "rollback":
            raise error
        latest = self._checkpoints.latest()
        self._times = self._times + 1 if latest == self._to else 1
        self._to = latest
        if latest is None or self._times > self._train.max_skipped:
            raise error
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        found = restore(self._built, self._checkpoints)
        assert found is not None
        return found[:2]
