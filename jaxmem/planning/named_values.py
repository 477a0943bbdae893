"""The values that `memory.remat: {save: [names]}` can save, with the bytes and FLOPs of each."""

from dataclasses import dataclass

import jax

from jaxmem.config import Config
from jaxmem.config.devices import for_devices
from jaxmem.estimate.layers import layers_of
from jaxmem.planning.targets import local_target, parse_target
from jaxmem.sharding.share import share_of


@dataclass(frozen=True)
class NamedValue:
    """A value of a layer that `memory.remat: {save: [names]}` can save."""

    name: str
    layers: int
    bytes_per_layer: int  # bytes for the sequences of a micro-batch on one device
    flops_per_layer: int  # FLOPs to recompute the value from other named values


def named_values(cfg: Config, target: str | None = None) -> list[NamedValue]:
    """The named values on one device of a target (by default this machine), from one trace of a layer."""
    aim = local_target(jax.devices()) if target is None else parse_target(target)
    cfg = for_devices(cfg, aim.count)
    cfg = cfg.replace(memory={"mlp_chunk": "auto", "head_groups": "auto"})  # chunks hide some names
    rows = share_of(cfg).rows
    return [
        NamedValue(name, layer.count, round(rows * layer.bytes_of(name)), round(rows * layer.flops_of(name)))
        for layer in layers_of(cfg, aim.platform)
        for name in dict.fromkeys(operation.name for operation in layer.operations if operation.name)
    ]
