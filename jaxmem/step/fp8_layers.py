"""The linear layers whose matmuls are in FP8 (`precision.compute: fp8`)."""

from typing import Any

from flax import nnx

from jaxmem.config import Precision
from jaxmem.config.names import split_stack
from jaxmem.errors import UserError, nearest
from jaxmem.models.fp8 import MIN_CAPABILITY, MXFP8_MAJOR
from jaxmem.models.linear import Linear

OUTPUT = "head"  # never in FP8: a decoder's logits are also computed in slices of this layer's weight


def use_fp8(network: Any, precision: Precision, capability: int | None) -> None:
    """Sets the scaling of the layers that `precision.fp8_layers` matches, in place. `capability`: that of the GPU (90
    for 9.0), or None for a CPU, which emulates FP8."""
    if capability is not None and capability < MIN_CAPABILITY:
        given = f"precision.compute=fp8 requires compute capability 8.9, not {capability / 10:.1f}"
        raise UserError(f"{given}; use precision.compute=bfloat16")
    if capability is not None and capability // 10 != MXFP8_MAJOR and precision.fp8_scaling == "mxfp8":
        given = f"precision.fp8_scaling=mxfp8 requires compute capability {MXFP8_MAJOR}.x, not {capability / 10:.1f}"
        raise UserError(f"{given}; use precision.fp8_scaling=tensor or row")
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(network)}
    layers = {split_stack(name)[0]: module for name, module in modules.items() if isinstance(module, Linear)}
    for pattern in precision.fp8_layers:
        matched = {name for name in layers if precision.replace(fp8_layers=(pattern,)).is_fp8(name)}
        if not matched:
            raise UserError(f"precision.fp8_layers: {pattern} matches no linear layer{nearest(pattern, layers)}")
        if matched == {OUTPUT}:
            given = f"precision.fp8_layers: {pattern} matches only the output layer, which FP8 does not support"
            raise UserError(f"{given}; use patterns of other layers, for example *blocks.*")
    for name, module in modules.items():
        if isinstance(module, Linear) and name != OUTPUT and precision.is_fp8(split_stack(name)[0]):
            module.scaling = precision.fp8_scaling
