"""The methods of communication of attention over `mesh.context`: their bytes and their estimated seconds."""

import math
from typing import Literal

from jaxmem.config import Decoder, Precision
from jaxmem.config.mesh import head_group_counts, unsupported_by_ring
from jaxmem.kernels.fused_attention.arguments import pairs
from jaxmem.kernels.fused_attention.context import METHODS
from jaxmem.kernels.support import Request
from jaxmem.sharding.share import DeviceShare

# Rates of an H100, to compare methods; the ratios of other GPUs are similar. FLOP/s of kernels: cuDNN, and Triton (as
# FlashAttention-2) from arXiv:2407.08608. Bytes/s of memory, of NVLink within a host, and of a 400 Gb/s network.
_FLOPS = {"cudnn": 5.3e14, "triton": 3.3e14}
_PLAIN, _MEMORY, _NVLINK, _NETWORK = 5e13, 3.3e12, 4.5e11, 5e10
_HOST = 8  # GPUs of a host


def context_methods(share: DeviceShare, head_groups: int | Literal["auto"]) -> list[str]:
    """The methods of communication that support this model and mesh. Kernels are checked later. `head_groups`: the
    setting `memory.head_groups`."""
    model = share.model
    named = share.mesh.context_method
    if named != "auto" or not isinstance(model, Decoder):
        return [named]
    counts = head_group_counts(share.heads, share.kv_heads, share.mesh.context)
    supported = {
        "ulysses": bool(counts) and head_groups in ("auto", *counts),
        "ring": unsupported_by_ring(model, share.mesh) is None,
    }
    return [method for method in METHODS if supported[method]]


def context_traffic(share: DeviceShare, precision: Precision, method: str) -> tuple[float, float]:
    """Elements in the compute dtype that a device sends for attention, per layer and sequence: (forward, backward)."""
    model = share.decoder
    devices = share.mesh.context
    time = share.row_length / devices
    queries = time * share.heads * model.head_dim
    keys = 2 * time * share.kv_heads * model.head_dim
    if method == "ulysses":
        sent = (2 * queries + keys * devices / math.gcd(share.kv_heads, devices)) * (devices - 1) / devices
        return sent, 2 * sent
    if model.window is not None:
        sent = min((model.window - 1) / time, devices - 1) * keys
        return sent, sent
    sent = (devices - 1) * keys
    widening = 1 if precision.compute == "float32" else 2  # float32 gradients
    return sent, sent + widening * devices * keys


def context_seconds(share: DeviceShare, precision: Precision, call: Request, method: str, implementation: str) -> float:
    """The estimated time of attention in one layer, forward and backward, to compare methods.

    Args:
      call: attention of complete sequences with the heads of one device.
      method: the communication over `context`.
      implementation: the kernel that computes it.
    """
    model = share.decoder
    devices = share.mesh.context
    numbers = call.batch * call.heads * call.dim
    pairs_of_layers = [pairs(call.queries, call.keys, causal=True, window=window) for window in model.windows]
    visible = sum(pairs_of_layers) / len(pairs_of_layers)
    compute = 14 * numbers * visible / devices / _FLOPS.get(implementation, _PLAIN)
    link = _NVLINK if devices * share.mesh.tensor <= _HOST else _NETWORK
    width = 4 if call.dtype == "float32" else 2
    sent = call.batch * sum(context_traffic(share, precision, method)) * width / link
    if method == "ulysses" or model.window is not None:
        return compute + sent
    # The outputs for blocks of keys are summed in float32: each block reads two arrays and writes one.
    merged = 6 * 4 * numbers * (devices - 1) * call.queries / devices / _MEMORY
    return merged + max(compute, sent)
