"""State in every form is saved on one mesh and restored on another, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.checkpoint import Checkpoints
from jaxmem.leaves import state_axes
from jaxmem.optim.chains import NAMED
from jaxmem.sharding import is_axes, layout_for
from tests.optim.conftest import gradients
from tests.optim.test_layouts import AXES, MESHES, weights
from tests.program.conftest import config


@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit", "qgalore", "apollo_mini", "adafactor"])
def test_a_state_moves_between_meshes(name, tmp_path):
    params, tx = weights(), NAMED[name](1e-2, axes=AXES)
    (g,) = gradients(params, 1)
    _, state = jax.jit(tx.update)(g, jax.jit(tx.init)(params), params)
    shapes = jax.eval_shape(tx.init, params)
    axes = state_axes(shapes, params, AXES)

    def on(mesh, zero):
        layout = layout_for(config(mesh=mesh, zero=zero), jax.devices())

        def place(names, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding("optimizer", names, x.shape))

        return jax.tree.map(place, axes, shapes, is_leaf=is_axes)

    first, second = on(*MESHES["both"]), on(*MESHES["fsdp"])
    placed = jax.device_put(state, jax.tree.map(lambda x: x.sharding, first))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, placed, {}, {}, force=True)
        found, _, _ = checkpoints.restore(1, second)
    for saved, restored, asked in zip(*map(jax.tree.leaves, (state, found, second)), strict=True):
        assert restored.sharding.is_equivalent_to(asked.sharding, restored.ndim)
        np.testing.assert_array_equal(np.asarray(jnp.asarray(saved)), np.asarray(restored))
