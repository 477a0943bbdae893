"""Every optimizer trains in the loops of Flax and inside the transformations of optax as in a plain loop."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jaxmem import optim
from jaxmem.config.optimizers import OPTIMIZERS
from tests.optim.conftest import gradients, normal
from tests.support.tiers import cases

AXES = {"up": ("layer", None, None), "table": ("vocab", None), "norm": ("layer", None)}
RATE, UPDATES = 0.01, 3


def weights():
    return {"up": normal(2, 64, 72), "table": normal(72, 64, seed=1), "norm": normal(2, 64, seed=2)}


def optimizer(name):
    if name == "remainder8":  # for bfloat16 weights
        return optim.with_remainder(optim.adamw8bit(RATE, axes=AXES), 8, AXES)
    if name == "chain":
        return optax.chain(optax.clip_by_global_norm(1.0), optim.scale_by_galore(axes=AXES), optax.scale(-RATE))
    if name == "trainable":
        return optim.trainable(optim.adamw8bit(RATE, axes=optim.select_trainable(AXES, ["up"])), ["up"])
    return optim.optimizer(name)(RATE, axes=AXES)


NAMES = (*OPTIMIZERS, "chain", "remainder8", "trainable")


def initial(name):
    dtype = jnp.bfloat16 if name == "remainder8" else jnp.float32
    return jax.tree.map(lambda w: w.astype(dtype), weights())


def grads_for(name):
    params = initial(name)
    return [jax.tree.map(lambda g, w: g.astype(w.dtype), g, params) for g in gradients(params, UPDATES)]


def compiled(function, jit, **options):
    return jax.jit(function, **options) if jit else function


def step_of(tx):
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    return step


def in_plain_loop(name, jit, tx=None, rebuild=lambda state: state):
    """The weights after all updates. `rebuild`: applied to the state between updates."""
    tx = tx or optimizer(name)
    params = initial(name)
    state = tx.init(params)
    step = compiled(step_of(tx), jit, donate_argnums=(0, 1))
    for g in grads_for(name):
        params, state = step(params, rebuild(state), g)
    return params


class Weights(nnx.Module):
    def __init__(self, params):
        for name, w in params.items():
            setattr(self, name, nnx.Param(w))


def in_nnx_optimizer(name, jit):
    model = Weights(initial(name))
    flax_optimizer = nnx.Optimizer(model, optimizer(name), wrt=nnx.Param)
    update = lambda model, flax_optimizer, g: flax_optimizer.update(model, g)  # noqa: E731
    run = nnx.jit(update) if jit else update
    for g in grads_for(name):
        run(model, flax_optimizer, nnx.state(Weights(g), nnx.Param))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def in_train_state(name, jit):
    state = TrainState.create(apply_fn=None, params=initial(name), tx=optimizer(name))
    apply = compiled(lambda state, g: state.apply_gradients(grads=g), jit, donate_argnums=0)
    for g in grads_for(name):
        state = apply(state, g)
        state = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    return state.params


def from_leaves(name, jit):
    """The state is taken apart into numpy arrays after every update."""

    def rebuild(state):
        leaves, structure = jax.tree.flatten(state)
        return jax.tree.unflatten(structure, [jnp.asarray(np.asarray(x)) for x in leaves])

    return in_plain_loop(name, jit, rebuild=rebuild)


def from_orbax(name, jit, tmp_path):
    numbers = iter(range(UPDATES))

    def rebuild(state):
        with ocp.StandardCheckpointer() as checkpointer:
            path = tmp_path / str(next(numbers))
            checkpointer.save(path, state)
            checkpointer.wait_until_finished()
            return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, state))

    return in_plain_loop(name, jit, rebuild=rebuild)


def in_multi_steps(name, jit):
    """Two micro-batches with the same gradient per update."""
    tx = optax.MultiSteps(optimizer(name), 2)
    params = initial(name)
    with jax.numpy_dtype_promotion("standard"):
        state, step = tx.init(params), compiled(step_of(tx), jit)
        for g in grads_for(name):
            for _ in range(2):
                params, state = step(params, state, g)
    return params


def in_multi_transform(name, jit):
    labels = {"up": "matrices", "table": "others", "norm": "others"}
    if name == "trainable":  # a part without any trainable weight is an error
        labels = dict.fromkeys(labels, "matrices")
    parts = {label: optimizer(name) for label in sorted(set(labels.values()))}
    if name == "chain":  # the norm is that of the part
        parts = {label: optimizer("galore_adamw") for label in parts}
        expected = in_plain_loop("galore_adamw", jit=True)
        assert_same("galore_adamw", in_plain_loop(name, jit, optax.multi_transform(parts, labels)), expected)
        return reference(name)
    return in_plain_loop(name, jit, optax.multi_transform(parts, labels))


def in_inject_hyperparams(name, jit):
    make = optax.inject_hyperparams(optim.optimizer(name))
    with jax.numpy_dtype_promotion("standard"):
        return in_plain_loop(name, jit, make(learning_rate=RATE, axes=AXES))


LOOPS = (
    in_plain_loop, in_nnx_optimizer, in_train_state, from_leaves, from_orbax, in_multi_steps, in_multi_transform,
    in_inject_hyperparams,
)  # fmt: skip
FAST = [("adamw8bit", loop, True) for loop in LOOPS]
FAST += [("galore_adamw8bit", in_nnx_optimizer, True), ("trainable", in_nnx_optimizer, True)]
# Each optimizer in one of the loops; a state that is computed without jit, in two.
CASES = [("apollo_mini", in_nnx_optimizer, False), ("qgalore", in_inject_hyperparams, True)]
CASES += [(name, LOOPS[number % (len(LOOPS) - 1)], True) for number, name in enumerate(NAMES)]
CASES += [("qgalore", in_plain_loop, False), ("adafactor", in_train_state, False)]
CASES = list(dict.fromkeys([*FAST, *CASES]))


@functools.cache
def reference(name):
    return in_plain_loop(name, jit=True)


def assert_same(name, params, expected):
    """Equal to rounding, relative to the size of the updates. A value between two codes may fall to either side."""
    before = initial(name)
    for leaf, w in params.items():
        moved = mean_distance(expected[leaf], before[leaf])
        assert moved > 0 or name == "trainable"
        assert mean_distance(w, expected[leaf]) <= 2e-3 * moved, leaf


def mean_distance(w, other):
    return np.abs(np.asarray(w, np.float64) - np.asarray(other, np.float64)).mean()


def case_name(value):
    return value.__name__ if callable(value) else {True: "jit", False: "eager"}.get(value, value)


@pytest.mark.parametrize(("name", "loop", "jit"), cases(CASES, *FAST), ids=case_name)
def test_an_optimizer_trains_in_every_loop(name, loop, jit, tmp_path):
    options = {"tmp_path": tmp_path} if loop is from_orbax else {}
    assert_same(name, loop(name, jit, **options), reference(name))


@pytest.mark.parametrize("name", cases(NAMES[:-1], "adamw8bit", "galore_adamw", "chain"))
def test_a_function_of_optax_maps_the_state_of_the_parameters(name):
    tx, params = optimizer(name), initial(name)
    state = tx.init(params)
    ones = optax.tree.map_params(tx, jnp.ones_like, state)
    assert jax.tree.structure(ones) == jax.tree.structure(state)
    assert all(jnp.all(x == 1) for x in jax.tree.leaves(ones) if x.ndim)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_layers_without_parameters_may_be_empty_tuples(weight_decay):
    """As in jax.example_libraries.stax."""
    params = [(jnp.ones((4, 3)), jnp.ones(3)), (), (jnp.ones((3, 2)),)]
    tx = optim.adamw(0.1, weight_decay=weight_decay)
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
