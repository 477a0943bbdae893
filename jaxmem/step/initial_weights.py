"""The initial weights of a network, in the form in which they are stored between steps."""

from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters
from jaxmem.config import Precision
from jaxmem.config.names import is_offloaded, split_stack
from jaxmem.config.networks import Quantization
from jaxmem.models import user
from jaxmem.quant.precision import Params
from jaxmem.sharding.trees import Path, replace_at, subtree
from jaxmem.sharding.weights import Storage, storing_as
from jaxmem.stack.call import creating_in
from jaxmem.step.model import ModelSpec

# Folded into the key of the seed for new adapters, so that they do not depend on the weights of the model.
_ADAPTER_KEY = 2**31 - 1


@dataclass(frozen=True)
class InitialWeights:
    model: ModelSpec

    def storage(self, path: Path) -> Storage:
        """How the weight at a path is stored."""
        model = self.model
        cfg = model.cfg
        if path in model.forward_state:
            return Storage(Precision())
        if tuple(jax.tree_util.DictKey(name) for name in path) in model.selection.layers:
            return Storage(cfg.precision)
        on_host = is_offloaded(cfg.memory.offload, "frozen")
        axes = subtree(model.axes, path)
        if "vocab" in axes and cfg.adapter.embeddings is not None:
            return Storage(cfg.embedding_precision, cfg.adapter.double_quant, on_host)
        stored_form: Quantization | None = cfg.base_quantization
        if (
            stored_form is not None
            and path[-1] == "weight"
            and split_stack(".".join(path[:-1]))[0] in stored_form.layers
        ):
            return Storage(cfg.base_precision, stored_form.scale_group or False, on_host, has_exact_blocks=True)
        precision = cfg.expert_precision if "expert" in axes else cfg.base_precision
        if stored_form is not None:
            stored = stored_form.others if cfg.adapter.base is None else cfg.adapter.base
            precision = cfg.precision.model_copy(update={"parameters": stored})
        return Storage(precision, cfg.adapter.double_quant and precision != cfg.precision, on_host)

    def new(self, key: jax.Array) -> Params:
        """Initial weights, including adapters, in their stored form."""
        base = self.new_base(key)
        return base if self.model.cfg.adapter.kind == "none" else self.with_adapters(base, key)

    def new_base(self, key: jax.Array) -> Params:
        """Initial weights of the model without adapters. If trainable and frozen weights are stored differently, the
        network is traced twice, and XLA removes what is not used."""
        model = self.model

        def create(storage: Storage) -> Params:
            if model.flax_model is not None:
                axes = model.flax_model.axes
                state = model.forward_state
                values = user.variables_of(model.build(key)).items()
                return unflatten_dict({p: x if p in state else user.store_flax(x, axes[p], storage) for p, x in values})
            with storing_as(storage), creating_in(model.execution.pipeline):
                return nnx.to_pure_dict(nnx.state(model.build(key)))

        storages = {self.storage(path) for path in flatten_dict(model.axes)}
        created = {storage: flatten_dict(create(storage)) for storage in storages}
        paths = next(iter(created.values()))  # without adapters
        return unflatten_dict({path: created[self.storage(path)][path] for path in paths})

    def with_adapters(self, base: Params, key: jax.Array) -> Params:
        """The weights of the model with new adapters."""
        model = self.model
        network = nnx.eval_shape(partial(model.build, key))
        adapter_key = jax.random.fold_in(key, _ADAPTER_KEY)
        if model.flax_model is not None:
            adapters.attach(network, model.cfg.adapter, adapter_key)
            known = flatten_dict(base)
            added = {path: x for path, x in user.variables_of(network).items() if path not in known}
            storage = Storage(model.cfg.precision)
            new = {p: user.store_flax(x, model.flax_model.axes[p], storage) for p, x in added.items()}
            return replace_at(base, new)
        network = nnx.merge(nnx.split(network)[0], base)
        with storing_as(Storage(model.cfg.precision)):
            adapters.attach(network, model.cfg.adapter, adapter_key, model.execution.layer_order)
        return nnx.to_pure_dict(nnx.state(network))
