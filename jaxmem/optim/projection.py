"""Projections of a matrix to few rows or columns, by products of matrices alone.

The smaller dimension is projected away, the larger is kept, so [m, n] becomes [rank, n] or [m, rank]; of a square
matrix the first, which counts what goes in, as in galore-torch and apollo-torch. What a mesh splits stays split: the
basis lies as the dimension that it stands for, and of the projected matrix the new dimension takes the mesh axes that
went with the old one (`projected` in the table of rules).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.optim.by_layer import Leaf
from jaxmem.sharding import constrain, if_even

PROJECTED = "projected"
EXACT = jax.lax.Precision.HIGHEST
ROUNDING = 1e-6  # of float32 sums, as a share: what is added to a Gram matrix so that its factor exists
FRESH = 0.1  # share of random directions in the beginning of a search


@dataclass(frozen=True)
class Side:
    """Which dimension of a matrix is projected away, and to what."""

    leaf: Leaf
    rank: int

    @property
    def away(self) -> int:
        return 0 if self.leaf.shape[0] <= self.leaf.shape[1] else 1

    @property
    def basis_shape(self) -> tuple[int, int]:
        return self.leaf.shape[self.away], self.rank

    @property
    def basis(self) -> Leaf:
        axis, dim = self.leaf.axes[self.away], self.leaf.dims[self.away]
        return Leaf(self.basis_shape, self.leaf.dtype, (axis, PROJECTED), (dim, PROJECTED))

    @property
    def low(self) -> Leaf:
        """The projected matrix as what an inner optimizer sees."""

        def replaced(values: tuple, new: object) -> tuple:
            return (*values[: self.away], new, *values[self.away + 1 :])

        leaf = self.leaf
        return dataclasses.replace(
            leaf,
            shape=replaced(leaf.shape, self.rank),
            axes=replaced(leaf.axes, PROJECTED),
            dims=replaced(leaf.dims, PROJECTED),
        )

    def project(self, basis: jax.Array, g: jax.Array) -> jax.Array:
        """[away, kept] or [kept, away] to rank in the place of `away`."""
        low = _product(basis.T, g) if self.away == 0 else _product(g, basis)
        return self._placed(low, self.low)

    def back(self, basis: jax.Array, low: jax.Array) -> jax.Array:
        return _product(basis, low) if self.away == 0 else _product(low, basis.T)

    def find(self, g: jax.Array, start: jax.Array, key: jax.Array) -> jax.Array:
        """The basis of what is largest in a gradient, beginning from an old one."""
        found = range_finder(g if self.away == 0 else g.T, start, key)
        return self._placed(found, self.basis)

    def _placed(self, x: jax.Array, leaf: Leaf) -> jax.Array:
        if not any(self.leaf.axes):
            return x
        return constrain(x, *(if_even(a) if a == PROJECTED else a for a in leaf.axes), role="optimizer")


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def range_finder(g: jax.Array, start: jax.Array, key: jax.Array) -> jax.Array:
    """An orthonormal basis [m, rank] of nearly the leading left singular vectors of g [m, n].

    Two power iterations (Halko et al., arXiv:0909.4061) from the old basis and a share of random directions: where the
    leading directions stay, so does the basis, and what was averaged in it keeps its meaning; new directions are
    found through the random share. About 10 m n rank FLOPs.
    """
    g = g / jnp.maximum(jnp.linalg.norm(g), 1e-30)  # or squares of squares of small gradients are zero
    random = jax.random.normal(key, start.shape, jnp.float32) * g.shape[0] ** -0.5
    basis = orthonormal(g @ (g.T @ (start.astype(jnp.float32) + FRESH * random)))
    for _ in range(2):
        basis = orthonormal(g @ orthonormal(g.T @ basis))
    return basis


def orthonormal(x: jax.Array) -> jax.Array:
    """Columns made orthonormal, in their order: Cholesky-QR, three times with a shift, so that any x will do
    (Fukaya et al., arXiv:1809.11085). The tall matrix is only multiplied; what is factored is rank x rank."""
    for _ in range(3):
        gram = jnp.matmul(x.T, x, precision=EXACT)
        size = jnp.trace(gram)
        unit = jnp.eye(len(gram), dtype=gram.dtype)
        factor = jnp.linalg.cholesky(gram + (ROUNDING * size + 1e-30) * unit)
        inverse = jax.lax.linalg.triangular_solve(factor, unit, left_side=True, lower=True)
        x = jnp.matmul(x, inverse.T, precision=EXACT)
    return x


def random_projection(key: jax.Array, size: int, rank: int) -> jax.Array:
    """[size, rank] normal numbers that keep lengths in the mean (Johnson and Lindenstrauss)."""
    return jax.random.normal(key, (size, rank), jnp.float32) * rank**-0.5
