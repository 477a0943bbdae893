"""Projections: found without a singular value decomposition, kept where a mesh splits, looked for in turns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.config.optimizers import ApolloMiniSettings, GaLoreSettings, QGaLoreSettings
from jaxmem.optim.rules.projection import orthonormal, range_finder
from tests.optim.conftest import gradients, normal, updates
from tests.optim.test_layouts import held, run


def decaying(m, n, decay, seed=0):
    """A matrix with singular values 1, e^-decay, ..."""
    draw = np.random.default_rng(seed)
    left, right = (np.linalg.qr(draw.standard_normal((size, min(m, n))))[0] for size in (m, n))
    return jnp.asarray(left * np.exp(-decay * np.arange(min(m, n))) @ right.T, jnp.float32)


@pytest.mark.parametrize(("decay", "scale"), [(0.02, 1.0), (0.1, 1e-9), (0.5, 1.0)])
def test_the_range_finder_finds_what_singular_vectors_do(decay, scale):
    g = scale * decaying(64, 96, decay)
    basis = range_finder(g, jnp.zeros((64, 16)), jax.random.key(0))
    np.testing.assert_allclose(basis.T @ basis, np.eye(16), atol=1e-4)
    values = np.linalg.svd(np.asarray(g, np.float64), compute_uv=False)
    kept = np.linalg.norm(np.asarray(basis.T @ g, np.float64)) / np.sqrt(np.sum(values[:16] ** 2))
    assert kept > 0.97


@pytest.mark.exhaustive
def test_without_a_gradient_the_basis_is_orthonormal_and_near_the_old_one():
    """As that of an expert without tokens at its refresh."""
    nothing = jnp.zeros((64, 96))
    first = range_finder(nothing, jnp.zeros((64, 8)), jax.random.key(0))
    again = range_finder(nothing, first, jax.random.key(1))
    np.testing.assert_allclose(first.T @ first, np.eye(8), atol=1e-5)
    np.testing.assert_allclose(again.T @ again, np.eye(8), atol=1e-5)
    assert jnp.sum(jnp.square(first.T @ again)) / 8 > 0.9


def test_the_basis_stays_if_the_gradient_stays_in_it():
    g = decaying(64, 96, 0.2)
    first = range_finder(g, jnp.zeros((64, 8)), jax.random.key(0))
    for turn in range(1, 6):
        last, first = first, range_finder(g, first, jax.random.key(turn))
    assert np.diag(last.T @ first).min() > 0.98


@pytest.mark.parametrize("x", [jnp.zeros((32, 4)), jnp.ones((32, 4)), normal(32, 4) * jnp.array([1, 1e-3, 1e-6, 1e-9])])
def test_orthonormal_takes_anything(x):
    q = orthonormal(x)
    assert np.isfinite(q).all()
    assert np.linalg.norm(q, 2) < 1.01


def test_layers_refresh_their_projections_at_different_steps():
    params = {"w": normal(4, 16, 24)}
    tx = optim.scale_by_galore(GaLoreSettings(rank=4, refresh_every=4), axes={"w": ("layer", "embed", "mlp")})
    state, update = tx.init(params), jax.jit(tx.update)
    changed = []
    for g in gradients(params, 9):
        before = state.arrays["basis"]["w"]
        _, state = update(g, state, params)
        changed.append(np.any(np.asarray(state.arrays["basis"]["w"] != before), axis=(1, 2)).tolist())
    assert changed[0] == [True] * 4
    assert [row.index(True) for row in changed[1:]] == [1, 2, 3, 0, 1, 2, 3, 0]
    assert all(sum(row) == 1 for row in changed[1:])


@pytest.mark.exhaustive
def test_a_layer_with_a_stable_basis_is_refreshed_less_often():
    """Q-GaLore: intervals double while the gradient's space is the same."""
    params = {"w": normal(64, 96)}
    g = {"w": decaying(64, 96, 0.5)}
    tx = optim.scale_by_qgalore(QGaLoreSettings(rank=8, refresh_every=2, similarity=0.4))
    _, state = updates(tx, params, [g] * 12)
    assert int(state.arrays["doublings"]["w"]) >= 2
    draw = [{"w": normal(64, 96, seed=i)} for i in range(12)]
    _, state = updates(optim.scale_by_qgalore(QGaLoreSettings(rank=8, refresh_every=2, similarity=0.9)), params, draw)
    assert int(state.arrays["doublings"]["w"]) == 0
    _, noise = updates(optim.scale_by_qgalore(QGaLoreSettings(rank=16, refresh_every=2)), params, draw)
    assert int(noise.arrays["doublings"]["w"]) == 0  # as the default rank, whose bases have 0.4 in common by chance
    before = int(state.arrays["due"]["w"])
    longer = optim.scale_by_qgalore(QGaLoreSettings(rank=8, refresh_every=50, similarity=0.9))
    for g in draw[:4]:  # a resumed run with another refresh_every
        _, state = jax.jit(longer.update)(g, state, params)
    assert abs(int(state.arrays["due"]["w"]) - before - 50) <= 2


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_what_is_outside_of_the_basis_is_scaled_as_what_is_inside(shape):
    """Against float64: u = P d + r (g - P P^T g), r of each column the ratio of lengths of d and P^T g, or, where the
    twelve directions outside have more than three times the squares of the four inside, what makes it that."""
    params, tall = {"w": normal(*shape)}, shape[0] > shape[1]
    grads = gradients(params, 3)
    tx = optim.scale_by_galore(GaLoreSettings(rank=4, scale=0.5, residual=True))
    state, update = tx.init(params), jax.jit(tx.update)
    m = v = 0.0
    limited = []
    for count, one in enumerate(grads, 1):
        said, state = update(one, state, params)
        g, u = (np.asarray(x["w"].T if tall else x["w"], np.float64) for x in (one, said))
        basis = np.asarray(state.arrays["basis"]["w"], np.float64)
        low = basis.T @ g
        m, v = 0.9 * m + 0.1 * low, 0.95 * v + 0.05 * low * low
        d = m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.95**count)) + 1e-8)
        outside = g - basis @ low
        lengths = np.linalg.norm(low, axis=0), np.linalg.norm(outside, axis=0) / 3**0.5
        limited += list(lengths[1] > lengths[0])
        u_outside = np.linalg.norm(d, axis=0) / np.maximum(*lengths) * outside
        np.testing.assert_allclose(u, 0.5 * (basis @ d + u_outside), rtol=1e-3, atol=1e-4)
    assert 0 < np.mean(limited) < 1


def test_a_rank_larger_than_the_matrix_is_plain_adam():
    params = {"w": normal(16, 24)}
    state = optim.galore_adamw(0.1, rank=16).init(params)
    assert sorted(state[0].arrays) == ["m", "v"]


def test_bytes_of_a_square_matrix():
    """m r + 2 r n numbers: 3 bytes a parameter at a quarter of the rank; with 8-bit moments and bfloat16 1.02."""
    for name, dtype, expected in (("galore_adamw", jnp.float32, 3.0), ("galore_adamw8bit", jnp.bfloat16, 1.02)):
        params = {"w": jax.ShapeDtypeStruct((1024, 1024), dtype)}
        state = jax.eval_shape(getattr(optim, name)(0.1).init, params)
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        assert held / 1024**2 == pytest.approx(expected, rel=0.01)


def test_the_state_is_split_whichever_side_is_projected_away():
    """The projected dimension takes the mesh axis: nothing but vectors' state is whole on 8 devices."""
    _, alone = run("galore_adamw", {}, updates=0)
    _, split = run("galore_adamw", {"fsdp": 8}, updates=0)
    assert held(split) < held(alone) / 8 + 4 * 2 * 2 * 64 + 64  # the norms' moments, counters


def test_no_gradient_is_gathered_and_nothing_decomposed():
    from jaxmem.sharding.layout import layout_for
    from jaxmem.sharding.table import is_axes
    from tests.step.conftest import config

    layout = layout_for(config(mesh={"fsdp": 8}), jax.devices())
    axes = {"w": ("layer", "embed", "mlp")}
    params = {"w": jax.ShapeDtypeStruct((2, 128, 256), jnp.float32)}
    tx = optim.scale_by_galore(axes=axes)
    shapes = jax.eval_shape(tx.init, params)
    place = lambda a, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding("optimizer", a, x.shape))  # noqa: E731
    state = jax.tree.map(place, optim.state_axes(tx, params, axes), shapes, is_leaf=is_axes)
    w = jax.tree.map(place, axes, params, is_leaf=is_axes)
    with layout:
        text = jax.jit(tx.update).lower(w, state, w).compile().as_text()
    assert "svd" not in text
    assert "syevd" not in text
    gathered = [line.split("=")[1].split()[0] for line in text.splitlines() if " all-gather(" in line]
    assert all("128,256" not in shape for shape in gathered), gathered


@pytest.mark.parametrize(("project_embeddings", "shape"), [(False, (64, 16)), (True, (64, 1))])
def test_embeddings_are_projected_where_asked(project_embeddings, shape):
    params, axes = {"embedding": jnp.zeros((64, 16))}, {"embedding": ("vocab", "embed")}
    state = optim.scale_by_apollo_mini(ApolloMiniSettings(project_embeddings=project_embeddings), axes=axes).init(
        params
    )
    assert state.arrays["m"]["embedding"].shape == shape
