"""A gradient that is no number: who was first, and an update that is left out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.config.methods import config_with
from jaxmem.config.sections import Train
from jaxmem.errors import UserError
from jaxmem.step import nonfinite
from jaxmem.training.progress import Work
from jaxmem.training.telemetry import Telemetry
from tests.step.conftest import Trained, batch_for, config

AXES = {
    "blocks": {"a": ("layer", "embed", "mlp"), "b": ("layer", "norm")},
    "embedding": ("vocab", "embed"),
    "head": ("embed", "vocab"),
}


def gradients(*bad):
    grads = {
        "blocks": {"a": np.ones((3, 2, 2)), "b": np.ones((3, 2))},
        "embedding": np.ones((2, 2)),
        "head": np.ones((2, 2)),
    }
    for path in bad:
        leaf = grads["blocks"] if path[0] in "ab" else grads
        leaf[path[0]][path[1:] or (0,)] = np.nan
    return jax.tree.map(jnp.asarray, grads)


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ((), None),
        ([("embedding",)], "embedding"),
        ([("b", 1), ("a", 0), ("b", 0), ("embedding",)], "blocks.b of layer 1"),
        ([("a", 2), ("b", 1)], "blocks.a of layer 2"),
        ([("head",), ("a", 2)], "head"),
    ],
)
def test_the_first_in_the_backward_pass_is_named(bad, name):
    grads = gradients(*bad)
    place = int(nonfinite.first(nonfinite.BackwardOrder(AXES).squared_norms(grads)))
    assert (nonfinite.BackwardOrder(AXES).names(grads)[place] if place >= 0 else None) == name


def test_the_last_layer_is_named_if_stages_store_layers_in_another_order():
    order = [0, 2, 1]
    grads = gradients(("a", 0), ("a", 2), ("b", 0))  # layers 0 and 1
    place = int(nonfinite.first(nonfinite.BackwardOrder(AXES, order).squared_norms(grads)))
    assert nonfinite.BackwardOrder(AXES, order).names(grads)[place] == "blocks.a of layer 1"


def test_the_length_is_that_of_all():
    assert float(jnp.sum(nonfinite.BackwardOrder(AXES).squared_norms(gradients()))) == 12 + 6 + 4 + 4


class Said:
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    def update(self, *_):
        return None


@pytest.mark.exhaustive
def test_an_update_that_is_no_number_is_left_out_and_counted():
    optimizer = {"schedule": "linear", "warmup": 5, "learning_rate": 1e-3}
    trained = Trained(config(train={"steps": 10, "on_nan": "skip", "max_skipped": 1}, optimizer=optimizer), updates=1)
    rates = [trained.metrics[0]["learning_rate"]]
    poisoned = jax.tree.map(lambda x: x, trained.state)
    up = poisoned.params["blocks"]["mlp"]["up"]
    up["weight"] = up["weight"].at[1, 0].set(jnp.nan)
    before = jax.tree.map(np.array, poisoned)
    after, metrics = trained.compiled(poisoned, trained.built.place(batch_for(trained.built)))
    assert trained.metrics[0]["skipped"] == 0
    assert int(metrics["skipped"]) == 1
    assert trained.built.spec.gradient_names[int(metrics[nonfinite.METRIC])].startswith(
        ("head", "norm")
    )  # the loss itself is none
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (before.params, before.opt_state))
    assert int(after.step) == 2
    rates.append(float(metrics["learning_rate"]))
    sound = dataclasses.replace(after, params=trained.params)
    _, later = trained.compiled(sound, trained.built.place(batch_for(trained.built)))
    assert float(later["learning_rate"]) == rates[1] > rates[0]  # the schedule waits for a skipped update

    progress = Said()
    telemetry = Telemetry(trained.built.cfg.train, trained.built.spec.gradient_names, progress, None)
    for step in (1, 2, 3):
        telemetry.update(step, trained.metrics[0] if step == 1 else metrics, Work(1))
    assert len(progress.lines) == 1
    assert "update skipped" in progress.lines[0]
    with pytest.raises(UserError, match=r"loss is nan at step 3.* first non-finite: (head|norm)"):
        telemetry.flush()


def test_an_update_of_a_loss_that_is_no_number_is_skipped_even_if_its_gradients_are_finite():
    def loss(model, batch):
        return jnp.mean(jnp.square(model.embedding.weight)) + jnp.log(-jnp.ones(()))

    cfg = config_with(config(train={"steps": 10, "on_nan": "skip"}), loss=loss)
    trained = Trained(cfg, updates=1)
    assert np.isfinite(trained.metrics[0]["gradient_norm"])
    assert trained.metrics[0]["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, trained.params, trained.first)


def overflow(scale):
    """Metrics of an update that was skipped since a gradient overflowed."""
    return {"loss": 2.0, "gradient_norm": np.inf, nonfinite.METRIC: 0, "loss_scale": scale, "count": 1.0}


def skipped_before_it_stops(scale, **settings):
    """The number of overflows that telemetry accepts, up to 5, and the error after them."""
    telemetry = Telemetry(Train(**settings), ["head"], Said(), Said(), scale)
    for count in range(5):
        telemetry.update(count + 1, overflow(1e6 if scale == "dynamic" else scale), Work(1))
        try:
            telemetry.flush()
        except UserError as error:
            return count, str(error)
    return 5, None


def test_overflows_with_a_fixed_loss_scale_count_as_skipped_updates():
    stopped, error = skipped_before_it_stops(1e6)
    assert stopped == 0
    assert "lower precision.loss_scale=1e+06, or use precision.loss_scale=dynamic" in error
    assert skipped_before_it_stops(1e6, on_nan="skip", max_skipped=3)[0] == 3


def test_overflows_are_expected_until_a_dynamic_loss_scale_is_one():
    assert skipped_before_it_stops("dynamic") == (5, None)
    telemetry = Telemetry(Train(), ["head"], Said(), Said(), "dynamic")
    telemetry.update(1, overflow(1.0), Work(1))
    with pytest.raises(UserError, match="first non-finite: head; lower optimizer"):
        telemetry.flush()
