"""The weights that a program begins from: new ones, those of a directory, and what learns beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters, hf, models
from jaxmem.config import Config, Decoder
from jaxmem.config.names import rests_on_host
from jaxmem.quant import precision
from jaxmem.quant.precision import Params
from jaxmem.sharding import Axes, is_axes
from jaxmem.sharding.storage import Storage, storing_as
from jaxmem.step.execution import execution

if TYPE_CHECKING:
    from jaxmem.step import Program

_ADAPTERS = 2**31 - 1  # folded into the seed's key: what adapters begin from, beside the model's own weights


class Weights:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._cfg: Config = program.cfg

    @property
    def order(self) -> list[int] | None:
        """Which layer lies at each place of a stack; None: its own."""
        return None if self._program.pipeline is None else self._program.pipeline.order.tolist()

    def network(self) -> models.Network:
        """The model with what is beside it, without the layers that fill up the stages."""
        network = self._model(jax.random.key(0))
        adapters.attach(network, self._cfg.adapter, jax.random.key(0))
        return network

    def new(self, key: jax.Array) -> Params:
        base = self._base(key)
        if self._program.pipeline is not None:
            base = jax.tree.map(self._staged, adapters.base_of(self._program.axes), base, is_leaf=is_axes)
        return base if self._cfg.adapter.kind == "none" else self._with_adapters(base, key)

    def read(self) -> Params:
        """The model's own weights, from the Hugging Face directory of the config, where and as this program keeps
        them."""
        model, program = self._cfg.model, self._program
        assert isinstance(model, Decoder)
        assert model.hf is not None
        if self._cfg.adapter.hf is not None:
            hf.check_adapter(self._cfg.adapter.hf, model.hf)
        base, axes = adapters.base_of(program.state.params), adapters.base_of(program.axes)
        return hf.read_weights(model.hf, model, base, axes, program.layout, self.order)

    def adapted(self, base: Params) -> Params:
        """The model's own weights, which it takes over, and the adapters that learning begins from: new ones, or those
        of `adapter.hf`."""
        adapter, model, program = self._cfg.adapter, self._cfg.model, self._program
        if adapter.kind == "none":
            return base
        places = jax.tree.map(lambda x: x.sharding, program.state.params)
        with program.lowering():
            new = jax.jit(self._with_adapters, donate_argnums=0, out_shardings=places)
            params = new(base, jax.random.key(self._cfg.seed))
        if adapter.hf is None:
            return params
        assert isinstance(model, Decoder)
        read = hf.read_adapter(adapter.hf, program.state.params, program.axes, model.layers, program.layout, self.order)
        return unflatten_dict({**flatten_dict(params), **read})

    def fresh(self, module: str) -> dict[tuple[str, ...], Any]:
        """New weights of one module of the model, by their paths."""
        paths = [path for path in flatten_dict(adapters.base_of(self._program.axes)) if path[0] == module]
        placed = flatten_dict(self._program.state.params)

        def made(key: jax.Array) -> dict[tuple[str, ...], Any]:
            every = flatten_dict(self._base(key))
            return {path: every[path] for path in paths}

        places = {path: jax.tree.map(lambda x: x.sharding, placed[path]) for path in paths}
        with self._program.lowering():
            return jax.jit(made, out_shardings=places)(jax.random.key(self._cfg.seed))

    def rests(self, path: Sequence[str]) -> Storage:
        """How the weight at a path of names does."""
        cfg, choice = self._cfg, self._program.choice
        if choice is None or tuple(jax.tree_util.DictKey(name) for name in path) in choice.layers:
            return Storage(cfg.precision)
        away = rests_on_host(cfg.memory.offload, "frozen")
        double = cfg.adapter.double_quant and cfg.base_precision != cfg.precision
        return Storage(cfg.base_precision, double, away)

    def _model(self, key: jax.Array) -> models.Network:
        compute = precision.compute_dtype(self._cfg.precision, self._program.platform)
        how = execution(self._cfg, compute, self._program.pipeline)
        return models.build(self._cfg.model, nnx.Rngs(params=key), how)

    def _base(self, key: jax.Array) -> Params:
        """New weights of the model itself, in what those that learn and those that stay rest in. Made twice in a trace
        where the two are not alike, and once in what is compiled."""

        def made(how: Storage) -> Params:
            with storing_as(how):
                return nnx.to_pure_dict(nnx.state(self._model(key)))

        axes = self._program.axes
        kinds = {how: flatten_dict(made(how)) for how in {self.rests(path) for path in flatten_dict(axes)}}
        return unflatten_dict({path: kinds[self.rests(path)][path] for path in flatten_dict(adapters.base_of(axes))})

    def _with_adapters(self, base: Params, key: jax.Array) -> Params:
        network = nnx.eval_shape(partial(self._model, key))
        graphdef, _ = nnx.split(network)
        network = nnx.merge(graphdef, base)
        with storing_as(Storage(self._cfg.precision)):
            adapters.attach(network, self._cfg.adapter, jax.random.fold_in(key, _ADAPTERS), self.order)
        return nnx.to_pure_dict(nnx.state(network))

    def _staged(self, axes: Axes, weight: Any) -> Any:
        """A stack of layers as the stages store it."""
        pipeline = self._program.pipeline
        return jax.tree.map(pipeline.arranged, weight) if pipeline and axes[:1] == ("layer",) else weight
