"""What layers call their values: the table in the config is what networks say, and what is named is kept."""

import jax
import pytest
from flax import nnx

from jaxmem import models
from jaxmem.config import load_config
from jaxmem.config.networks import FAMILIES
from jaxmem.models.network import Execution
from jaxmem.stack.call import StackOptions
from jaxmem.step.objective import objective_of
from jaxmem.step.programs import program
from tests.step.conftest import config

PICTURES = {"data": {"source": "digits"}, "objective": "classify"}


def loss_of(cfg, remat):
    """(weights, batch) -> loss, and abstract arguments, of one micro-batch."""
    built = program(cfg, jax.devices()[:1])
    network = nnx.eval_shape(lambda: models.build(cfg.model, nnx.Rngs(0), Execution(stack=StackOptions(remat))))
    graphdef, state = nnx.split(network)
    whole = objective_of(cfg)
    batch = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in built.spec.batch.items()}
    loss = lambda weights, batch: whole(nnx.merge(graphdef, weights), batch, None)["loss"]  # noqa: E731
    return loss, (nnx.to_pure_dict(state), batch)


def equations(traced):
    for one in traced.eqns:
        yield one
        for value in one.params.values():
            for part in value if isinstance(value, (list, tuple)) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    yield from equations(part)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"own"}))  # whose network is an argument
def test_the_table_is_what_networks_say(family):
    more = {} if family == "decoder" else {**PICTURES, "model": {"family": family}}
    base = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 1}}
    loss, arguments = loss_of(load_config({**base, **more}), "none")
    traced = jax.make_jaxpr(jax.grad(loss))(*arguments)
    said = {one.params["name"] for one in equations(traced.jaxpr) if one.primitive.name == "name"}
    assert said - {"product", "gathered_weight"} == set(FAMILIES[family].activations)


@pytest.mark.exhaustive
def test_what_is_named_is_kept_and_nothing_else():
    cfg = config(model={"preset": "tiny", "layers": 3, "mlp": 96})
    sizes = {}
    for names in ((), ("mlp_hidden",), ("mlp_hidden", "attention_q")):
        loss, arguments = loss_of(cfg, names or "full")
        kept = jax.eval_shape(lambda *given, loss=loss: jax.vjp(loss, *given)[1], *arguments)
        sizes[names] = sum(x.size for x in jax.tree.leaves(kept) if x.ndim > 2 and x.shape[0] == 3)
    rows, time, model = 8, 24, cfg.model
    assert sizes["mlp_hidden",] - sizes[()] == 3 * rows * time * model.mlp
    both = sizes["mlp_hidden", "attention_q"] - sizes[()]
    assert both == 3 * rows * time * (model.mlp + model.heads * model.head_dim)
