"""Seconds of collectives over NVLink, PCIe and the network between hosts.

A collective takes a latency and the time of its bytes at the rate that large arrays attain. NCCL's rings take a step
per device (Thakur et al., 2005), so the latency grows with the number of devices, and steps between hosts take longer.
"""

from jaxmem.machine.gpus import Gpu

# The latencies of NCCL's own cost model (github.com/NVIDIA/nccl, src/graph/tuning.cc, rings, protocol Simple): to start
# a collective, and per step. They agree with measurements on 8 H100s: an all-gather of 1 MiB takes 31 us, here 35 us.
START_SECONDS = 8.4e-6
NVLINK_STEP, PCIE_STEP, NETWORK_STEP = 3.4e-6, 5.7e-6, 14e-6
_PCIE_GB_S = 64  # links of at most this rate are PCIe

# Attained share of the rate of a link, by the number of devices of a group on a host. Measured on 8 H100s between 256
# MiB and 2 GiB (github.com/openxla/xla, xla/service/gpu/model/default_collective_perf_table.txtpb, sm_90). 8 H200s
# attain 0.80 in all-gathers and 0.81 in reduce-scatters, and 8 A100s 0.78 in all-reduces
# (github.com/stas00/ml-engineering, network/README.md).
_SHARES = {
    "all-gather": {2: 0.62, 4: 0.75, 8: 0.79},
    "reduce-scatter": {2: 0.47, 4: 0.65, 8: 0.74},
    "all-reduce": {2: 0.56, 4: 0.68, 8: 0.79},
    "all-to-all": {2: 0.74, 4: 0.80, 8: 0.77},
    "collective-permute": {2: 0.61},
}
# From Hopper on, the switches of a host with NVLink add (NVLink SHARP), if more than 4 GPUs take part.
_ALL_REDUCE_IN_SWITCH, _SWITCH_GROUP, _SWITCH_CAPABILITY = 0.90, 5, 9.0
# Attained share of the rate of the network: all-reduces on 4 hosts of 8 H200s with 400 Gb/s per GPU (the same page).
_NETWORK_SHARE = 0.91

# A collective runs on some multiprocessors of each device, one for each of NCCL's channels: 16 for 450 GB/s
# (github.com/NVIDIA/nccl/issues/892, the log of an H800).
_GB_S_PER_CHANNEL = 450 / 16
# In a ring, a device writes to its memory what it receives, and reads what it sends.
_MEMORY_BYTES_PER_SENT = 2
_LEAST_SHARE = 0.5  # of multiprocessors and of the memory's rate that is left for kernels, whatever the link


def collective_seconds(gpu: Gpu, kind: str, sent: float, group: int, neighbours: int) -> float:
    """Seconds in which each of `group` devices sends `sent` bytes; `neighbours` of them share a host."""
    if group == 1:
        return 0.0
    return latency(gpu, kind, group, neighbours) + sent / link_rate(gpu, kind, group, neighbours)


def latency(gpu: Gpu, kind: str, group: int, neighbours: int) -> float:
    """Seconds of a collective of few bytes."""
    if kind == "collective-permute":
        steps = 1
        between_hosts = int(neighbours < group)
    else:
        rounds = 2 if kind == "all-reduce" else 1
        steps = rounds * (group - 1)
        between_hosts = rounds * (-(-group // neighbours) - 1)
    within = PCIE_STEP if gpu.link_among(neighbours) <= _PCIE_GB_S else NVLINK_STEP
    return START_SECONDS + (steps - between_hosts) * within + between_hosts * NETWORK_STEP


def link_rate(gpu: Gpu, kind: str, group: int, neighbours: int) -> float:
    """Attained bytes per second: within a host those of a link, between hosts at most those of the network."""
    rate = gpu.link_among(neighbours) * _share(gpu, kind, neighbours)
    if neighbours < group:
        network = gpu.network_gb_s * _NETWORK_SHARE * _networks(kind, group, neighbours)
        rate = network if neighbours == 1 else min(rate, network)
    return rate * 1e9


def _networks(kind: str, group: int, neighbours: int) -> float:
    """The rate at which a device sends in a collective between hosts, relative to that of its own network."""
    if kind == "collective-permute":
        return 1.0
    if kind.endswith("all-to-all"):  # a device sends equally to all others, of which `group - neighbours` are elsewhere
        return (group - 1) / (group - neighbours)
    return neighbours  # a ring leaves a host once, over the networks of all members on it


def _share(gpu: Gpu, kind: str, group: int) -> float:
    switches = gpu.link_among(group) > _PCIE_GB_S and float(gpu.compute_capability) >= _SWITCH_CAPABILITY
    if kind == "all-reduce" and switches and group >= _SWITCH_GROUP:
        return _ALL_REDUCE_IN_SWITCH
    shares = _SHARES.get(kind, _SHARES["all-to-all"])
    return shares[min(shares, key=lambda measured: abs(measured - group))]


def slowdown(gpu: Gpu, rate: float) -> tuple[float, float]:
    """Factors on the seconds of a compute-bound and of a memory-bound kernel during a collective that sends `rate`
    bytes per second."""
    channels = gpu.link_gb_s / _GB_S_PER_CHANNEL
    cores_left = max(_LEAST_SHARE, 1 - channels / gpu.cores)
    memory_left = max(_LEAST_SHARE, 1 - _MEMORY_BYTES_PER_SENT * rate / gpu.memory_rate)
    return 1 / cores_left, 1 / memory_left
