"""Matmuls of rows with the matrix of the group of each row, e.g. of tokens with the weights of an expert.

`map_groups` applies a function of weights and rows, such as the MLP of an expert, to one block of rows after the other,
in plain JAX: no result of its matmuls is stored for all rows. `triton.grouped_matmul` is one matmul of all rows, fused:
all tiles of all groups run at once. The temporary arrays of neither grow with the number of groups. `map_chunks` is for
devices that compute a part of the groups.

`jax.lax.ragged_dot` on GPUs writes arrays of [groups, rows, width] instead (jax 0.10), and tokamax 0.0.12 refuses its
`ragged_dot` where no GPU is attached, so that no plan could compile it.
"""

from .blocks import Groups, map_groups, rows_of_groups, sort_rows, sum_of_groups
from .chunks import map_chunks

__all__ = ["Groups", "map_chunks", "map_groups", "rows_of_groups", "sort_rows", "sum_of_groups"]
