"""Mixtures of experts: equal to their definition, statistics and losses of the router, and capacity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config.networks import Decoder
from jaxmem.models.experts import Experts
from jaxmem.models.network import STATISTICS

EMBED, MLP = 16, 24


def made(activation="silu", mlp_bias=False, **settings):
    shape = {"vocab": 8, "layers": 1, "embed": EMBED, "mlp": MLP, "heads": 1, "kv_heads": 1, "head_dim": 4}
    experts = {"count": 4, "top_k": 2, **settings}
    cfg = Decoder(**shape, activation=activation, mlp_bias=mlp_bias, experts=experts)
    model = Experts(nnx.Rngs(0), cfg)
    for i, module in enumerate((model.router, model.gate, model.up, model.down) if mlp_bias else ()):
        module.bias.set_value(jax.random.normal(jax.random.key(i), module.bias.get_value().shape))
    return model, jax.random.normal(jax.random.key(1), (2, 9, EMBED))


def clamped(gate, up):
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)


def bias(module):
    return 0.0 if module.bias is None else module.bias.get_value()


def defined(model, x):
    """All experts for all tokens, weighted."""
    cfg = model.cfg
    probabilities = jax.nn.softmax(x @ model.router.weight.get_value() + bias(model.router))
    shares, chosen = jax.lax.top_k(probabilities, cfg.top_k)
    shares = shares / shares.sum(-1, keepdims=True) if cfg.renormalize else shares
    gate, up, down = (m.weight.get_value() for m in (model.gate, model.up, model.down))
    gates = jnp.einsum("bti,eih->bteh", x, gate) + bias(model.gate)
    ups = jnp.einsum("bti,eih->bteh", x, up) + bias(model.up)
    hidden = clamped(gates, ups) if model.activation == "swiglu_clamped" else jax.nn.silu(gates) * ups
    every = jnp.einsum("bteh,ehi->btei", hidden, down) + bias(model.down)
    weights = jnp.einsum("btk,btke->bte", shares, jax.nn.one_hot(chosen, cfg.count))
    y = jnp.einsum("btei,bte->bti", every, weights)
    if cfg.shared is None:
        return y
    gate, up, down = (getattr(model.shared, name).weight.get_value() for name in ("gate", "up", "down"))
    return y + jax.nn.sigmoid(x @ model.shared_gate.weight.get_value()) * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)


@nnx.jit
def computed(model, x, segments=None):
    return model(x, None, segments)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"renormalize": False, "shared": 20, "top_k": 4},
        {"count": 1, "top_k": 1},
        {"mlp_bias": True, "activation": "swiglu_clamped"},
    ],
)
def test_results_and_gradients_are_those_of_the_definition(settings):
    model, x = made(**settings)
    graphdef, state = nnx.split(model)

    def loss(state, x, run):
        return jnp.sum(jnp.sin(run(nnx.merge(graphdef, state), x)))

    results = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    ours, wanted = results(state, x, lambda model, x: model(x)[0]), results(state, x, defined)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, wanted)


def test_gradients_of_the_biases_of_experts_are_summed_over_tokens_in_float32():
    model, _ = made(mlp_bias=True, count=1, top_k=1)
    graphdef, state = nnx.split(model)
    x = jnp.ones((64, 128, EMBED), jnp.bfloat16)
    g = jnp.full(x.shape, 0.1, jnp.bfloat16).astype(jnp.float32)
    loss = lambda state: jnp.vdot(g, nnx.merge(graphdef, state)(x)[0].astype(jnp.float32))  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(state)["down"]["bias"].get_value()
    np.testing.assert_allclose(gradient, jnp.full((1, EMBED), 8192 * g[0, 0, 0]), rtol=1e-3)


def test_uniform_routing_has_the_least_losses():
    model, x = made(balance_loss=1.0, count=4, top_k=4, z_loss=1.0)
    model.router.weight.set_value(jnp.zeros((EMBED, 4)))
    statistics = dict(zip(STATISTICS, jnp.moveaxis(computed(model, x)[1], -1, 0), strict=True))
    np.testing.assert_allclose(statistics["router_loss"], 4 + np.log(4) ** 2, rtol=1e-5)
    np.testing.assert_allclose(statistics["router_load"], 1, rtol=1e-5)
    np.testing.assert_allclose(statistics["router_entropy"], np.log(4), rtol=1e-5)


@pytest.mark.exhaustive
def test_padding_does_not_change_the_statistics_of_the_router():
    model, x = made(balance_loss=1.0)
    longer = jnp.concatenate([x, jnp.ones_like(x)], axis=1)  # the same token everywhere: one expert has all
    segments = jnp.broadcast_to(jnp.arange(longer.shape[1]) < x.shape[1], longer.shape[:2]).astype(jnp.int32)
    expected, padded = computed(model, x)[1], computed(model, longer, segments)[1][:, : x.shape[1]]
    np.testing.assert_allclose(padded, expected, rtol=1e-5)


def test_the_balance_loss_spreads_tokens():
    """Its gradient alone makes a skewed router more uniform."""
    model, x = made(balance_loss=1.0)
    model.router.weight.set_value(model.router.weight.get_value().at[:, 0].add(0.3))
    graphdef, state = nnx.split(model)
    x = jnp.abs(x)

    def loss(state):
        _, statistics = nnx.merge(graphdef, state)(x)
        return jnp.mean(statistics[..., 0]), jnp.mean(statistics[..., 1])

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, load), _ = step(state)
    for _ in range(50):
        (_, after), grads = step(state)
        state = jax.tree.map(lambda w, g: w - 0.05 * g, state, grads)
    assert load > 1.5
    assert after < 1.3


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{}, {"top_k": 4, "renormalize": False}])
def test_the_fused_implementation_equals_the_blocks(settings):
    model, x = made(**settings)
    graphdef, state = nnx.split(model)

    def loss(state, x, implementation):
        own = nnx.merge(graphdef, state)
        own.implementation = implementation
        return jnp.sum(jnp.sin(own(x)[0]))

    results = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    found = [results(state, x, name) for name in ("triton", "blockwise")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *found)
