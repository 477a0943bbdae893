"""The weights that a program starts from if its config names existing ones."""

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters
from jaxmem.config.networks import Decoder
from jaxmem.hf.adapter_base import check_adapter
from jaxmem.hf.peft import read_adapter
from jaxmem.hf.reader import read_weights
from jaxmem.quant.precision import Params
from jaxmem.step import Program
from jaxmem.step.state import TrainState


def initial_state(program: Program) -> TrainState:
    """A new state, from the weights of `model.hf` if it is set; otherwise with random weights."""
    if getattr(program.cfg.model, "hf", None) is None:
        return program.initialise()
    return program.begin(add_adapters(program, read_base(program)))


def read_base(program: Program) -> Params:
    """The weights of the model from `model.hf`, stored and sharded like those of the program."""
    model, adapter = program.cfg.model, program.cfg.adapter
    assert isinstance(model, Decoder)
    assert model.hf is not None
    if adapter.hf is not None:
        check_adapter(adapter.hf, model.hf)
    base, axes = adapters.base_of(program.spec.state.params), adapters.base_of(program.model.axes)
    order = program.model.layer_order
    return read_weights(model.hf, model, base, axes, program.layout, order, program.cfg.adapter.hf)


def add_adapters(program: Program, base: Params) -> Params:
    """Weights of the model, which are donated, with new adapters or those of `adapter.hf`."""
    params, cfg, spec, order = program.add_adapters(base), program.cfg, program.spec, program.model.layer_order
    if cfg.adapter.hf is None or cfg.adapter.kind == "none":
        return params
    model = cfg.model
    assert isinstance(model, Decoder)
    read = read_adapter(
        cfg.adapter, spec.state.params, program.model.axes, model.layers, program.layout, order, model.hf
    )
    return unflatten_dict({**flatten_dict(params), **read})
