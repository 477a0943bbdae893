"""Matmuls of rows with the matrix of the group of each row, e.g. of tokens with the weights of an expert.

`map_groups` applies a function of weights and rows, such as the MLP of an expert, so that no result of its matmuls is
stored for all rows. Its temporary arrays do not grow with the number of groups.
"""

from .blocks import Groups, map_groups, sort_rows

__all__ = ["Groups", "map_groups", "sort_rows"]
