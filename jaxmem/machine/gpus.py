"""The table of GPUs: plans compile and estimate times for them, and MFU is relative to their peak rates.

Figures are from NVIDIA's data sheets and architecture papers; memory is the size that CUDA reports, which is less than
the product name states. Rates are peaks in one direction.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

GIB = 2**30

# Attained rates as a share of the peaks; only estimates of time use these.
# Large bf16 matmuls, by major compute capability. H100: 753 TFLOP/s at 8,192 cubed, 700 at 16,384, where power limits
# it; its best shapes attain 0.80, those of B200 0.78, of A100 with 400 W 0.87 and with 300 W 0.81
# (github.com/stas00/ml-engineering, compute/accelerator/README.md). RTX cards are assumed to attain the last.
ATTAINED_FLOPS = {8: 0.81, 9: 0.7, 10: 0.7}
# A matmul fills and drains the multiprocessors: 375 shapes of 256 to 4,096 on an H100 take the time of their FLOPs and
# 6 us, with a mean error of 8 % (github.com/openxla/xla, xla/service/gpu/model/default_matmul_perf_table.txtpb, sm_90).
# 2 of these are LAUNCH_SECONDS.
MATMUL_SECONDS = 4e-6
# Attention attains A n / (n + N) of the peak, where n is the mean number of keys per query. cuDNN 9.19 on H200, heads
# of 128, 2,048 to 32,768 positions, a causal mask: 484 to 688 TFLOP/s forward, 370 to 581 backward
# (github.com/NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results/h200_919_only_cudnn). FlashAttention-2 on
# A100 attains 0.66 in both passes together (arXiv:2307.08691; RTX cards are assumed to attain the same), cuDNN on B200
# 0.55 (arXiv:2603.05451).
ATTENTION_FORWARD = {8: 0.72, 9: 0.71, 10: 0.67}
ATTENTION_BACKWARD = {8: 0.64, 9: 0.62, 10: 0.52}
FORWARD_KEYS, BACKWARD_KEYS = 425, 650
# In a training step attention attains less than in such a short test: FlashAttention-3 on H200 521 TFLOP/s in both
# passes with 8,192 positions (447 if the backward pass counts as 2 forward passes; github.com/stas00/ml-engineering,
# insights/when-to-upgrade-gpus), where the curves above give 557.
ATTENTION_IN_STEP = 0.94
# Heads of 64 attain 0.71 to 0.77 of the rate of heads of 128 (FlashAttention-3, arXiv:2407.08608).
FULL_HEAD, HALF_HEAD_SHARE = 128, 0.74
ATTAINED_BANDWIDTH = 0.85  # 2.85 TB/s on an H100
# Kernels that reduce rows attain less: RMSNorm of cuDNN on H200 3.71 TB/s forward and 3.80 backward, of 4.8
# (github.com/NVIDIA/cudnn-frontend, benchmark/norms/results/h200).
ATTAINED_REDUCTION = 0.78
ATTAINED_HOST_LINK = 0.8
LAUNCH_SECONDS = 2e-6  # from one kernel to the next
# Rates relative to bf16: tensor cores compute float32 as TF32 at half the rate, and 8-bit integers at twice the rate.
# The peaks of FP8 are twice those of bf16; best shapes attain 1,453 TFLOP/s instead of 794 on H200, 3,432 instead of
# 1,745 on B200 (github.com/stas00/ml-engineering, insights/when-to-upgrade-gpus).
RELATIVE_RATES = {
    "float64": 1 / 32,
    "float32": 0.5,
    "int8": 2.0,
    "uint8": 2.0,
    "float8_e4m3fn": 1.83,
    "float8_e5m2": 1.83,
}


def keys_per_query(flops_per_output: float, *, backward: bool) -> float:
    """Mean number of keys per query of attention, from the FLOPs per element of its first result: two matmuls in the
    forward pass, five in the backward pass."""
    return flops_per_output / (10 if backward else 4)


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in the units of its data sheet."""

    name: str  # name of the target
    kind: str  # part of the device name that CUDA reports
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float  # dense, accumulated in float32
    link_gb_s: float  # rate of the link to the other GPUs of its host (`link_group`): NVLink, else PCIe
    network_gb_s: float  # the GPU's share of the network rate of its host
    host_link_gb_s: float  # rate of the link to host memory
    host_memory_gib: float  # the GPU's share of the memory of its host
    compute_capability: str
    cores: int  # streaming multiprocessors
    clock_ghz: float
    l2_mib: float
    link_group: int = 1024  # GPUs of a host that this link joins, by default all; larger groups use PCIe

    @property
    def memory(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def host_memory(self) -> int:
        return int(self.host_memory_gib * GIB)

    def link_among(self, neighbours: int) -> float:
        """Peak rate in GB/s of the slowest link among so many GPUs of a host."""
        return self.link_gb_s if neighbours <= self.link_group else self.host_link_gb_s

    @property
    def flops(self) -> float:
        return self.bf16_tflops * 1e12

    def matmul_rate(self, dtype: str) -> float:
        """Attained FLOP/s of large matmuls."""
        return self.flops * self._share(ATTAINED_FLOPS) * RELATIVE_RATES.get(dtype, 1.0)

    def attention_rate(self, dtype: str, keys: float, head_dim: int, *, backward: bool) -> float:
        """Attained FLOP/s of attention with this mean number of keys per query. Other fused kernels of matmuls are
        assumed to attain the same, where `keys` is the contracted width."""
        shares, half = (ATTENTION_BACKWARD, BACKWARD_KEYS) if backward else (ATTENTION_FORWARD, FORWARD_KEYS)
        share = ATTENTION_IN_STEP * self._share(shares) * keys / (keys + half)
        narrow = max(0.0, 1 - head_dim / FULL_HEAD)  # 0 for heads of 128, 1/2 for heads of 64
        share *= 1 - 2 * (1 - HALF_HEAD_SHARE) * narrow
        return self.flops * share * RELATIVE_RATES.get(dtype, 1.0)

    def _share(self, shares: Mapping[int, float]) -> float:
        """The share of the peak for this GPU; for an unknown compute capability the one of Ampere."""
        return shares.get(int(float(self.compute_capability)), shares[8])

    @property
    def memory_rate(self) -> float:
        """Attained bytes per second."""
        return self.bandwidth_gb_s * 1e9 * ATTAINED_BANDWIDTH

    @property
    def reduction_rate(self) -> float:
        """Attained bytes per second of kernels that reduce."""
        return self.bandwidth_gb_s * 1e9 * ATTAINED_REDUCTION

    @property
    def host_rate(self) -> float:
        """Attained bytes per second to host memory; the link has the same rate from host memory at the same time."""
        return self.host_link_gb_s * 1e9 * ATTAINED_HOST_LINK


_FIELDS, *_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GPUS = {gpu.name: gpu for gpu in (Gpu(**dict(zip(_FIELDS, row, strict=False))) for row in _ROWS)}

# A simulated device has a share of a few server cores; its times only compare programs with each other.
CPU = Gpu("cpu", "CPU", 16, 20, 0.2, 10, 10, 10, 16, "0.0", 1, 2.0, 1)


# Words after the name of a GPU that make it another one, and the word of a slice of a GPU.
_OTHER_GPU = r"(?! (?:Ti|SUPER|D|Laptop)\b)(?!.* MIG )"


def find(device_kind: str, memory: int | None = None) -> Gpu | None:
    """The GPU in the table whose `kind` is the longest part of a device's name; of several, the nearest to `memory`.

    >>> find("NVIDIA H100 PCIe").name, find("NVIDIA A100-SXM4-80GB", 80 * GIB).name, find("NVIDIA GeForce RTX 3080 Ti")
    ('h100-pcie-80gb', 'a100-80gb', None)
    """
    words = f" {device_kind.replace('-', ' ')} "
    matches = [gpu for gpu in GPUS.values() if re.search(rf" {gpu.kind}\b{_OTHER_GPU}", words)]
    return max(matches, key=lambda gpu: (len(gpu.kind), -abs(gpu.memory - (memory or 0))), default=None)


def reserved(devices: int, gib: float | None = None) -> int:
    """Bytes of a GPU that the compiler does not count: CUDA's context and kernels, libraries' workspaces, and with
    several devices NCCL's buffers. `gib` overrides this default. Plans and runs both subtract these bytes.

    >>> reserved(1) / GIB, reserved(8) / GIB, reserved(8, 2.5) / GIB
    (0.75, 1.5, 2.5)
    """
    if gib is None:
        gib = 0.75 if devices == 1 else 1.5
    return int(gib * GIB)
