"""Which weights learn, by name and by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import optim
from jaxmem.errors import UserError
from jaxmem.quant import quantize

PARAMS = {"blocks": {"w": jnp.arange(24.0).reshape(4, 3, 2), "b": jnp.ones((4, 2))}, "head": jnp.ones(3)}


def test_layers_are_taken_out_and_put_back():
    selection = optim.Selection.of(PARAMS, ["blocks[-1:].*", "blocks[:2].w", "blocks.b"])
    own = selection.select(PARAMS)
    np.testing.assert_array_equal(own["blocks"]["w"], PARAMS["blocks"]["w"][np.array([0, 1, 3])])
    assert own["blocks"]["b"].shape == (4, 2)  # whole, as another pattern says
    assert own["head"] is None
    assert [*selection.partial_stacks.values()] == [(0, 1, 3)]
    put = selection.merge(PARAMS, {"blocks": {"w": -own["blocks"]["w"], "b": own["blocks"]["b"]}, "head": None})
    np.testing.assert_array_equal(put["blocks"]["w"][2], PARAMS["blocks"]["w"][2])
    np.testing.assert_array_equal(put["blocks"]["w"][np.array([0, 1, 3])], -own["blocks"]["w"])
    assert optim.Selection.of(PARAMS, ["blocks[:9].b"]).partial_stacks == {}  # all that there are


def test_selected_layers_are_quantized():
    q = {"blocks": quantize(jnp.asarray(np.random.default_rng(0).normal(size=(4, 64, 2)), jnp.float32), "nf4", axis=-2)}
    selection = optim.Selection.of(q, ["blocks[1:3]"])
    own = selection.select(q)
    np.testing.assert_array_equal(own["blocks"].dequantize(), q["blocks"].dequantize()[1:3])
    np.testing.assert_array_equal(selection.merge(q, own)["blocks"].dequantize(), q["blocks"].dequantize())


def test_an_optimizer_holds_state_of_these_layers_alone():
    tx = optim.trainable(optim.sgd(1.0, momentum=0.9), ["blocks[2:].w"])
    state = tx.init(PARAMS)
    assert sum(x.size for x in optax.tree.get(state, "trace")["blocks"].values() if x is not None) == 12
    updates, _ = tx.update(PARAMS, state, PARAMS)
    moved = np.asarray(updates["blocks"]["w"] != 0).reshape(4, -1).any(1)
    assert moved.tolist() == [False, False, True, True]
    assert not np.asarray(updates["head"]).any()


@pytest.mark.parametrize(
    ("tree", "pattern", "message"),
    [
        (PARAMS, "blocks[4:].w", r"\[4:\].w selects no layer of blocks.w, which has 4"),
        (PARAMS, "block[:1].w", "block.w matches no parameter; did you mean blocks.w"),
        ({"head": ("embed", "vocab")}, "head[:1]", r"head\[:1\] requires a stack of layers, not head"),
    ],
)
def test_what_names_nothing(tree, pattern, message):
    with pytest.raises(UserError, match=message):
        optim.Selection.of(tree, [pattern])


def test_updates_may_have_another_dtype_than_gradients():
    tx = optim.trainable(optax.adam(1e-3), ["blocks[-1:].w"])
    grads = {
        "blocks": {"w": PARAMS["blocks"]["w"].astype(jnp.bfloat16), "b": PARAMS["blocks"]["b"]},
        "head": jnp.ones(3),
    }
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert updates["blocks"]["w"].dtype == jnp.float32
    assert np.asarray(updates["blocks"]["w"] != 0).reshape(4, -1).any(1).tolist() == [False, False, False, True]
