"""Seconds of collectives, against measurements on one host of 8 H100s."""

import dataclasses

import pytest

from jaxmem.machine.gpus import GPUS
from jaxmem.machine.links import collective_seconds, latency, link_rate, slowdown

H100, A100, RTX = GPUS["h100-80gb"], GPUS["a100-80gb"], GPUS["rtx4090-24gb"]
MIB = 2**20
# (kind, devices, MiB of the whole array, microseconds): openxla/xla, default_collective_perf_table.txtpb, sm_90
MEASURED = [
    ("all-gather", 8, 1, 31), ("all-gather", 8, 16, 82), ("all-gather", 8, 256, 729), ("all-gather", 8, 2048, 5343),
    ("all-gather", 4, 16, 70), ("all-gather", 4, 1024, 2473), ("all-gather", 2, 256, 549),
    ("reduce-scatter", 8, 16, 87), ("reduce-scatter", 8, 256, 770), ("reduce-scatter", 8, 2048, 5712),
    ("all-reduce", 8, 1, 52), ("all-reduce", 8, 16, 145), ("all-reduce", 8, 256, 1262), ("all-reduce", 8, 2048, 9338),
    ("all-reduce", 4, 256, 1420), ("all-reduce", 2, 1024, 4433),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "devices", "mib", "microseconds"), MEASURED)
def test_collectives_of_a_host_take_the_measured_time(kind: str, devices: int, mib: int, microseconds: float) -> None:
    sent = mib * MIB * (devices - 1) / devices * (2 if kind == "all-reduce" else 1)
    assert collective_seconds(H100, kind, sent, devices, devices) == pytest.approx(1e-6 * microseconds, rel=0.25)


def test_many_small_collectives_take_longer_than_a_large_one() -> None:
    small, large = (collective_seconds(H100, "reduce-scatter", size, 8, 8) for size in (4 * MIB, 64 * MIB))
    assert 16 * small > 2 * large


def test_latency_grows_with_devices_and_hosts() -> None:
    assert latency(H100, "all-gather", 8, 8) < latency(H100, "all-gather", 16, 8) < latency(H100, "all-gather", 16, 1)
    assert latency(H100, "all-gather", 8, 8) < latency(RTX, "all-gather", 8, 8)  # PCIe
    assert latency(H100, "collective-permute", 8, 8) < latency(H100, "all-gather", 8, 8)


def test_the_switches_of_a_host_reduce_from_hopper_on() -> None:
    per_link = {gpu.name: link_rate(gpu, "all-reduce", 8, 8) / gpu.link_gb_s for gpu in (H100, A100)}
    assert per_link["h100-80gb"] > 1.1 * per_link["a100-80gb"]
    assert link_rate(H100, "all-reduce", 4, 4) < link_rate(H100, "all-reduce", 8, 8)


def test_bridges_join_few_gpus_of_a_host() -> None:
    """All others are on PCIe."""
    for name, bridged in (("h100-nvl-94gb", 2), ("h200-nvl-141gb", 4)):
        gpu = GPUS[name]
        assert link_rate(gpu, "all-gather", bridged, bridged) > 100e9
        assert link_rate(gpu, "all-gather", 8, 8) <= 64e9
        assert link_rate(gpu, "all-reduce", 8, 8) <= link_rate(GPUS["h100-pcie-80gb"], "all-reduce", 8, 8)
        assert latency(gpu, "all-gather", 8, 8) == latency(GPUS["h100-pcie-80gb"], "all-gather", 8, 8)


def test_between_hosts_the_networks_of_a_host_add_up() -> None:
    one, two, eight = (link_rate(H100, "all-gather", 16, neighbours) for neighbours in (1, 2, 8))
    assert two == pytest.approx(2 * one)
    assert link_rate(A100, "all-gather", 16, 8) < link_rate(A100, "all-gather", 16, 16)
    assert eight <= link_rate(H100, "all-gather", 16, 16)
    # An all-reduce on 4 hosts of 8 H200s attains 365 GB/s (ml-engineering, network/README.md).
    assert link_rate(GPUS["h200-141gb"], "all-reduce", 32, 8) == pytest.approx(365e9, rel=0.02)


def test_an_all_to_all_sends_most_bytes_between_hosts() -> None:
    """On 2 hosts of 8, each device sends 8 of 16 parts of its array over its own network."""
    size = 2**30
    seconds = collective_seconds(H100, "all-to-all", size * 15 / 16, 16, 8) - latency(H100, "all-to-all", 16, 8)
    assert seconds == pytest.approx(size / 2 / (0.91e9 * H100.network_gb_s))


def test_a_permutation_between_hosts_uses_one_network() -> None:
    assert link_rate(H100, "collective-permute", 16, 8) == link_rate(H100, "collective-permute", 2, 1)


def test_a_collective_slows_kernels_down() -> None:
    arithmetic, memory = slowdown(H100, 350e9)
    assert arithmetic == pytest.approx(132 / 116)
    assert memory == pytest.approx(1 / (1 - 700e9 / H100.memory_rate))
    assert slowdown(RTX, 20e9)[0] < 1.02
    few_cores = dataclasses.replace(H100, cores=8)
    assert slowdown(few_cores, 1e12) == (2.0, pytest.approx(2.0))
