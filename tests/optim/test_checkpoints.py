"""State in every form is saved on one mesh and restored on another, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.quant import quantize
from jaxmem.sharding.gathering import stored_axes
from jaxmem.sharding.layout import layout_for
from jaxmem.sharding.table import is_axes
from tests.optim.test_layouts import AXES, MESHES, weights
from tests.step.conftest import config

NAMES = [
    "lion8bit", "momentum8bit", "adamw4bit", "galore_adamw8bit", "qgalore", "apollo_mini", "adafactor", "adam_mini"
]  # fmt: skip
FORMS = [("nf4", True), ("int3", False), ("uint4", False), ("fp8_e4m3", False)]


def shapes_and_axes():
    """Of all optimizers' states at once, of bits that complete weights, and of weights in codes."""
    params = jax.eval_shape(weights)
    txs = {name: optim.optimizer(name)(1e-2, axes=AXES) for name in NAMES}
    txs |= {f"remainder{bits}": optim.with_remainder(optim.adamw8bit(1e-2, axes=AXES), bits, AXES) for bits in (8, 16)}
    states = {name: jax.eval_shape(tx.init, params) for name, tx in txs.items()}
    axes = {name: optim.state_axes(tx, params, AXES) for name, tx in txs.items()}
    # Blocks of 24 along a dimension of which the one mesh has parts of 16, the other parts of 8.
    coded = {
        form: jax.eval_shape(lambda w, f=form, d=double: quantize(w, f, 24, axis=-2, double_quant=d), params["up"])
        for form, double in FORMS
    }
    return {**states, "coded": coded}, {**axes, "coded": stored_axes(dict.fromkeys(coded, AXES["up"]), coded)}


@pytest.mark.exhaustive
def test_states_and_weights_move_between_meshes(tmp_path):
    shapes, axes = shapes_and_axes()
    draw = np.random.default_rng(0)

    def drawn(x):
        integers = jnp.issubdtype(x.dtype, jnp.integer)
        values = draw.integers(0, 127, x.shape) if integers else draw.normal(size=x.shape)
        return np.asarray(values).astype(x.dtype)

    def on(mesh, zero):
        layout = layout_for(config(mesh=mesh, zero=zero), jax.devices())

        def place(names, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding("optimizer", names, x.shape))

        return jax.tree.map(place, axes, shapes, is_leaf=is_axes)

    first, second = on({"fsdp": 4, "tensor": 2}, 3), on(*MESHES["fsdp"])
    state = jax.tree.map(drawn, shapes)
    placed = jax.device_put(state, jax.tree.map(lambda x: x.sharding, first))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, placed, {}, {}, force=True)
        found, _, _ = checkpoints.restore(1, second)
    assert len(jax.tree.leaves(state)) > 100
    for saved, restored, asked in zip(*map(jax.tree.leaves, (state, found, second)), strict=True):
        assert restored.sharding.is_equivalent_to(asked.sharding, restored.ndim)
        np.testing.assert_array_equal(saved, np.asarray(restored))
