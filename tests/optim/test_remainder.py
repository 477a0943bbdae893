"""A bfloat16 weight and the bits that it lacks, against float32 copies and against exact sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import optim
from jaxmem.errors import UserError
from jaxmem.optim import in_place
from jaxmem.sharding.layout import layout_for
from jaxmem.sharding.table import is_axes
from jaxmem.sharding.weights import WithRemainder
from tests.optim.conftest import gradients, normal
from tests.step.conftest import config

AXES = {"w": ("layer", "embed", "mlp"), "norm": ("layer", "norm")}


def weights():
    return {"w": normal(3, 16, 24).astype(jnp.bfloat16), "norm": jnp.ones((3, 16), jnp.bfloat16)}


def trained(tx, params, grads, **options):
    state, step = tx.init(params), jax.jit(lambda g, s, p: tx.update(g, s, p, **options))
    for g in grads:
        updates, state = step(g, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def completed(params, state):
    return jax.tree.map(lambda w, lacks: WithRemainder(w, lacks).dequantize(), params, state.master)


@pytest.mark.exhaustive
def test_sixteen_bits_are_the_copy_bit_by_bit():
    params, adamw = weights(), optim.adamw(1e-3, weight_decay=0.1, axes=AXES)
    grads = gradients(params, 20)
    mine, bits = trained(optim.with_remainder(adamw, 16, AXES), params, grads)
    theirs, copy = trained(optim.with_master(adamw), params, grads)
    jax.tree.map(np.testing.assert_array_equal, completed(mine, bits), copy.master)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("bits", "most"), [(16, 3e-5), (8, 2e-4)])
def test_a_thousand_updates_of_a_millionth_add_up(bits, most):
    """Against float64, from weights of all sizes to 4; rounded to bfloat16 all but the smallest would stand still."""
    w = normal(4000).astype(jnp.bfloat16)
    tx = optim.with_remainder(optax.sgd(1.0), bits)
    before = completed({"w": w}, tx.init({"w": w}))
    params, state = trained(tx, {"w": w}, [{"w": jnp.full(4000, 1e-6)}] * 1000)
    moved = np.asarray(completed(params, state)["w"], np.float64) - np.asarray(before["w"], np.float64)
    assert moved.mean() == pytest.approx(-1e-3, rel=0.02)
    assert np.sqrt(np.mean(np.square(moved + 1e-3))) < most


@pytest.mark.parametrize(
    "tx", [optim.with_master, partial(optim.with_remainder, bits=16), partial(optim.with_remainder, bits=8)]
)
def test_an_update_far_below_the_last_bit_moves_its_share_of_the_weights(tx):
    """The first one too, although no weight has bits below bfloat16; an update by 0 moves none."""
    spacing = 2.0**-7
    params = {"w": jnp.full((64, 64), 1.5, jnp.bfloat16), "zero": jnp.zeros(64, jnp.bfloat16)}
    for moves in ([0.0], [-0.1], [0.02, 0.02], [0.5, -0.3]):
        updates = [{"w": jnp.full((64, 64), share * spacing), "zero": jnp.zeros(64)} for share in moves]
        after, _ = trained(tx(optax.identity()), params, updates)
        moved = (np.asarray(after["w"], np.float64) - 1.5) / spacing
        assert moved.mean() == pytest.approx(sum(moves), abs=0.02)
        assert set(np.unique(moved)) <= {0.0, float(np.sign(sum(moves)))}
        assert not np.asarray(after["zero"], np.float32).any()


@pytest.mark.exhaustive
def test_one_layer_at_a_time_is_the_same():
    params = weights()
    (g,) = gradients(params, 1)
    tx = optim.with_remainder(optim.adamw(1e-3, axes=AXES), 8, AXES)
    every, state = trained(tx, params, [g])
    one = lambda tree: jax.tree.map(lambda x: x[1] if x.ndim else x, tree)  # noqa: E731
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, layer=jnp.asarray(1)))
    updates, alone = update(one(g), one(jax.jit(tx.init)(params)), one(params))
    jax.tree.map(np.testing.assert_array_equal, optim.apply_updates(one(params), updates), one(every))
    jax.tree.map(np.testing.assert_array_equal, alone.master, one(state.master))


def _add_weights(updates, state, params):
    return jax.tree.map(lambda u, w: u + w.astype(u.dtype), updates, params), state


@pytest.mark.parametrize(
    "transformation",
    [
        optax.add_decayed_weights(0.1),
        optax.keep_params_nonnegative(),
        optax.GradientTransformation(lambda _: optax.EmptyState(), _add_weights),
    ],
    ids=["operator", "tree", "method"],
)
def test_an_optimizer_that_computes_with_the_weights_is_refused(transformation):
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    tx = optim.with_remainder(optax.chain(optax.sgd(0.1), transformation), 16)
    with pytest.raises(UserError, match=r"computes with the weights.*optim.in_float32\(tx\)"):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("make", [optax.adamw, optax.lamb, optax.contrib.dog], ids=["adamw", "lamb", "dog"])
def test_an_optimizer_of_another_library_has_the_weights_of_a_float32_copy(make):
    params = {"w": jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16).reshape(8, 8), "b": jnp.ones(4, jnp.bfloat16)}
    grads = [
        jax.tree.map(lambda x, i=i: jnp.sin(i + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
        for i in range(4)
    ]
    with jax.numpy_dtype_promotion("standard"):  # of optax
        remainder, state = trained(optim.with_remainder(optim.in_float32(make(1e-3)), 16), params, grads)
        copied, copy = trained(optim.with_master(make(1e-3)), params, grads)
    jax.tree.map(np.testing.assert_array_equal, remainder, copied)
    jax.tree.map(np.testing.assert_array_equal, completed(remainder, state), copy.master)


def test_an_error_of_an_optimizer_itself_is_not_replaced():
    def fail(*_):
        raise ValueError("no gradient")

    tx = optim.with_remainder(optax.GradientTransformation(lambda _: optax.EmptyState(), fail), 16)
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    with pytest.raises(ValueError, match="no gradient"):
        tx.update(params, tx.init(params), params)


def test_what_is_not_finite_stays_so_and_the_largest_is_no_infinity():
    most = jnp.finfo(jnp.bfloat16).max
    w = {"w": jnp.asarray([1.0, 1.0, 0.0, most, -most], jnp.bfloat16)}
    updates = {"w": jnp.asarray([jnp.nan, jnp.inf, -0.0, 1.0, 1.0])}
    params, state = trained(optim.with_remainder(optax.identity(), 8), w, [updates])
    found = np.asarray(completed(params, state)["w"])
    assert np.isnan(found[0])
    assert np.isposinf(found[1])
    assert np.isfinite(found[2:]).all()
    np.testing.assert_array_equal(params["w"][2:], w["w"][2:])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_at_zero_stay_finite(bits, dtype):
    """A weight that becomes -0, or smaller than any bfloat16, e.g. of an adapter or a bias that begins at zero."""
    near = np.array([0.0, 1e-45, 1e-40, 4e-41, 1e-38, 1.2e-38, 1e-30, 3e-3, 1.0], np.float32)
    values = np.concatenate([near, -near])
    w, update = (x.ravel() for x in np.meshgrid(values, values))
    params = {"w": jnp.asarray(w, jnp.bfloat16)}
    tx = optim.with_remainder(optax.scale(1.0), bits, {"w": ("norm",)})
    state = tx.init(params)
    expected = np.asarray(params["w"], np.float32)
    for u in (update, np.roll(update, 1), -update):
        changes, state = tx.update({"w": jnp.asarray(u, dtype)}, state, params)
        params = optim.apply_updates(params, changes)
        expected = expected + np.asarray(jnp.asarray(u, dtype), np.float32)
        assert np.isfinite(np.asarray(params["w"], np.float32)).all()
        np.testing.assert_allclose(completed(params, state)["w"], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("name", "most"), [("adamw8bit", 5.1), ("adamw4bit", 4.1)])
def test_weights_and_quantized_adamw_states_take_four_or_five_bytes(name, most):
    params = {"w": jnp.zeros((4, 1024, 1024), jnp.bfloat16), "norm": jnp.zeros((4, 1024), jnp.bfloat16)}
    state = optim.with_remainder(getattr(optim, name)(1e-3, axes=AXES), 8, AXES).init(params)
    assert sum(x.nbytes for x in jax.tree.leaves((params, state))) < most * sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4, "tensor": 2}])
def test_vocabulary_matrices_in_parts_are_updated_as_a_whole(monkeypatch, mesh):
    """Bit by bit, on every mesh; also weights that are rounded stochastically."""
    axes = {"head": ("embed", "vocab"), "rows": ("vocab", "embed")}
    params = {"head": normal(32, 96).astype(jnp.bfloat16), "rows": normal(96, 32, seed=1).astype(jnp.bfloat16)}
    grads = gradients(params, 2)
    tx = optim.with_remainder(optax.sgd(1e-2), 8, axes)

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        rounded = optim.apply_updates(params, grads, jax.random.key(3), axes)
        return optim.apply_updates(params, updates), state, rounded

    def run(layout):
        with layout:
            weights, state = params, tx.init(params)
            if mesh:
                place = lambda names, x: layout.sharding("weights", names, x.shape)  # noqa: E731
                weights = jax.device_put(weights, jax.tree.map(place, axes, weights, is_leaf=is_axes))
            step = jax.jit(partial(update))  # a new function: jax caches the trace of another size of parts
            for g in grads:
                weights, state, rounded = step(g, state, weights)
        return jax.tree.map(np.asarray, (weights, state.master, rounded))

    whole = run(layout_for(config(), jax.devices()[:1]))
    monkeypatch.setattr(in_place, "PART_SIZE", 64)
    parts = run(layout_for(config(mesh=mesh), jax.devices()[: 8 if mesh else 1]))
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
