"""Weights that rest in codes: trained in full, on every mesh alike, checkpointed, planned, evaluated."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import optim
from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.config.sections import Precision
from jaxmem.errors import UserError
from jaxmem.estimate.memory import estimate
from jaxmem.estimate.state import bytes_on_device
from jaxmem.optim import in_place
from jaxmem.quant import FORMATS, QTensor, quantize
from jaxmem.sharding.weights import is_encoded
from jaxmem.step.objective import objective_of
from jaxmem.step.programs import program
from tests.step.conftest import Trained, batch_for, config

INT8 = {"precision": {"parameters": "int8"}, "optimizer": {"learning_rate": 1e-2, "epsilon": 1e-3}}


def values(params):
    return jax.tree.map(lambda w: w.dequantize(jnp.float32) if is_encoded(w) else w, params, is_leaf=is_encoded)


def numbers(x):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(x)])


@pytest.fixture(scope="module")
def alone():
    return Trained(config(**INT8))


def test_every_format_that_is_no_magnitude_may_hold_weights():
    named = Precision.model_json_schema()["properties"]["parameters"]["enum"]
    assert set(named) == {"float32", "bfloat16", *(name for name in FORMATS if not name.startswith("udynamic"))}


@pytest.mark.exhaustive
def test_matrices_are_quantized_along_their_inputs_and_vectors_are_not(alone):
    for path, w in jax.tree_util.tree_leaves_with_path(alone.state.params, is_leaf=is_encoded):
        name = jax.tree_util.keystr(path)
        assert is_encoded(w) == ("norm" not in name), name
        if is_encoded(w):
            assert w.axis == (-1 if "embedding" in name else -2), name


@pytest.mark.exhaustive
def test_every_weight_learns(alone):
    """Embedding and head included, with one layer's learning rate and the gradients of the values."""
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(alone.first), jax.tree.leaves(alone.params), strict=True
    ):
        assert not np.array_equal(before, after), path
    assert alone.metrics[-1]["loss"] < alone.metrics[0]["loss"] - 1


@pytest.mark.exhaustive
def test_a_gradient_is_that_of_the_values(alone):
    cfg, batch = alone.built.cfg, batch_for(alone.built, 0)
    one = {name: jnp.asarray(x[0]) for name, x in batch.items()}

    def mean(params):
        sums = objective_of(cfg)(nnx.merge(alone.built.model.graphdef, params), one, None)
        return sums["loss"] / sums["count"]

    loss, grads = jax.jit(jax.value_and_grad(mean))(values(alone.begun.params))
    assert alone.metrics[0]["loss"] == pytest.approx(float(loss), rel=1e-4)  # values in bfloat16
    assert alone.metrics[0]["gradient_norm"] == pytest.approx(float(optim.global_norm(grads)), rel=1e-2)


SLOW = {**INT8["optimizer"], "learning_rate": 5e-3, "schedule": "constant"}  # few values near a rounding boundary


@pytest.mark.exhaustive
def test_a_mesh_trains_quantized_weights_as_one_device():
    """Which cuts blocks, layers into stages and the vocabulary into slices, and groups rows whose gradients are summed
    apart. With a kernel, as one device without one."""
    alone = Trained(config(**(INT8 | {"optimizer": SLOW})), updates=2)
    mesh = {"stage": 2, "fsdp": 2, "tensor": 2}
    sections = {
        "optimizer": {**SLOW, "kernel": "triton"},
        "zero": 1,
        "mesh": mesh,
        "batch": {"global_size": 8, "accumulate": 2},
        "memory": {"loss_chunk": 64},
    }
    batches = [batch_for(alone.built, update) for update in range(2)]
    cut = [{name: x.reshape(2, -1, *x.shape[2:]) for name, x in batch.items()} for batch in batches]
    split = Trained(config(**(INT8 | sections)), math.prod(mesh.values()), 2, cut, begin=alone)
    for mine, theirs in zip(split.metrics, alone.metrics, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
    assert (numbers(split.params) != numbers(alone.params)).mean() < 0.02  # vectors, and draws near a boundary
    far = np.abs(numbers(values(split.state.params)) - numbers(values(alone.state.params)))
    assert far.mean() < 1e-5


@pytest.mark.exhaustive
def test_a_checkpoint_moves_to_another_mesh(alone, tmp_path):
    other = program(config(**INT8, mesh={"fsdp": 2, "tensor": 2}), jax.devices()[:4])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, alone.state, {}, {}, force=True)
        moved, *_ = checkpoints.restore(1, other.spec.state)
    for mine, theirs in zip(jax.tree.leaves(alone.state), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@pytest.mark.exhaustive
def test_what_is_evaluated_is_what_is_trained(alone):
    batch = alone.built.place(batch_for(alone.built, 0))
    params = jax.device_put(alone.begun.params, jax.tree.map(lambda x: x.sharding, alone.built.spec.state.params))
    sums = alone.built.compiled_evaluate(params, batch)
    assert float(sums["loss"] / sums["count"]) == pytest.approx(alone.metrics[0]["loss"], rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sections", [{}, {"mesh": {"fsdp": 4, "tensor": 2}}])
def test_their_bytes_are_known_beforehand(sections):
    built = program(config(**INT8, **sections), jax.devices()[: 8 if sections else 1])
    parts = estimate(built.cfg, "cpu").categories
    assert parts["parameters"] + parts["quantization"] == bytes_on_device(built.spec.state.params)
    if not sections:
        codes = [w for w in jax.tree.leaves(built.spec.state.params, is_leaf=is_encoded) if is_encoded(w)]
        assert parts["quantization"] == sum(4 * w.scale.size for w in codes)
        assert parts["gradients"] == 4 * built.model.parameter_count  # in what is computed in: float32 on a CPU


# ------------------------------------------------------------------ where they change


def stack(form="int8"):
    x = jax.random.normal(jax.random.key(0), (3, 64, 8)) / 8
    return {"w": quantize(x, form, 32, -2)}, {"w": ("layer", "embed", "mlp")}


@pytest.mark.parametrize("form", ["int8", "nf4", "fp8_e4m3"])
def test_a_hundred_small_updates_add_up(form):
    """Each of them is a hundredth of a step between codes; rounded to the nearest all would be lost."""
    params, axes = stack(form)
    before = params["w"].dequantize(jnp.float32)
    update = {"w": jnp.full((3, 64, 8), 1e-5)}
    step = jax.jit(lambda p, key: optim.apply_updates(p, update, key, axes))
    for number in range(100):
        params = step(params, jax.random.key(number))
    moved = params["w"].dequantize(jnp.float32) - before
    assert float(moved.mean()) == pytest.approx(1e-3, abs=5 * float(moved.std()) / moved.size**0.5)
    assert float(moved.std()) > 1e-3
    still, begun = optim.apply_updates(stack(form)[0], update, None, axes)["w"], stack(form)[0]["w"]
    assert (np.asarray(still.codes) != np.asarray(begun.codes)).mean() < 0.01


@pytest.mark.exhaustive
def test_a_layer_alone_changes_as_among_all(monkeypatch):
    monkeypatch.setattr(in_place, "PART_SIZE", 256)  # in two parts each
    params, axes = stack()
    u, key = {"w": jax.random.normal(jax.random.key(1), (3, 64, 8)) * 1e-3}, jax.random.key(2)
    every = optim.apply_updates(params, u, key, axes)["w"]
    alone = jax.tree.map(lambda x: x[1], (params, u))
    one = optim.apply_updates(*alone, key, axes, layer=jnp.asarray(1))["w"]
    assert isinstance(one, QTensor)
    jax.tree.map(np.testing.assert_array_equal, one, jax.tree.map(lambda x: x[1], every))


def test_a_kernel_says_what_it_cannot_do():
    params, update = {"w": quantize(jnp.ones((40, 8)), "int8", 32, -2)}, {"w": jnp.ones((40, 8))}
    with pytest.raises(UserError, match=r"int8_add: block_size is 32; the 40 .*use optimizer.kernel=none"):
        optim.apply_updates(params, update, jax.random.key(0), kernel="triton")
    with pytest.raises(UserError, match="kernel=triton requires a key for stochastic rounding"):
        optim.apply_updates(params, update, kernel="triton")


def test_a_step_holds_one_layer_of_values():
    """Compiled bytes: decoded, changed and encoded layer by layer, where the codes are."""
    q = jax.eval_shape(lambda: quantize(jnp.zeros((64, 64, 128)), "int8", 64, -2))
    u = jax.ShapeDtypeStruct((64, 64, 128), jnp.float32)
    change = jax.jit(
        lambda q, u, key: optim.apply_updates({"w": q}, {"w": u}, key, {"w": ("layer", "embed", "mlp")}),
        donate_argnums=0,
    )
    memory = change.lower(q, u, jax.eval_shape(lambda: jax.random.key(0))).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 64 * 128 * 4
    assert memory.alias_size_in_bytes == q.nbytes
