"""The part of a training state that a checkpoint contains, and the state that is restored from it.

Frozen weights that `model.hf` provides are not saved again. Layers are saved in the order in which pipeline stages
store them, and reordered for the program that restores them.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem.checkpoint.restage import Restage
from jaxmem.errors import UserError
from jaxmem.quant.precision import Params
from jaxmem.step import Program
from jaxmem.step.state import TrainState


class SavedState:
    """Converts the state of a program to and from checkpoints. `config`: the config of the run that saved, as JSON."""

    def __init__(self, program: Program) -> None:
        self._program, self._model, self._spec = program, program.model, program.spec

    def of(self, state: TrainState) -> TrainState:
        """The part of a state that is saved."""
        return dataclasses.replace(state, params=self._saved(state.params))

    def shapes(self, config: Mapping[str, Any]) -> TrainState:
        """Shapes and shardings to restore a checkpoint into."""
        spec, restage = self._spec, self._restage(config)
        state = self.of(spec.state)
        if not restage.needed:
            return state
        params = restage.saved("weights", self._saved(spec.param_axes), state.params)
        opt_state = restage.saved("optimizer", spec.opt_axes, state.opt_state)
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    def restored(self, saved: TrainState, config: Mapping[str, Any]) -> TrainState:
        """The state of the program, from the arrays that were restored into `shapes`."""
        params = self.restored_params(saved.params, config)
        opt_state = self._restaged(config, self._spec.opt_axes, saved.opt_state, self._spec.state.opt_state)
        return dataclasses.replace(saved, params=params, opt_state=opt_state)

    def restored_params(self, params: Params, config: Mapping[str, Any]) -> Params:
        axes, shapes = self._saved(self._spec.param_axes), self._saved(self._spec.state.params)
        params = self._restaged(config, axes, params, shapes)
        if not self._has_external_base:
            return params
        from jaxmem.hf.initial import read_base

        base = flatten_dict(read_base(self._program))
        merged = unflatten_dict({path: base.get(path, x) for path, x in flatten_dict(params).items()})
        return self._model.replace(merged, params)

    @cached_property
    def base(self) -> str | None:
        """The fingerprint of the frozen weights that `model.hf` provides; None: all weights are saved."""
        from jaxmem.hf.adapter_base import fingerprint

        return fingerprint(self._hf) if self._hf is not None and self._has_external_base else None

    def check_base(self, position: Mapping[str, Any], where: object) -> None:
        """Refuses a checkpoint that was trained on frozen weights other than those of `model.hf`."""
        if self._hf is not None and position.get("base", self.base) != self.base:
            raise UserError(
                f"model.hf: {self._hf} has other weights than those that {where} was trained on; use the unchanged"
                " directory"
            )

    @property
    def _hf(self) -> str | None:
        return getattr(self._program.cfg.model, "hf", None)

    @property
    def _has_external_base(self) -> bool:
        return self._hf is not None and bool(self._program.cfg.trainable_patterns)

    def _saved(self, params: Any) -> Any:
        if not self._has_external_base:
            return params
        every, trainable = flatten_dict(params), flatten_dict(self._model.select(params))
        # The scales of adapters that differ by layer are not trained, but the base does not contain them.
        return unflatten_dict({path: every[path] if path[-1] == "layer_scale" else x for path, x in trainable.items()})

    def _restage(self, config: Mapping[str, Any]) -> Restage:
        return Restage(config, self._program.cfg.model_dump(mode="json"), self._program.layout)

    def _restaged(self, config: Mapping[str, Any], axes: Any, arrays: Any, shapes: Any) -> Any:
        restage = self._restage(config)
        return restage(axes, arrays, shapes) if restage.needed else arrays
