"""Estimated seconds of a step that is not compiled."""

import pytest

from jaxmem.config import load_config
from jaxmem.estimate.passes import TracedPasses
from jaxmem.estimate.seconds import StepTime
from jaxmem.machine.gpus import GPUS
from jaxmem.machine.links import latency
from jaxmem.planning.budget import estimated
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


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_over_hosts_waits_for_the_network(method: str) -> None:
    """As in a compiled step: of a ring, the last device of a host sends over its network; with ulysses, every device
    sends half of its bytes over it."""
    config = {
        "name": "long",
        "model": {"preset": "tiny", "embed": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128},
        "mesh": {"context": 16, "context_method": method},
        "data": {"source": "stdlib", "sequence_length": 2**15},
        "batch": {"global_size": 1},
        "memory": {"attention": "blockwise"},
        "train": {"steps": 1},
    }

    def seconds_of_layers(name: str) -> float:
        one, nine = (estimated(load_config(config, [f"model.layers={n}"]), parse_target(name)).seconds for n in (1, 9))
        assert one is not None
        assert nine is not None
        return nine - one

    # Elements of one forward pass over the network: keys and values of the others; half of q, k, v and the output.
    elements = {"ring": 15 * 2, "ulysses": 4 / 2}[method] * 2**11 * 2048
    difference = seconds_of_layers("h100-80gb:2x8") - seconds_of_layers("h100-80gb:1x16")
    assert difference > 0.3 * 8 * elements * 2 / 50e9  # in bfloat16, of which at least 30 % is exposed


def test_replicated_gradients_of_experts_are_reduced_between_hosts() -> None:
    """Devices that differ in `fsdp` only are 8 apart, on the two hosts."""
    gpu = GPUS["h100-80gb"]
    model = {"preset": "tiny", "experts": {"count": 8, "top_k": 2}}
    sections = {"model": model, "data": {"sequence_length": 128}, "batch": {"global_size": 16}}
    cfg = load_config({"name": "experts", **sections, "mesh": {"fsdp": 2, "expert": 8}, "train": {"steps": 1}})
    weights = {"reduced": 2**30, "scattered": 0, "renewed": 0}
    time = StepTime(cfg.replace(zero=1), gpu, 8, TracedPasses(0, 0, (), 0), weights, {}, {"weights": 0, "optimizer": 0})
    assert time._per_update() > 2**29 / (1e9 * gpu.network_gb_s)
