"""Estimated seconds of a step that is not compiled."""

import pytest

from jaxmem.config import load_config
from jaxmem.machine.links import latency
from jaxmem.planning.estimated import estimated
from jaxmem.planning.targets import parse_target


@pytest.mark.exhaustive
def test_gathering_each_layer_over_many_hosts_costs_a_latency_each() -> None:
    target = parse_target("h100-80gb:256")
    assert target.gpu is not None
    config = {
        "name": "narrow",
        "model": {"preset": "tiny", "embed": 256},
        "mesh": {"fsdp": 256},
        "data": {"source": "stdlib", "sequence_length": 128},
        "batch": {"global_size": 256},
        "train": {"steps": 1},
    }
    few, many = (estimated(load_config(config, [f"model.layers={n}"]), target).seconds for n in (8, 40))
    assert few is not None
    assert many is not None
    wait = latency(target.gpu, "all-gather", 256, target.per_host)
    assert many - few > 32 * 0.3 * 3 * wait  # two gathers and a reduction of each layer, of which 30 % are exposed
    assert few > 0.3 * 24 * wait
