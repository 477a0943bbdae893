"""How arrays are sharded: one table from logical axes to mesh axes for each role of an array.

A weight names its logical axes once, where it is declared (`("embed", "mlp")`). `Rules` lists, for each role, the mesh
axes that shard each logical axis. Data parallelism, ZeRO 1-3 (Rajbhandari et al., arXiv:1910.02054), hybrid sharding
and tensor parallelism (Shoeybi et al., arXiv:1909.08053) are different tables, not different code; XLA's partitioner
derives the communication. An array takes 1/F of its bytes on each of F devices of `fsdp` if the table of its role names
`fsdp`.

    table.py      logical axes, roles, ZeRO stages as tables
    layout.py     a mesh with its tables: the sharding of an array
    arrays.py     sharding constraints and communication along a mesh axis
    gathering.py  weights from storage to compute, and gradients back
    storage.py    how new weights are stored
    weights.py    stored weights and the arrays that receive their gradients
    leaves.py     how optimizer state relates to its parameter
    host.py       host memory

No other package uses PartitionSpec. Models call `constrain` and `gather`, which do nothing outside of `with layout:`,
so a model also runs in a custom training loop.
"""

from jaxmem.lazy import lazy_names

_MODULES = {
    "Axes": "table",
    "Axis": "table",
    "DEFAULT_TABLE": "table",
    "GATHERED": "gathering",
    "Layout": "layout",
    "MIN_TOKENS_PER_ROW": "gathering",
    "Role": "table",
    "Rules": "table",
    "STORAGE_AXES": "table",
    "Table": "table",
    "assign_mesh_axes": "table",
    "axis_name": "table",
    "constrain": "arrays",
    "current": "layout",
    "first_dim_sharding": "layout",
    "gather": "gathering",
    "gather_quantized": "gathering",
    "gather_with_input": "gathering",
    "if_even": "table",
    "is_axes": "table",
    "layout_for": "layout",
    "make_rules": "table",
    "map_shards": "arrays",
    "per_device": "arrays",
    "rotate": "arrays",
    "row_major": "arrays",
    "row_major_in_stages": "arrays",
    "rules_for": "table",
    "shard_first_dim": "arrays",
    "stored_axes": "gathering",
    "vmap_groups": "arrays",
}
__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
