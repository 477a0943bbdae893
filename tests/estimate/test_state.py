"""Bytes of the state on one device, by arithmetic."""

import pytest

from jaxmem.config import load_config
from jaxmem.estimate.state import DeviceBytes, StateLeaf


def config(**sections):
    usual = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 1}, "batch": {"global_size": 8}}
    return load_config({**usual, **sections})


def test_a_device_stores_the_larger_part_of_a_dimension_that_does_not_divide():
    cfg = config(mesh={"fsdp": 4, "tensor": 2})
    matrix = StateLeaf(("embed", "mlp"), (64, 33), itemsize=4)
    assert DeviceBytes(cfg)("weights", [matrix]) == 16 * 17 * 4


@pytest.mark.parametrize(
    ("zero", "traffic"),
    [
        (0, {"reduced": 4 * 64}),
        (1, {"reduced": 4 * 64, "renewed": 2 * 64}),
        (2, {"scattered": 4 * 64, "renewed": 2 * 64}),
        (3, {"gathered": 2 * 64, "scattered": 4 * 64}),
    ],
)
def test_bytes_that_each_zero_stage_communicates_are_those_of_whole_weights(zero, traffic):
    weight = StateLeaf(("embed", "mlp"), (8, 8), itemsize=2)
    size_of = DeviceBytes(config(zero=zero, mesh={"fsdp": 4}))
    sizes = size_of.traffic([weight], width=4, gathered=2.0)
    del sizes["replicated"]  # over `tensor`, of which there is one device
    assert {reason: size for reason, size in sizes.items() if size} == traffic
