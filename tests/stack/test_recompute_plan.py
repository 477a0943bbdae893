"""Saved and recomputed boundaries: the right ones, as many as stated; the same gradients, in fewer bytes."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config.recompute import fewest
from jaxmem.quant import quantize
from jaxmem.sharding.gathering import gather
from jaxmem.sharding.weights import StoredWeight
from jaxmem.stack.apply import apply_call, stack_call, stacked
from jaxmem.stack.call import StackCall, StackOptions
from jaxmem.stack.recompute_plan import recompute_plan
from jaxmem.stack.scheduled import by_plan
from scripts.course.checkpointing import FORMULAS, backward

POLICIES = ("sqrt", "recursive", "constant", "every_1", "every_4", "every_300", "slots_1", "slots_2", "slots_4")


@pytest.mark.parametrize("layers", [2, 3, 5, 16, 61, 126])
def test_every_layer_finds_its_own_input(layers):
    for remat in POLICIES:
        plan = recompute_plan(remat, layers)
        slots = [None] * plan.slots
        for layer in range(layers):
            slots[plan.forward_slots[layer]] = layer
        for layer in reversed(range(layers)):
            for number, source, target in plan.steps[plan.begin[layer] : plan.end[layer]]:
                assert slots[source] == number
                slots[target] = number + 1
            assert slots[plan.backward_slots[layer]] == layer


def test_slots_and_runs_are_those_of_the_formulas():
    for layers in (16, 64, 256):
        plans = {remat: recompute_plan(remat, layers) for remat in POLICIES}
        assert plans["sqrt"].slots < FORMULAS["sqrt"](layers) + 1
        assert plans["sqrt"].runs < layers
        assert plans["recursive"].slots == 1 + math.log2(layers)
        assert plans["recursive"].runs < layers / 2 * math.log2(layers)
        assert plans["constant"].runs == (layers - 1) * (layers - 2) // 2
        assert plans["every_300"].runs == plans["every_1"].runs == 0
        for kept in (1, 2, 4):
            # The first pass is among what Griewank and Walther count.
            assert plans[f"slots_{kept}"].runs == fewest(layers, kept) - (layers - 1)
            assert plans[f"slots_{kept}"].slots == kept + 1


class Affine(nnx.Module):
    """Does not commute, and drops some of its values."""

    def __init__(self, rngs):
        self.a = nnx.Param(1.0 + jax.random.uniform(rngs.params(), (3,)), axes=("norm",))
        self.b = nnx.Param(jax.random.normal(rngs.params(), (3,)), axes=("norm",))


def layer(block, x, own, beside):
    key, extra = own
    x = jnp.tanh(x * block.a.get_value() + block.b.get_value()) * beside[0] + extra
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0.0), jnp.sum(x)


def test_gradients_are_bitwise_those_of_keeping_all():
    """Of weights, of what goes in, of each layer's input, and of what all layers see; with dropout, and outputs."""
    layers = 11
    graphdef, state = nnx.split(stacked(Affine, layers, nnx.Rngs(0)))
    keys = jax.random.split(jax.random.key(1), layers)
    given = nnx.to_pure_dict(state), jnp.ones((2, 3)), jnp.arange(1.0 * layers), jnp.float32(0.5)

    def loss(weights, x, extra, shared, remat):
        blocks = nnx.merge(graphdef, weights)
        call = stack_call(blocks, layer, x, (keys, extra), (shared, jnp.arange(3)), options=StackOptions(remat))
        y, outputs = apply_call(call)
        return jnp.sum(y * y) + jnp.sum(jnp.sin(outputs))

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)), static_argnums=4)
    expected = gradients(*given, "none")
    for remat in ("sqrt", "recursive", "slots_3"):
        jax.tree.map(np.testing.assert_array_equal, gradients(*given, remat), expected)


@pytest.mark.exhaustive
def test_gradients_of_quantized_weights_are_those_of_a_plain_scan():
    """A stored weight has several arrays, and one gradient."""
    weights = quantize(jax.random.normal(jax.random.key(0), (5, 4, 4)), "int8", 2, -2)
    x = jax.random.normal(jax.random.key(1), (3, 4))

    def run(weight, x, _, __):
        return jnp.tanh(x @ gather(weight, ("embed", "mlp"), jnp.float32)), None

    def loss(at, x, plan):
        stored = StoredWeight(weights, at)
        if plan is None:
            y, _ = jax.lax.scan(lambda x, weight: run(weight, x, None, None), x, stored)
        else:
            y, _ = by_plan(StackCall(run, stored, x, None, None, plan=plan))
        return jnp.sum(y * y)

    gradients = [jax.grad(loss, (0, 1))(jnp.zeros((5, 4, 4)), x, plan) for plan in (None, recompute_plan("sqrt", 5))]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *gradients)


@pytest.mark.exhaustive
def test_memory_and_arithmetic_of_a_decoder_compiled_for_a_gpu():
    """Boundaries as the formulas count them, and one layer."""
    shape = {"embed": 256, "mlp": 512, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 512}
    full, sqrt, recursive = (
        backward(remat, layers, "h100-80gb", shape, tokens=1024)
        for remat, layers in (("full", 16), ("sqrt", 64), ("recursive", 64))
    )
    one_layer = full["temporaries"] - 16 * full["boundary"]
    for one in (sqrt, recursive):
        expected = FORMULAS[one["policy"]](64) * full["boundary"]
        assert abs(one["temporaries"] - expected) <= 0.15 * expected + one_layer
    # What runs again is what the schedule says: loops whose length XLA does not know count as often as they run.
    forward = [(one["flops"] - 4 * full["flops"]) / recompute_plan(one["policy"], 64).runs for one in (sqrt, recursive)]
    assert forward[0] == pytest.approx(forward[1], rel=0.02)
    assert 16 * forward[0] == pytest.approx(full["flops"] / 3, rel=0.2)
