"""Sharding rules other than the defaults train with the losses of one device; the defaults are in test_layouts.py."""

import jax
import pytest

from jaxmem.errors import UserError
from jaxmem.sharding.layout import layout_for
from jaxmem.sharding.table import Axis
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, Trained, config

FIRST = ["tensor", "fsdp", "context"]
TABLES = {
    # Only attention is sharded over tensor; each device computes a part of the sequence in the MLP and the logits.
    "attention": ({"mlp": ["fsdp"], "vocab": []}, {"fsdp": 4, "tensor": 2}),
    # Only the MLP is sharded over tensor; its weights are stored sharded over their first dimension.
    "hidden units": ({"heads": [], "kv_heads": [], "mlp": FIRST}, {"fsdp": 4, "tensor": 2}),
    # Logits are sharded over fsdp too, three kinds of weights are replicated, and replica shards the optimizer state.
    "kinds": (
        {"logits": ["fsdp"], "replicated": ["attention", "down", "head"], "optimizer": ["replica"]},
        {"replica": 2, "fsdp": 2, "tensor": 2},
        {"memory": {"loss_chunk": 16}, "batch": {"global_size": 8}},
    ),
    # Only the computation of logits is sharded over fsdp.
    "logits": ({"logits": ["fsdp"], "embed": []}, {"replica": 2, "fsdp": 2, "tensor": 2}),
}


@pytest.fixture(scope="module")
def alone():
    return Trained(small(), updates=2)


def small(**sections):
    model = {"preset": "tiny", **SMALL, "vocab": 264, "layers": 1}
    return config(**{"model": model, "batch": {"global_size": 8, "accumulate": 2}, **sections})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TABLES)
def test_every_table_of_rules_trains_as_one_device(name, alone):
    rules, mesh, *more = TABLES[name]
    Trained(small(rules=rules, mesh=mesh, **dict(*more)), 8, updates=2, begin=alone).agrees_with(alone)


def test_a_weight_is_sharded_along_the_first_allowed_dimension():
    layout = layout_for(config(rules={"mlp": FIRST}, mesh={"fsdp": 4, "tensor": 2}), jax.devices())
    split = lambda role, *axes: layout.sharding(role, axes, (32, 64)).shard_shape((32, 64))  # noqa: E731
    assert split("weights", "embed", "mlp") == (8, 32)
    assert split("weights", "mlp", "embed") == (4, 64)
    assert split("compute", "mlp", "embed") == (16, 64)


def test_block_scales_are_sharded():
    """What a dimension cannot have for its blocks, another of its layer has; not the layers, nor a table."""
    layout = layout_for(config(mesh={"fsdp": 4, "tensor": 2}), jax.devices())
    split = lambda axes, shape: layout.sharding("weights", axes, shape).shard_shape(shape)  # noqa: E731
    assert split(("layer", Axis("embed", if_even=True), "mlp"), (8, 4, 64)) == (8, 1, 32)
    assert split(("layer", Axis("embed", if_even=True), "mlp"), (8, 2, 64)) == (8, 2, 8)
    assert split(("layer", Axis("embed", if_even=True), "mlp"), (8, 2, 60)) == (8, 2, 30)
    assert split(("layer", Axis("mlp", if_even=True), "embed"), (8, 3, 64)) == (8, 3, 16)
    assert split(("vocab", Axis("embed", if_even=True)), (64, 2)) == (32, 2)


def test_a_mesh_axis_that_two_dimensions_leave_shards_one_other_dimension():
    """Codes of 4 x 4 blocks, where neither `embed` nor `heads` is divisible by fsdp."""
    cfg = config(rules={"embed": ["fsdp"], "heads": ["context", "fsdp", "tensor"]}, mesh={"fsdp": 4, "context": 2})
    axes = (Axis("embed", if_even=True), Axis("heads", if_even=True), "head_dim")
    assert layout_for(cfg, jax.devices()).sharding("weights", axes, (2, 2, 16)).shard_shape((2, 2, 16)) == (1, 2, 4)


@pytest.mark.parametrize(
    "model",
    [{"family": "mlp", "embed": 16, "mlp": 32, "layers": 2}, {"family": "convnet", "stages": [8]}],
    ids=lambda model: model["family"],
)
def test_refuses_a_mesh_axis_that_shards_nothing(model):
    sections = {"model": model, "objective": "classify", "data": {"source": "digits"}, "mesh": {"fsdp": 4, "tensor": 2}}
    assert program(config(**sections), jax.devices()).spec
    with pytest.raises(UserError, match=r"mesh.tensor=2 does not shard the model.*vocab.*mesh.tensor=1"):
        assert program(config(**sections, rules={"mlp": []}), jax.devices()).spec
