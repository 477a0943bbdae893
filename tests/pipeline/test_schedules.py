"""Schedules of pipelines by themselves, and the layers of their stages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.pipeline.stages import Pipeline
from jaxmem.pipeline.timetable import BACKWARD, FORWARD, IDLE, check, evaluation, timetable
from jaxmem.stack.apply import apply_call, stack_call, stacked
from jaxmem.stack.call import StackOptions
from tests.support.stages import arranged

SHAPES = [  # layers, stages, micro-batches, rounds
    (4, 2, 4, 1),
    (4, 4, 1, 1),  # one stage works at a time
    (5, 3, 7, 1),  # neither layers nor micro-batches divide
    (6, 2, 4, 2),  # two of eight places do nothing
    (12, 2, 2, 3),
    (10, 2, 4, 1),  # segments of two layers do not divide five
    (8, 2, 4, 1),
]


class Affine(nnx.Module):
    """Does not commute: the order of the layers can be read from the result."""

    def __init__(self, rngs):
        self.a = nnx.Param(1.0 + jax.random.uniform(rngs.params(), (3,)), axes=("norm",))
        self.b = nnx.Param(jax.random.normal(rngs.params(), (3,)), axes=("norm",))


def layer(block, x, own, beside):
    shared, micro = beside
    return jnp.tanh(x * block.a.get_value() + block.b.get_value()) * shared + micro * own, None


SCHEDULES = [
    ("gpipe", 4, 8, 1), ("circular", 4, 8, 2), ("1f1b", 4, 32, 1), ("1f1b", 4, 3, 1), ("1f1b", 3, 1, 1),
    ("interleaved_1f1b", 4, 32, 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stages", "micro", "rounds"), SCHEDULES)
def test_every_schedule_passes_the_checker(name, stages, micro, rounds):
    table = timetable(name, stages, micro, rounds)
    check(table)
    evaluated = evaluation(stages, micro, rounds)
    check(evaluated)


def test_slots_follow_the_stages():
    """With 1F1B not the number of micro-batches."""
    for micro in (8, 32):
        assert timetable("1f1b", 4, micro).slots.counts[0] == 7  # 2 p - 1
        assert timetable("interleaved_1f1b", 4, micro, 2).slots.counts[0] == 11  # v p + p - 1, of half as many layers
        assert timetable("gpipe", 4, micro).slots.counts[0] == micro


def test_the_share_of_idle_time():
    for name in ("gpipe", "1f1b"):
        assert timetable(name, 4, 16).idle_share() == pytest.approx(3 / 19)
    assert timetable("interleaved_1f1b", 4, 16, 2).idle_share() == pytest.approx(3 / 35)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kind": {(0, 1): FORWARD, (1, 1): IDLE}}, "reads inputs of micro-batch 0"),  # not sent yet
        ({"kind": {(1, 1): BACKWARD, (2, 1): FORWARD}}, "reads gradients of micro-batch 0"),  # backward before forward
        ({"kind": {(7, 0): IDLE}}, "missing"),
        ({"kind": {(2, 0): FORWARD}, "micro": {(2, 0): 1}}, "forward of micro-batch 1, round 0 is repeated"),
        ({"kind": {(6, 1): FORWARD}, "micro": {(6, 1): 4}}, "micro-batch 4"),
    ],
)
def test_tables_that_would_read_what_is_not_there_are_refused(changes, fault):
    """Tables of 1F1B with some entries replaced: (tick, stage) -> value."""
    table = timetable("1f1b", 2, 3)
    for name, places in changes.items():
        values = getattr(table, name).copy()
        for place, value in places.items():
            values[place] = value
        table = dataclasses.replace(table, **{name: values})
    with pytest.raises(ValueError, match=fault):
        check(table)


def test_without_micro_batches_layer_follows_layer():
    layers = 6
    pipeline = Pipeline(layers, stages=2, micro_batches=4, rounds=2)
    graphdef, state = nnx.split(stacked(Affine, layers, nnx.Rngs(0)))
    weights = nnx.to_pure_dict(state)
    x, own = jnp.ones((3,)), jnp.arange(3.0 * layers).reshape(layers, 3)
    count = lambda block, x, own, beside: (layer(block, x, own, beside)[0], jnp.sum(x))  # noqa: E731
    beside = jnp.float32(0.5), jnp.ones((3,))
    plain = apply_call(stack_call(nnx.merge(graphdef, weights), count, x, own, beside))
    stored = nnx.merge(graphdef, jax.tree.map(functools.partial(arranged, pipeline), weights))
    staged = apply_call(stack_call(stored, count, x, own, beside, options=StackOptions(order=pipeline)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain, staged)


def test_each_layer_has_one_place():
    for layers, stages, micro, rounds in SHAPES:
        pipeline = Pipeline(layers, stages, micro, rounds)
        assert sorted(pipeline.order) == list(range(pipeline.stored))
        assert 0 <= pipeline.stored - layers < stages * rounds
        # What a stage runs in its turn are neighbours in the model.
        order = pipeline.order.reshape(stages, pipeline.group, rounds)
        assert (np.diff(order, axis=1) == 1).all()
