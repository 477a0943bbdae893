"""Bytes of the state on one device, by arithmetic."""

from jaxmem.config import load_config
from jaxmem.estimate.state import DeviceBytes, StateLeaf


def test_a_device_stores_the_larger_part_of_a_dimension_that_does_not_divide():
    cfg = load_config(
        {
            "name": "uneven",
            "model": {"preset": "tiny"},
            "mesh": {"fsdp": 4, "tensor": 2},
            "train": {"steps": 1},
            "batch": {"global_size": 8},
        }
    )
    matrix = StateLeaf(("embed", "mlp"), (64, 33), itemsize=4)
    assert DeviceBytes(cfg)("weights", [matrix]) == 16 * 17 * 4
