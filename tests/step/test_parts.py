"""What the loss of a script does with its stacks of layers."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.stack.apply import apply_call
from jaxmem.stack.call import StackCall
from jaxmem.step.parts import applies_hooks_by_layer

AXES = {"a": ("layer", "embed"), "b": ("layer", "embed"), "head": ("embed",)}
WEIGHTS = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2)), "head": jnp.ones(2)}


def stack(weights, x):
    return apply_call(StackCall(lambda w, x, *_: (x * w, None), weights, x))[0]


def once(params, x):
    return stack(params["b"], stack(params["a"], x * params["head"]))


def twice(params, x):
    return stack(params["a"], stack(params["a"], x))


def in_a_loop(params, x):
    return jax.lax.scan(lambda x, _: (stack(params["a"], x), None), x, None, length=2)[0]


def with_a_penalty(params, x):
    return once(params, x) + jnp.sum(params["a"] ** 2)


def as_an_input_of_other_layers(params, _):
    return stack(params["b"], jnp.sum(params["a"], axis=0))


@pytest.mark.parametrize(
    ("network", "expected"),
    [(once, True), (twice, False), (in_a_loop, False), (with_a_penalty, False), (as_an_input_of_other_layers, False)],
)
def test_gradients_are_added_layer_by_layer_if_only_one_pass_over_the_layers_uses_their_weights(network, expected):
    def loss(params, batch, _):
        return jnp.sum(network(params, batch["x"])), {}

    assert applies_hooks_by_layer(loss, WEIGHTS, {"x": jnp.ones(2)}, jax.random.key(0), AXES) is expected
