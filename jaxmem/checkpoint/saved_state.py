"""What a checkpoint holds of a program's state, and the way back.

Weights that stay as `model.hf` has them are not kept again. Layers are kept as their run's stages store them, and
brought into the order of this program's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import hf
from jaxmem.config import Decoder
from jaxmem.errors import UserError
from jaxmem.quant.precision import Params
from jaxmem.step.restage import Restage
from jaxmem.step.state import TrainState

if TYPE_CHECKING:
    from jaxmem.step import Program


class Checkpointed:
    """A config, where one is asked for, is that of the run that wrote, as JSON."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def of(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state."""
        return dataclasses.replace(state, params=self._kept(state.params))

    def state(self, config: Mapping[str, Any]) -> TrainState:
        """Shapes and places to read a checkpoint into."""
        program, restage = self._program, self._restage(config)
        state = self.of(program.spec.state)
        if not restage.needed:
            return state
        params = restage.saved("weights", self._kept(program.spec.param_axes), state.params)
        opt_state = restage.saved("optimizer", program.spec.opt_axes, state.opt_state)
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    def restored(self, read: TrainState, config: Mapping[str, Any]) -> TrainState:
        """The program's state, of what was read into `state`."""
        program = self._program
        params = self.restored_params(read.params, config)
        opt_state = self._restaged(config, program.spec.opt_axes, read.opt_state, program.spec.state.opt_state)
        return dataclasses.replace(read, params=params, opt_state=opt_state)

    def restored_params(self, params: Params, config: Mapping[str, Any]) -> Params:
        axes, placed = self._kept(self._program.spec.param_axes), self._kept(self._program.spec.state.params)
        params = self._restaged(config, axes, params, placed)
        if not self._base_elsewhere:
            return params
        base = flatten_dict(self._program.weights.read())
        every = unflatten_dict({path: base.get(path, x) for path, x in flatten_dict(params).items()})
        return every if self._program.model.selection is None else self._program.model.selection.put(every, params)

    @cached_property
    def base(self) -> str | None:
        """The mark of what is read from `model.hf` whenever it is needed."""
        model = self._program.cfg.model
        return hf.fingerprint(model.hf) if self._base_elsewhere and isinstance(model, Decoder) and model.hf else None

    def belongs(self, position: Mapping[str, Any], where: object) -> None:
        """Refuse what a checkpoint holds where it was learnt beside other weights than `model.hf` has."""
        model = self._program.cfg.model
        if isinstance(model, Decoder) and position.get("base", self.base) != self.base:
            raise UserError(
                f"model.hf: {model.hf} holds other weights than those that {where} was learnt beside; give the"
                " directory as it was"
            )

    @property
    def _base_elsewhere(self) -> bool:
        """Whether what does not learn is read from `model.hf` whenever it is needed."""
        cfg = self._program.cfg
        return isinstance(cfg.model, Decoder) and cfg.model.hf is not None and bool(cfg.learns)

    def _kept(self, params: Any) -> Any:
        return self._program.model.select(params) if self._base_elsewhere else params

    def _restage(self, config: Mapping[str, Any]) -> Restage:
        return Restage(config, self._program.cfg.model_dump(mode="json"), self._program.layout)

    def _restaged(self, config: Mapping[str, Any], axes: Any, arrays: Any, placed: Any) -> Any:
        restage = self._restage(config)
        return restage(axes, arrays, placed) if restage.needed else arrays
