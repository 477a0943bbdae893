"""Optimizers of optax whose updates can be computed layer by layer."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem.config.methods import config_with
from jaxmem.errors import UserError
from jaxmem.optim import is_elementwise, updates_stacks_as_layers
from jaxmem.sharding.trees import single_weights
from jaxmem.step.programs import program
from tests.step.conftest import config

SHAPE = jax.ShapeDtypeStruct((2, 130, 140), jnp.float32)
PARAMS = {"stack": SHAPE, "bias": SHAPE}
WARMUP = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 10)  # the first update is zero


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (optax.sgd(0.1, momentum=0.9), True),
        (optax.chain(optax.clip(1.0), optax.adamw(WARMUP)), True),
        (optax.inject_hyperparams(optax.lion)(0.1), True),
        (optax.MultiSteps(optax.adam(0.1), 2), True),
        (optax.partition({"s": optax.adam(0.1), "b": optax.sgd(0.1)}, lambda p: {name: name[0] for name in p}), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
        (optax.chain(optax.clip_by_global_norm(1e6), optax.lion(WARMUP)), False),
        (optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 8), False),
        (optax.chain(optax.scale_by_param_block_rms(), optax.sgd(WARMUP)), False),
        (optax.chain(optax.centralize(), optax.sgd(0.1)), False),
        (optax.clip_by_block_rms(1.0), False),
        (optax.apply_if_finite(optax.sgd(0.1), 3), False),
        (optax.lars(0.1), False),
        (optax.lamb(0.1), False),
        (optax.adafactor(0.1), False),
        (optax.adafactor(WARMUP, clipping_threshold=None, multiply_by_parameter_scale=False), False),
        (optax.stateless(lambda g, _: {"stack": g["stack"] + g["bias"], "bias": g["bias"]}), False),
        (optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.flip(x, 0), g)), False),
    ],
)
def test_updates_that_depend_on_other_values_are_not_elementwise(tx, expected):
    with jax.numpy_dtype_promotion("standard"):
        assert is_elementwise(tx, PARAMS) == expected


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def named_up(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "up" in jax.tree_util.keystr(path), params)


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (optax.adamw(WARMUP), True),
        (optax.chain(optax.clip(1.0), optax.lion(0.1)), True),
        (optax.sgd(0.1, momentum=0.9), True),
        (optax.noisy_sgd(0.1, key=0), True),
        (optax.adamw(0.1, mask=lambda _: {"stack": True, "bias": False}), True),
        (optax.adamw(0.1, mask={"stack": True, "bias": False}), True),
        (optax.adamw(WARMUP, mask=is_matrix), False),
        (optax.lion(0.1, weight_decay=1e-5, mask=is_matrix), False),
        (optax.partition({True: optax.adam(0.1), False: optax.sgd(0.1)}, is_matrix), False),
        (optax.stateless(lambda g, _: jax.tree.map(jnp.add, g, {"stack": jnp.ones((2, 9)), "bias": 0.0})), True),
    ],
)
def test_the_number_of_dimensions_tells_a_layer_from_its_stack(tx, expected):
    params = {"stack": jnp.zeros((2, 9)), "bias": jnp.zeros(7)}
    axes = {"stack": ("layer", "norm"), "bias": ("norm",)}
    with jax.numpy_dtype_promotion("standard"):
        assert updates_stacks_as_layers(tx, params, axes) == expected


def spec_of(tx, memory):
    return program(config_with(config(optimizer={}, memory=memory), optimizer=tx), jax.devices()[:1]).spec


@pytest.mark.parametrize("update", ["after", "during"])
def test_a_mask_by_dimensions_is_refused_for_stacks_but_one_by_names_is_not(update):
    memory = {"update": update}

    def spec(tx):
        return program(
            config_with(config(optimizer={}, memory={"update": update}), optimizer=tx), jax.devices()[:1]
        ).spec

    with pytest.raises(UserError, match=r"x\.ndim see the stack as one array .* choose weights by name"):
        _ = spec_of(optax.adamw(0.1, mask=is_matrix), memory).trainable
    assert spec_of(optax.adamw(0.1, mask=named_up), memory).trainable


def test_masks_and_labels_that_are_trees_are_refused_where_layers_are_updated_alone():
    def groups(tx, memory):
        spec = spec_of(tx, memory)
        return [spec.group(weight) for weight in single_weights(spec.trainable.axes)]

    built = program(config(), jax.devices()[:1]).spec
    tree = named_up(built.model.select(built.state.params))
    chosen = {True: optax.adam(0.1), False: optax.sgd(0.1)}
    for memory in ({"update": "during"}, {"offload": "optimizer"}):
        for tx in (optax.adamw(0.1, mask=tree), optax.partition(chosen, tree)):
            with pytest.raises(UserError, match="pass the mask or labels as a function of the parameters"):
                groups(tx, memory)
    assert program(
        config_with(config(optimizer={}), optimizer=optax.adamw(0.1, mask=tree)), jax.devices()[:1]
    ).spec.trainable
