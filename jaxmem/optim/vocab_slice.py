"""Updates an embedding or output matrix some rows at a time, with an optimizer written for a complete matrix.

A rule that sums over the complete matrix (a norm, a mean of each column) calls `UpdateContext.sums`. With slices, each
such call needs one pass over all slices to compute the sums, and a last pass applies the update. Each pass traces the
same rule; XLA removes the computations after the first unknown sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Total = Callable[[Any], Any]


class NotSeparableError(Exception):
    """Raised if a rule needs the complete matrix and cannot be computed from sums over slices."""


@dataclass
class SlicedSums:
    """The sums over a matrix that are known so far, and the contribution of the current rows to the next one."""

    known: list[Any]
    calls: int = field(default=0, init=False)
    share: Any = field(default=None, init=False)

    def __call__(self, share: Any) -> Any:
        self.calls += 1
        if self.calls <= len(self.known):
            return self.known[self.calls - 1]
        if self.calls == len(self.known) + 1:
            self.share = share
        return share  # the rest is traced but not computed


@dataclass(frozen=True)
class VocabSlice:
    """Rows of a vocabulary matrix that are updated separately."""

    shape: tuple[int, ...]  # of the whole matrix
    dim: int  # the vocabulary's
    rows: Int[Array, " rows"]  # their indices
    total: Total  # from sums over these rows to sums over all rows


def sliced_sums(update: Callable[[jax.Array, Total], Any], count: int) -> list[Any] | None:
    """All sums that `update(index of the slice, total)` needs, over `count` slices; None if the rule needs the complete
    matrix."""
    first = jnp.zeros((), jnp.int32)

    def share(j: jax.Array, known: list[Any]) -> SlicedSums:
        found = SlicedSums(known)
        update(j, found)
        return found

    def next_sums(known: list[Any]) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: share(first, known).share))
        add = lambda j, sums: jax.tree.map(jnp.add, sums, share(j, known).share)  # noqa: E731
        return jax.lax.fori_loop(0, count, add, zeros)

    passes: list[int] = []
    try:
        jax.eval_shape(lambda: passes.append(share(first, []).calls))
    except NotSeparableError:
        return None
    known: list[Any] = []
    for _ in range(*passes):
        known = [*known, next_sums(known)]
    return known
