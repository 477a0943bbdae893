"""The table of GPUs: plans compile and estimate times for them, and MFU is relative to their peak rates.

Figures are from NVIDIA's data sheets and architecture papers; memory is the size that CUDA reports, which is less than
the product name states. Rates are peaks in one direction.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

GIB = 2**30

# Attained rates as a share of the peaks: large bf16 matmuls under power limits, streaming kernels, NCCL transfers.
# Only estimates of time use these.
ATTAINED_FLOPS = 0.7
# Attention kernels with causal masks and heads of 128, forward and backward together, by major compute capability: A100
# with FlashAttention-2 (arXiv:2307.08691; RTX cards are assumed to attain the same), H100 and B200 with cuDNN (measured
# for FlashAttention-3 and -4, arXiv:2407.08608 and 2603.05451).
ATTAINED_ATTENTION = {8: 0.66, 9: 0.53, 10: 0.55}
ATTAINED_BANDWIDTH = 0.85  # of the peak bandwidth of device memory
ATTAINED_LINK = 0.8  # of the peak rate between devices, hosts, or host and device
LAUNCH_SECONDS = 2e-6  # from one kernel to the next
# Peaks relative to bf16: tensor cores compute float32 as TF32 at half the rate, and 8-bit formats at twice the rate.
RELATIVE_RATES = {
    "float64": 1 / 32,
    "float32": 0.5,
    "int8": 2.0,
    "uint8": 2.0,
    "float8_e4m3fn": 2.0,
    "float8_e5m2": 2.0,
}


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in the units of its data sheet."""

    name: str  # name of the target
    kind: str  # part of the device name that CUDA reports
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float  # dense, accumulated in float32
    link_gb_s: float  # rate of the link to the other GPUs of its host: NVLink, else PCIe
    network_gb_s: float  # the GPU's share of the network rate of its host
    host_link_gb_s: float  # rate of the link to host memory
    host_memory_gib: float  # the GPU's share of the memory of its host
    compute_capability: str
    cores: int  # streaming multiprocessors
    clock_ghz: float
    l2_mib: float

    @property
    def memory(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def host_memory(self) -> int:
        return int(self.host_memory_gib * GIB)

    @property
    def flops(self) -> float:
        return self.bf16_tflops * 1e12

    def matmul_rate(self, dtype: str) -> float:
        """Attained FLOP/s."""
        return self.flops * ATTAINED_FLOPS * RELATIVE_RATES.get(dtype, 1.0)

    def kernel_rate(self, dtype: str) -> float:
        """Attained FLOP/s of attention and other fused kernels."""
        share = ATTAINED_ATTENTION.get(int(float(self.compute_capability)), 0.66)
        return self.flops * share * RELATIVE_RATES.get(dtype, 1.0)

    @property
    def memory_rate(self) -> float:
        """Attained bytes per second."""
        return self.bandwidth_gb_s * 1e9 * ATTAINED_BANDWIDTH

    @property
    def host_rate(self) -> float:
        """Attained bytes per second to host memory; the link has the same rate from host memory at the same time."""
        return self.host_link_gb_s * 1e9 * ATTAINED_LINK

    def link_rate(self, group: int, neighbours: int) -> float:
        """Attained bytes per second of a collective of `group` devices, of which `neighbours` share a host: within a
        host the rate of a link, between hosts the sum of the network rates of the members on a host."""
        between_hosts = neighbours < group
        rate = min(self.link_gb_s, self.network_gb_s * neighbours) if between_hosts else self.link_gb_s
        return rate * 1e9 * ATTAINED_LINK


_FIELDS, *_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GPUS = {gpu.name: gpu for gpu in (Gpu(**dict(zip(_FIELDS, row, strict=True))) for row in _ROWS)}

# A simulated device has a share of a few server cores; its times only compare programs with each other.
CPU = Gpu("cpu", "CPU", 16, 20, 0.2, 10, 10, 10, 16, "0.0", 1, 2.0, 1)


def find(device_kind: str, memory: int | None = None) -> Gpu | None:
    """The GPU in the table whose `kind` is the longest part of a device's name; of several, the nearest to `memory`.

    >>> find("NVIDIA H100 PCIe").name, find("NVIDIA A100-SXM4-80GB", 80 * GIB).name, find("cpu")
    ('h100-pcie-80gb', 'a100-80gb', None)
    """
    words = f" {device_kind.replace('-', ' ')} "
    matches = [gpu for gpu in GPUS.values() if f" {gpu.kind} " in words]
    return max(matches, key=lambda gpu: (len(gpu.kind), -abs(gpu.memory - (memory or 0))), default=None)


def spillable(host_memory: int) -> int:
    """Half of the host memory per device, in bytes: the limit for arrays that exceed the device. The rest is for data,
    checkpoints that are being written and the system; on a full host, processes are killed."""
    return host_memory // 2


def reserved(devices: int, gib: float | None = None) -> int:
    """Bytes of a GPU that the compiler does not count: CUDA's context and kernels, libraries' workspaces, and with
    several devices NCCL's buffers. `gib` overrides this default. Plans and runs both subtract these bytes.

    >>> reserved(1) / GIB, reserved(8) / GIB, reserved(8, 2.5) / GIB
    (0.75, 1.5, 2.5)
    """
    if gib is None:
        gib = 0.75 if devices == 1 else 1.5
    return int(gib * GIB)
