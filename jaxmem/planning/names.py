"""What layers call their values: the bytes that each takes where it is kept, and the arithmetic of making it again.

From one trace of a layer, in a second; nothing is compiled. Made again is a value from those with names that it comes
from, so that what keeps several of them spares the sum of their products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table

from jaxmem.config import Config
from jaxmem.config.devices import for_devices
from jaxmem.planning.layers import layers_of
from jaxmem.planning.share import rows_of
from jaxmem.planning.targets import local_target, parse_target
from jaxmem.planning.text import readable


@dataclass(frozen=True)
class Named:
    name: str
    layers: int
    bytes: int  # of one layer, for a device's rows of a micro-batch
    flops: int

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "layers": self.layers, "bytes_per_layer": self.bytes, "flops_per_layer": self.flops}


def names(cfg: Config, target: str | None = None) -> list[Named]:
    """For a device of a target, by default of this machine."""
    aim = local_target(jax.devices()) if target is None else parse_target(target)
    cfg = for_devices(cfg, aim.count)
    whole = cfg.memory.model_copy(update={"mlp_chunk": "auto", "head_groups": "auto"})  # every name is there
    rows = rows_of(cfg)
    return [
        Named(name, layer.count, round(rows * layer.bytes_of(name)), round(rows * layer.products_of(name)))
        for layer in layers_of(cfg.model_copy(update={"memory": whole}), "cpu" if aim.is_cpu else "gpu")
        for name in layer.names
    ]


def names_table(found: Sequence[Named]) -> Table:
    drawn = Table(title=r"Values of one layer on one device, for memory.remat: {save: \[names]}", title_justify="left")
    for column in ("", "kept", "of all layers", "FLOPs to make it again"):
        drawn.add_column(column, justify="right" if column else "left", no_wrap=True)
    for one in found:
        drawn.add_row(one.name, readable(one.bytes), readable(one.bytes * one.layers), f"{one.flops:.3g}")
    return drawn
