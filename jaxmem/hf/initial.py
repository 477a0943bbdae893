"""The weights of `model.hf` and `adapter.hf`, for a program."""

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters
from jaxmem.config.networks import Decoder
from jaxmem.hf.peft import check_adapter, read_adapter
from jaxmem.hf.reader import read_weights
from jaxmem.quant.precision import Params
from jaxmem.step import Program


def read_base(program: Program) -> Params:
    """The weights of the model from `model.hf`, stored and sharded like those of the program."""
    model, adapter, spec = program.cfg.model, program.cfg.adapter, program.model
    assert isinstance(model, Decoder)
    assert model.hf is not None
    if adapter.hf is not None:
        check_adapter(adapter.hf, model.hf)
    base, axes = adapters.base_of(program.spec.state.params), adapters.base_of(spec.axes)
    return read_weights(model.hf, model, base, axes, program.layout, spec.layer_indices, adapter.hf)


def add_adapters(program: Program, base: Params) -> Params:
    """Weights of the model, which are donated, with new adapters or those of `adapter.hf`."""
    params, adapter = program.add_adapters(base), program.cfg.adapter
    if adapter.hf is None or adapter.kind == "none":
        return params
    return unflatten_dict({**flatten_dict(params), **read_adapter(program)})
