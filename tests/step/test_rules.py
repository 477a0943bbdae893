"""Tables of one's own: the same training, other bytes. Each layout of `test_layouts.py` is the usual table's."""

import jax
import pytest

from jaxmem.sharding import Axis, layout_for
from tests.step.conftest import SMALL, Trained, config

FIRST = ["tensor", "fsdp", "context"]
TABLES = {
    # Attention alone is split over tensor; beside hidden units and logits each device has a part of the time.
    "attention": ({"mlp": ["fsdp"], "vocab": []}, {"fsdp": 4, "tensor": 2}),
    # The other way round, and what can lies along a weight's first dimension.
    # The head shards its vocabulary over all devices; the weights of three kinds are stored replicated.
    "head": (
        {"logits": ["fsdp"], "replicated": ["attention", "down"]},
        {"fsdp": 2, "context": 2, "tensor": 2},
    ),
    # The optimizer state is sharded over more devices than the weights.
    "optimizer": ({"optimizer": ["replica"], "replicated": ["head"]}, {"replica": 2, "fsdp": 4}),
    "hidden units": ({"heads": [], "kv_heads": [], "mlp": FIRST}, {"fsdp": 4, "tensor": 2}),
}


@pytest.fixture(scope="module")
def alone():
    return Trained(small(), updates=2)


def small(**sections):
    return config(model={"preset": "tiny", **SMALL, "vocab": 264, "layers": 1}, **sections)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_learns_what_one_device_learns(name, alone):
    rules, mesh = TABLES[name]
    Trained(small(rules=rules, mesh=mesh), 8, updates=2).agrees_with(alone)


def test_a_weight_rests_along_the_first_dimension_that_may():
    layout = layout_for(config(rules={"mlp": FIRST}, mesh={"fsdp": 4, "tensor": 2}), jax.devices())
    split = lambda role, *axes: layout.sharding(role, axes, (32, 64)).shard_shape((32, 64))  # noqa: E731
    assert split("weights", "embed", "mlp") == (8, 32)
    assert split("weights", "mlp", "embed") == (4, 64)
    assert split("compute", "mlp", "embed") == (16, 64)


def test_constants_of_blocks_are_whole_on_no_device_of_many():
    """What a dimension cannot have for its blocks, another of its layer has; not the layers, nor a table."""
    layout = layout_for(config(mesh={"fsdp": 4, "tensor": 2}), jax.devices())
    split = lambda axes, shape: layout.sharding("weights", axes, shape).shard_shape(shape)  # noqa: E731
    assert split(("layer", Axis("embed", if_even=True), "mlp"), (8, 4, 64)) == (8, 1, 32)
    assert split(("layer", Axis("embed", if_even=True), "mlp"), (8, 2, 64)) == (8, 2, 8)
    assert split(("layer", Axis("embed", if_even=True), "mlp"), (8, 2, 60)) == (8, 2, 30)
    assert split(("layer", Axis("mlp", if_even=True), "embed"), (8, 3, 64)) == (8, 3, 16)
    assert split(("vocab", Axis("embed", if_even=True)), (64, 2)) == (32, 2)
