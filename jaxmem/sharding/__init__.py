"""How arrays lie on devices: one table from logical axes to mesh axes.

A weight names its dimensions once, where it is declared (`("embed", "mlp")`). A `Rules` object
says, for each role an array plays, which mesh axes split which logical axis. Data parallelism,
ZeRO 1-3 (Rajbhandari et al., arXiv:1910.02054), hybrid sharding and tensor parallelism
(Shoeybi et al., arXiv:1909.08053) are different tables, not different code; XLA's partitioner
derives the collectives. With P parameters over F devices of `fsdp`, the bytes of an array in
a role fall by F exactly where its table names `fsdp`.

This is the only room that mentions PartitionSpec. Models call `constrain` and `gather`; both do
nothing outside `with layout:`, so a model also runs in anyone's own loop.
"""

from jaxmem.sharding.arrays import (
    constrain,
    each_part,
    groups,
    kept_by_stages,
    on_each_device,
    rotate,
    row_major,
    split_first,
)
from jaxmem.sharding.gathered import ENOUGH, GATHERED, axes_at_rest, gather, gather_for, whole
from jaxmem.sharding.layout import Layout, along, current, layout_for
from jaxmem.sharding.table import (
    ALSO,
    IF_EVEN,
    RESTING,
    USUAL,
    Axes,
    Role,
    Rules,
    Table,
    is_axes,
    named,
    rules,
    rules_of,
    splits,
)

__all__ = [
    "ALSO",
    "ENOUGH",
    "GATHERED",
    "IF_EVEN",
    "RESTING",
    "USUAL",
    "Axes",
    "Layout",
    "Role",
    "Rules",
    "Table",
    "along",
    "axes_at_rest",
    "constrain",
    "current",
    "each_part",
    "gather",
    "gather_for",
    "groups",
    "is_axes",
    "kept_by_stages",
    "layout_for",
    "named",
    "on_each_device",
    "rotate",
    "row_major",
    "rules",
    "rules_of",
    "split_first",
    "splits",
    "whole",
]
