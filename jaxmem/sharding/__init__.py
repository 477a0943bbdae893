"""How arrays are sharded: one table from logical axes to mesh axes for each role of an array.

A weight names its logical axes once, where it is declared (`("embed", "mlp")`). `ShardingTables` lists, for each role,
the mesh axes that shard each logical axis. Data parallelism, ZeRO 1-3 (Rajbhandari et al., arXiv:1910.02054), hybrid
sharding and tensor parallelism (Shoeybi et al., arXiv:1909.08053) are different tables, not different code; XLA's
partitioner derives the communication. An array takes 1/F of its bytes on each of F devices of `fsdp` if the table of
its role names `fsdp`.

    share.py      the share of one device: rows, tokens, heads, vocabulary
    table.py      logical axes, roles, ZeRO stages as tables
    layout.py     a mesh with its tables: the sharding of an array
    arrays.py     sharding constraints and communication along a mesh axis
    gathering.py  weights from storage to compute, and gradients back
    weights.py    stored weights, the arrays that receive their gradients, and how new weights are stored
    leaves.py     how optimizer state relates to its parameter, and operations on its shards
    host.py       host memory
    trees.py      parts of trees of parameters, axes and state

No other package uses PartitionSpec. Models call `constrain` and `gather`, which do nothing outside of `with layout:`,
so a model also runs in a custom training loop.
"""
