"""A stack of matrices is so many matrices, in one call or layer by layer; and what leaves there are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.config import load_config
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.pipeline.stages import Pipeline
from jaxmem.sharding.layout import layout_for
from tests.optim.conftest import gradients, normal, same, updates
from tests.support.tiers import cases

# Those that draw random numbers have other ones for each name of a leaf.
DRAWS = {"galore_adamw", "galore_adamw8bit", "qgalore", "apollo", "apollo_mini"}
AXES = {"w": ("layer", "embed", "mlp"), "norm": ("layer", "norm")}


def stack():
    return {"w": normal(3, 16, 24), "norm": normal(3, 16, seed=1)}


@pytest.mark.exhaustive
def test_every_optimizer_of_a_config_is_a_chain():
    assert set(OPTIMIZERS) == set(OPTIMIZERS)
    for name, entry in OPTIMIZERS.items():
        own = entry.fields
        optim.optimizer(name)(0.1, axes=AXES, **own).init(stack())


@pytest.mark.parametrize("name", cases(sorted(OPTIMIZERS), "adafactor", "qgalore"))
def test_a_stack_is_updated_as_separate_matrices(name):
    """Update after update, also in when each layer's projection is found anew; one layer at a time is the same."""
    params = stack()
    grads = gradients(params, 2)
    own = {"refresh_every": 2} if "refresh_every" in OPTIMIZERS[name].fields else {}
    tx = optim.optimizer(name)(0.1, axes=AXES, **own)
    all_at_once, _ = updates(tx, params, grads)
    begun = jax.jit(tx.init)(params)
    update = jax.jit(lambda g, s, w, i: tx.update(g, s, w, layer=i, layers=3))
    matrix = optim.optimizer(name)(0.1, axes={path: axes[1:] for path, axes in AXES.items()}, **own)
    alone = jax.jit(matrix.update)
    for layer in range(3):
        one = lambda tree, layer=layer: jax.tree.map(lambda x: x[layer] if x.ndim else x, tree)  # noqa: E731
        state = single = one(begun)
        for g, expected in zip(grads, all_at_once, strict=True):
            said, state = update(one(g), state, one(params), jnp.asarray(layer))
            same(said, one(expected))
            if name not in DRAWS:
                said, single = alone(one(g), single, one(params))
                same(said, one(expected))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_scalars_vectors_tensors_and_nothing(name):
    """Every rank has an update, of its own shape, finite, and against the gradient; an empty leaf stays empty."""
    params = {
        "scalar": jnp.float32(1.0), "vector": normal(5), "tensor": normal(2, 3, 4, 5),
        "one": jnp.ones((1, 1)), "empty_matrix": jnp.zeros((0, 4)), "empty_vector": jnp.zeros(0),
        "empty_stack": jnp.zeros((0, 4, 5)),
    }  # fmt: skip
    axes = jax.tree.map(lambda w: (None,) * w.ndim, params) | {"empty_stack": ("layer", None, None)}
    (g,) = gradients(params, 1)
    (said,), _ = updates(optim.optimizer(name)(0.1, axes=axes), params, [g])
    for path, u in said.items():
        assert u.shape == params[path].shape
        assert np.isfinite(u).all()
        assert not u.size or float(jnp.sum(u * g[path])) < 0


def test_the_dtype_of_a_gradient_is_that_of_its_update():
    params = {"w": normal(16, 24).astype(jnp.bfloat16)}
    (said,), state = updates(optim.scale_by_muon(), params, [params])
    assert said["w"].dtype == jnp.bfloat16
    assert state.arrays["m"]["w"].dtype == jnp.float32


@pytest.mark.parametrize("name", ["muon", "galore_adamw8bit", "qgalore", "apollo", "adafactor", "adam_mini"])
def test_an_update_holds_one_layer_beside_the_state(name):
    """Compiled bytes: state and gradients are written in place."""
    params = {"w": jax.ShapeDtypeStruct((32, 64, 128), jnp.float32)}
    tx = optim.optimizer(name)(0.1, axes={"w": ("layer", "embed", "mlp")})
    state = jax.eval_shape(tx.init, params)
    compiled = jax.jit(tx.update, donate_argnums=(0, 1)).lower(params, state, params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 64 * 128 * 4


def test_layers_are_updated_on_their_pipeline_stage():
    """The same updates, and no layer leaves its stage."""
    params = {"w": normal(4, 16, 24)}
    axes = {"w": ("layer", "embed", "mlp")}
    grads = gradients(params, 1)[0]
    tx = optim.muon(0.1, axes=axes)
    expected, _ = tx.update(grads, tx.init(params), params)

    cfg = load_config({"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 1}, "mesh": {"stage": 2}})
    layout = layout_for(cfg, jax.devices()[:2])
    place = layout.sharding("optimizer", axes["w"], (4, 16, 24))
    with layout:
        step = jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params)[0], out_shardings={"w": place})
        compiled = step.lower(*jax.device_put((grads, params), place)).compile()
    same(compiled(*jax.device_put((grads, params), place)), expected)
    assert "all-gather" not in compiled.as_text()


# One of each rule that has a second moment, and Muon, which multiplies gradients by each other.
SQUARING = ("adamw", "galore_adamw8bit", "adamw8bit", "adafactor", "adam_mini", "apollo", "muon")


@pytest.mark.parametrize("name", cases(SQUARING, "adamw", "galore_adamw8bit"))
def test_float16_gradients_are_squared_in_float32(name):
    """Squares of 1e-4 are below the smallest float16, and those of 1e3 above the largest."""
    params = {"w": normal(64, 72)}
    for size in (1e-3, 1e3):
        grads = [{"w": (g["w"] * size).astype(jnp.float16)} for g in gradients(params, 2)]
        wide = [{"w": g["w"].astype(jnp.float32)} for g in grads]
        tx = optim.optimizer(name)(0.1)
        same(updates(tx, params, grads)[0], updates(tx, params, wide)[0])


def test_float16_weights_have_float32_moments():
    state = optim.adamw(0.1).init({"w": jnp.ones((8, 8), jnp.float16)})
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.ndim} == {"float32"}


@pytest.mark.parametrize(
    "tx", [optim.adam(0.1, beta2=0.999), optim.lion(0.1, beta2=0.999), optim.sgd(0.1, momentum=0.9)]
)
def test_moments_in_bfloat16_follow_those_in_float32(tx):
    """In bfloat16 a decay of 0.999 is 1, and a mean rounded to nearest stays where it is."""
    noise = normal(3000, 256) * jnp.where(jnp.arange(3000) < 1000, 1.0, 0.1)[:, None]

    def size(dtype):
        run = jax.jit(
            lambda grads, state: jax.lax.scan(lambda state, g: (tx.update(g, state)[1], None), state, grads)[0]
        )
        *_, moment = (x for x in jax.tree.leaves(run(noise.astype(dtype), tx.init(jnp.zeros(256, dtype)))) if x.ndim)
        assert moment.dtype == dtype
        return float(jnp.mean(jnp.abs(moment.astype(jnp.float32))))

    assert size(jnp.bfloat16) == pytest.approx(size(jnp.float32), rel=0.05)


@pytest.mark.parametrize("name", ["apollo", "galore_adamw", "qgalore"])
def test_random_projections_and_their_refresh_belong_to_a_layer_wherever_a_pipeline_stores_it(name: str) -> None:
    pipeline = Pipeline(layers=5, stages=2, micro_batches=2, rounds=2)

    tx = getattr(optim, name)(0.1, rank=2, refresh_every=3, axes={"w": ("layer", None, None)})

    def updates(pipeline: Pipeline | None) -> np.ndarray:
        order = np.arange(5) if pipeline is None else pipeline.order
        weight = {"w": jnp.zeros((len(order), 32, 48))}
        state = tx.init(weight)
        results = []
        for step in range(4):
            gradient = np.random.default_rng(step).standard_normal((8, 32, 48)).astype(np.float32)
            update = jax.jit(partial(tx.update, pipeline_of=lambda _: pipeline))
            u, state = update({"w": jnp.asarray(gradient[order])}, state, weight)
            results.append(np.asarray(u["w"]))
        return np.stack(results)[:, np.argsort(order)[:5]]

    np.testing.assert_allclose(updates(pipeline), updates(None), rtol=1e-4, atol=1e-6)
