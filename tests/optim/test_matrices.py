"""Adafactor, Adam-mini and Muon against optax, and against float64 where optax has none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmem import optim
from jaxmem.config import load_config
from jaxmem.config.optimizers import GaLoreSettings
from jaxmem.errors import UserError
from jaxmem.models.user import axes_by_rule
from jaxmem.quant import quantize
from jaxmem.sharding.table import Axis
from jaxmem.sharding.weights import WithRemainder, is_matrix
from tests.optim.conftest import gradients, normal, same, updates


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (9,)])
def test_adafactor_is_optax_s(shape):
    params = {"w": normal(*shape)}
    grads = gradients(params, 4)
    said, _ = updates(optim.scale_by_adafactor(), params, grads)
    with jax.numpy_dtype_promotion("standard"):
        theirs = optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=2),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
        )
        expected, _ = updates(theirs, params, grads)
    same(said, expected, rtol=1e-4)


@pytest.mark.parametrize("shape", [(16, 24), (24, 16)])
def test_muon_against_float64(shape):
    params = {"w": normal(*shape)}
    grads = gradients(params, 4)
    said, _ = updates(optim.scale_by_muon(), params, grads)
    m = np.zeros(shape)
    for g, u in zip(grads, said, strict=True):
        g = np.asarray(g["w"], np.float64)
        m = 0.95 * m + 0.05 * g
        x = 0.95 * m + 0.05 * g
        left, values, right = np.linalg.svd(x, full_matrices=False)
        values = values / np.sqrt(np.sum(values**2))
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        np.testing.assert_allclose(u["w"], 0.2 * 24**0.5 * (left * values) @ right, rtol=1e-4, atol=1e-4)


def test_muon_makes_singular_values_alike():
    params = {"w": normal(16, 64)}
    (g,) = gradients(params, 1)
    (said,), _ = updates(optim.scale_by_muon(), params, [g])
    values = np.linalg.svd(np.asarray(said["w"]) / (0.2 * 8), compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert np.sqrt(np.mean(np.square(said["w"]))) == pytest.approx(0.2, rel=0.15)


def test_a_bias_of_several_dimensions_is_no_matrix():
    """Of Flax's attention: [heads, head_dim], without weight decay, with the update of Adam and state like a vector."""
    attention = nnx.eval_shape(lambda: nnx.MultiHeadAttention(4, 16, qkv_features=32, rngs=nnx.Rngs(0)))
    shapes = dict(nnx.to_flat_state(nnx.state(attention, nnx.Param)))
    axes = axes_by_rule(shapes, (), None, (2,))
    bias, kernel = ("query", "bias"), ("query", "kernel")
    assert shapes[bias].shape == (4, 8)
    assert [is_matrix(axes[path]) for path in (bias, kernel)] == [False, True]
    assert axes_by_rule(shapes, {bias}, {"key.bias": ("heads", None)}, (2,))[("key", "bias")] == ("heads", "bias")
    params, names = {"b": normal(4, 8)}, {"b": axes[bias]}
    zero = jax.tree.map(jnp.zeros_like, params)
    same(updates(optim.adamw(1e-2, axes=names), params, [zero])[0], [zero])
    grads = gradients(params, 2)
    for scale in (optim.scale_by_muon, optim.scale_by_adafactor, optim.scale_by_apollo):
        of_vector, _ = updates(scale(), jax.tree.map(jnp.ravel, params), jax.tree.map(jnp.ravel, grads))
        same(updates(scale(axes=names), params, grads)[0], [{"b": u["b"].reshape(4, 8)} for u in of_vector])


def test_muon_leaves_tokens_to_adam():
    params = {"table": normal(16, 24), "w": normal(16, 24)}
    axes = {"table": ("vocab", "embed"), "w": ("embed", "mlp")}
    grads = gradients(params, 2)
    said, state = updates(optim.scale_by_muon(axes=axes), params, grads)
    assert [state.arrays[name]["table"].shape for name in ("m", "v")] == [(16, 24), (16, 24)]
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = updates(optax.scale_by_adam(0.9, 0.95, 1e-8), params, grads)
    same([u["table"] for u in said], [u["table"] for u in expected])


@pytest.mark.parametrize("outer", ["vocab", "token", "classes", "patch", Axis("vocab", like_storage=True)])
def test_matrices_of_tokens_classes_and_patches_are_not_orthogonalized_or_projected(outer):
    params, axes = {"w": jnp.zeros((16, 24))}, {"w": ("embed", outer)}
    for tx in (optim.scale_by_muon(axes=axes), optim.scale_by_galore(GaLoreSettings(rank=4), axes=axes)):
        arrays = tx.init(params).arrays
        assert [arrays[name]["w"].shape for name in ("m", "v")] == [(16, 24), (16, 24)]


def test_a_router_is_not_projected():
    params, axes = {"w": jnp.zeros((16, 24))}, {"w": ("embed", "router")}
    state = optim.scale_by_galore(GaLoreSettings(rank=4), axes=axes).init(params)
    assert state.arrays["m"]["w"].shape == (16, 24)


def test_the_table_of_flax_is_a_vocabulary():
    network = nnx.Embed(64, 16, rngs=nnx.Rngs(0))
    variables = {path: jax.eval_shape(lambda x=x: x) for path, x in nnx.to_flat_state(nnx.state(network))}
    assert [*axes_by_rule(variables, (), None, (8, 1)).values()] == [("token", "embed")]


@pytest.mark.parametrize(("axes", "neuron"), [(("embed", "mlp"), 1), (("vocab", "embed"), 0), (("embed", "vocab"), 1)])
def test_adam_mini_has_one_second_moment_a_neuron(axes, neuron):
    params = {"w": normal(16, 24)}
    grads = gradients(params, 4)
    said, state = updates(optim.scale_by_adam_mini(axes={"w": axes}), params, grads)
    assert state.arrays["v"]["w"].shape == (params["w"].shape[neuron],)
    m, v = np.zeros((16, 24)), np.zeros(params["w"].shape[neuron])
    for count, (g, u) in enumerate(zip(grads, said, strict=True), 1):
        g = np.asarray(g["w"], np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * np.mean(g * g, axis=1 - neuron)
        size = np.expand_dims(np.sqrt(v / (1 - 0.95**count)), 1 - neuron) + 1e-8
        np.testing.assert_allclose(u["w"], m / (1 - 0.9**count) / size, rtol=1e-5, atol=1e-6)


def test_only_matrices_decay():
    """Of a layer, and of an expert of a layer."""
    axes = {
        "w": ("layer", "embed", "mlp"),
        "experts": ("layer", "expert", "embed", "mlp"),
        "norm": ("layer", "norm"),
        "bias": ("mlp",),
        "expert_biases": ("layer", "expert", "mlp"),
    }
    sizes = {"layer": 3, "expert": 2, "embed": 4, "norm": 4, "mlp": 5}
    params = {name: normal(*map(sizes.get, dims)) for name, dims in axes.items()}
    nothing = jax.tree.map(jnp.zeros_like, params)
    (decay,), _ = updates(optim.sgd(0.5, weight_decay=0.1, axes=axes), params, [nothing])
    same(decay, {name: (-0.05 if name in ("w", "experts") else 0) * x for name, x in params.items()})


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "remainder"])
def test_a_decay_below_the_last_bit_of_a_bfloat16_update_is_not_lost(stored):
    """The updates of Lion are 1 or -1, which is 0.004 from the next number; most of these decays are below 0.001."""
    w = 0.01 * normal(64, 4096)
    if stored == "remainder":
        weights = WithRemainder(w.astype(jnp.bfloat16), jnp.zeros(w.shape, jnp.int8))
    else:
        weights = w.astype(jnp.bfloat16) if stored == "bfloat16" else quantize(w, "int8", axis=-1)
    u = {"w": jnp.sign(normal(64, 4096, seed=1)).astype(jnp.bfloat16)}
    tx = optim.sgd(-1.0, weight_decay=0.1)  # which only adds the decay
    decayed, _ = tx.update(u, tx.init(u), {"w": weights})
    assert decayed["w"].dtype == jnp.bfloat16
    decay = np.float64(decayed["w"]) - np.float64(u["w"])
    assert np.sum(decay * w) / np.sum(w * w) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("rate", [3e-4, 1e-3])
@pytest.mark.parametrize("name", ["lion8bit", "adamw8bit"])
def test_the_decay_of_small_bfloat16_weights_is_right_on_average(name, rate):
    """The learning rate multiplies it before it is rounded."""
    params = {"w": (0.01 * normal(64, 4096)).astype(jnp.bfloat16)}
    w = np.float64(params["w"])
    grads = [{"w": normal(64, 4096, seed=seed).astype(jnp.bfloat16)} for seed in range(1, 4)]
    decayed, plain = (updates(getattr(optim, name)(rate, weight_decay=decay), params, grads)[0] for decay in (0.1, 0))
    difference = sum(np.float64(a["w"]) - np.float64(b["w"]) for a, b in zip(decayed, plain, strict=True))
    assert np.sum(difference * w) / np.sum(w * w) == pytest.approx(-3 * rate * 0.1, rel=0.05)


def test_a_momentum_in_bfloat16_decays_where_gradients_are_zero():
    tx = optim.sgd(1.0, momentum=0.995)
    params = {"w": jnp.zeros(500, jnp.bfloat16)}
    _, state = tx.update({"w": normal(500).astype(jnp.bfloat16)}, tx.init(params), params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    decayed, _ = jax.lax.scan(lambda state, _: (tx.update(zeros, state, params)[1], None), state, length=2000)
    sizes = [jnp.sum(jnp.abs(x[0].trace["w"].astype(jnp.float32))) for x in (state, decayed)]
    assert sizes[1] < 0.01 * sizes[0]


# ------------------------------------------------------------------ the config

RUN = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 10}}


def test_each_optimizer_has_the_defaults_of_its_paper():
    own = lambda **optimizer: load_config({**RUN, "optimizer": optimizer}).optimizer.hyperparameters  # noqa: E731
    assert own() == {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    assert own(name="lion") == {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    assert own(name="muon", beta1=0.8)["beta1"] == 0.8
    assert own(name="muon", momentum=None)["momentum"] == 0.95


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        ({"name": "adam", "weight_decay": 0.1}, "optimizer.weight_decay=0.1 requires optimizer.name=adamw, sgd"),
        ({"name": "lion", "epsilon": 1e-3}, "optimizer.epsilon=0.001 requires optimizer.name=adamw, adam"),
    ],
)
def test_a_field_that_an_optimizer_does_not_have_is_refused(optimizer, line):
    with pytest.raises(UserError) as refused:
        load_config({**RUN, "optimizer": optimizer})
    assert str(refused.value).startswith(line)


def test_a_config_is_read_back_as_it_was_written(tmp_path):
    from jaxmem.config import save_config

    cfg = load_config({**RUN, "optimizer": {"name": "lion"}})
    save_config(cfg, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == cfg
