"""The stop of cut graphs: parts on devices compute what one device does, and no operation runs before its operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.course.cut import GRAPH, in_parts, initial, schedule, whole


def test_parts_on_devices_have_the_loss_and_the_gradients_of_one_device() -> None:
    draws = np.random.default_rng(2)
    x = jnp.asarray(draws.standard_normal((4, 8, 8, 1)), jnp.float32)
    labels = jnp.asarray([0, 3, 9, 1], jnp.int32)
    weights = initial()
    loss, gradients = jax.jit(jax.value_and_grad(whole))(weights, x, labels)
    found, parts, traffic = in_parts(weights, [(x[:1], labels[:1]), (x[1:], labels[1:])], jax.devices()[:4])
    assert float(found) == pytest.approx(float(loss), rel=1e-5)
    for name, part in GRAPH.items():
        for key in part.shapes:
            np.testing.assert_allclose(parts[name][key], gradients[name][key], rtol=1e-4, atol=1e-5)
            assert parts[name][key].devices() == {jax.devices()[part.device]}
    for forward in ("stem to small", "stem to large", "small to head", "large to head"):
        source, _, target = forward.partition(" to ")
        assert traffic.sizes[forward] == traffic.sizes[f"{target} to {source}"]  # its gradient goes back


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_each_operation_runs_once_per_micro_batch_and_in_order(micro_batches: int) -> None:
    rows = list(schedule(micro_batches).values())
    for row in rows:
        assert row.count("F") == micro_batches
        assert row.count("B") == 2 * micro_batches
    stem, small, large, head = rows
    assert small == large  # the towers run at the same time
    assert stem.index("F") < small.index("F") < head.index("F") < head.index("B") < small.index("B") < stem.index("B")
    assert max(row.rindex("B") for row in rows) == stem.rindex("B")
