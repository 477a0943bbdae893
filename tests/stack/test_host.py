"""What waits in host memory: the same gradients, fewer bytes on the device, the others counted, and nobody waits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config.names import BOUNDARY
from jaxmem.stack.apply import apply_call, stack_call, stacked
from jaxmem.stack.call import StackOptions
from scripts.course.checkpointing import backward
from tests.stack.test_recompute_plan import Affine, layer


@pytest.mark.exhaustive
def test_gradients_are_bitwise_those_of_keeping_all_on_the_device():
    layers = 5
    graphdef, state = nnx.split(stacked(Affine, layers, nnx.Rngs(0)))
    keys = jax.random.split(jax.random.key(1), layers)
    given = nnx.to_pure_dict(state), jnp.ones((2, 3)), jnp.arange(1.0 * layers), jnp.float32(0.5)

    def loss(weights, x, extra, shared, way):
        blocks = nnx.merge(graphdef, weights)
        y, outputs = apply_call(stack_call(blocks, layer, x, (keys, extra), (shared, jnp.arange(3)), options=way))
        return jnp.sum(y * y) + jnp.sum(jnp.sin(outputs))

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)), static_argnums=4)
    expected = gradients(*given, StackOptions("none"))
    for remat in ("full", "sqrt", ("unnamed",)):
        jax.tree.map(np.testing.assert_array_equal, gradients(*given, StackOptions(remat, host=(BOUNDARY,))), expected)
    # Groups of rows, as devices with gradients of their own have them.
    weights, x, extra, shared = given
    groups = jnp.stack([x, 2 * x])
    for way in (StackOptions("sqrt"), StackOptions("sqrt", host=(BOUNDARY,))):
        mapped = jax.vmap(partial(jax.value_and_grad(loss, (0, 1)), way=way), in_axes=(None, 0, None, None))
        apart = jax.jit(mapped)(weights, groups, extra, shared)
        jax.tree.map(lambda mine, theirs: np.testing.assert_array_equal(mine[0], theirs), apart[1][0], expected[1][0])


@pytest.mark.exhaustive
def test_boundaries_leave_the_device_and_are_back_in_time():
    """Compiled for a GPU: all but the one in use and the next are in host memory, and travel while layers compute. XLA
    of jax 0.12 has one more on the device."""
    shape = {"embed": 512, "mlp": 2048, "heads": 4, "kv_heads": 2, "head_dim": 128, "vocab": 512}
    here, away = (backward("full", 16, "h100-80gb", shape, tokens=4096, host=host) for host in ((), (BOUNDARY,)))
    assert here["host"] == 0
    assert away["host"] == 16 * away["boundary"]
    assert here["temporaries"] - away["temporaries"] >= 12 * away["boundary"]
    assert away["hidden"] > 0.9
