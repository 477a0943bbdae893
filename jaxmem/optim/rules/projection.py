"""Low-rank projections of a matrix, by matmuls only.

The smaller dimension is projected, so [m, n] becomes [rank, n] or [m, rank]; for a square matrix it is the first
(input) dimension, as in galore-torch and apollo-torch. Sharding is preserved: the basis is sharded like the projected
dimension, and the rank dimension of the projected matrix over the same mesh axes (`projected` in the sharding table).
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.optim.layers import ParameterSpec
from jaxmem.sharding.arrays import constrain
from jaxmem.sharding.table import if_even

PROJECTED = "projected"
EXACT = jax.lax.Precision.HIGHEST
ROUNDING_ERROR = 1e-6  # relative error of float32 sums; added to a Gram matrix so that its Cholesky factor exists
RANDOM_SHARE = 0.1  # share of random directions at the start of a refresh


@dataclass(frozen=True)
class Side:
    """The dimension of a matrix that is projected (`projected_dim`), and the rank that replaces it."""

    spec: ParameterSpec
    rank: int

    @property
    def projected_dim(self) -> int:
        return 0 if self.spec.shape[0] <= self.spec.shape[1] else 1

    @property
    def basis_shape(self) -> tuple[int, int]:
        return self.spec.shape[self.projected_dim], self.rank

    @property
    def basis_spec(self) -> ParameterSpec:
        axis = self.spec.axes[self.projected_dim]
        dim = self.spec.dims[self.projected_dim]
        return ParameterSpec(self.basis_shape, self.spec.dtype, (axis, PROJECTED), (dim, PROJECTED))

    @property
    def projected_spec(self) -> ParameterSpec:
        """The spec of the projected matrix for the inner optimizer."""

        def replace(values: tuple, new: object) -> tuple:
            return (*values[: self.projected_dim], new, *values[self.projected_dim + 1 :])

        spec = self.spec
        return dataclasses.replace(
            spec,
            shape=replace(spec.shape, self.rank),
            axes=replace(spec.axes, PROJECTED),
            dims=replace(spec.dims, PROJECTED),
        )

    def project(self, basis: jax.Array, g: jax.Array) -> jax.Array:
        """The projected gradient: the dimension `projected_dim` becomes the rank."""
        low = _matmul(basis.T, g) if self.projected_dim == 0 else _matmul(g, basis)
        return self._as_state(low, self.projected_spec)

    def project_back(self, basis: jax.Array, low: jax.Array) -> jax.Array:
        return _matmul(basis, low) if self.projected_dim == 0 else _matmul(low, basis.T)

    def find_basis(self, g: jax.Array, start: jax.Array, key: jax.Array) -> jax.Array:
        """The basis of the leading directions of a gradient, starting from an old basis."""
        basis = range_finder(g if self.projected_dim == 0 else g.T, start, key)
        return self._as_state(basis, self.basis_spec)

    def _as_state(self, x: jax.Array, spec: ParameterSpec) -> jax.Array:
        if not any(self.spec.axes):
            return x
        return constrain(x, *(if_even(a) if a == PROJECTED else a for a in spec.axes), role="optimizer")


def projected_side(spec: ParameterSpec, rank: int | None, project_embeddings: bool) -> Side | None:
    """The side of a hidden matrix (with `project_embeddings`, also of an embedding or output matrix) that is projected.
    None for other weights, for routers, whose few columns would lose most experts, and if the rank (default: a quarter
    of the smaller dimension) is not below the smaller dimension."""
    is_embedding = spec.is_matrix and spec.vocab_dim is not None
    if not (spec.is_hidden_matrix or (is_embedding and project_embeddings)) or "router" in spec.axes:
        return None
    rank = max(1, min(spec.shape) // 4) if rank is None else rank
    return Side(spec, rank) if rank < min(spec.shape) else None


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def range_finder(g: jax.Array, start: jax.Array, key: jax.Array) -> jax.Array:
    """An orthonormal basis [m, rank] of approximately the leading left singular vectors of g [m, n].

    Two power iterations (Halko et al., arXiv:0909.4061) from the old basis and some random directions. As long as the
    leading directions do not change, the basis does not either, and the moments stay valid; the random directions find
    new ones. About 10 m n rank FLOPs.

    Without a gradient (an expert without tokens) the basis stays near the old one: a basis of zeros would not move the
    weight until the next refresh.
    """
    norm = jnp.linalg.norm(g)
    g = g / jnp.maximum(norm, 1e-30)  # the fourth power of small gradients would underflow
    random = jax.random.normal(key, start.shape, jnp.float32) * g.shape[0] ** -0.5
    basis = start.astype(jnp.float32) + RANDOM_SHARE * random
    basis = orthonormal(jnp.where(norm > 0, g @ (g.T @ basis), basis))
    for _ in range(2):
        basis = orthonormal(jnp.where(norm > 0, g @ orthonormal(g.T @ basis), basis))
    return basis


def orthonormal(x: jax.Array) -> jax.Array:
    """Orthonormalizes columns in their order, by shifted Cholesky-QR3, which is stable for any x (Fukaya et al.,
    arXiv:1809.11085). Only a rank x rank matrix is factored."""
    for _ in range(3):
        gram = jnp.matmul(x.T, x, precision=EXACT)
        size = jnp.trace(gram)
        unit = jnp.eye(len(gram), dtype=gram.dtype)
        factor = jnp.linalg.cholesky(gram + (ROUNDING_ERROR * size + 1e-30) * unit)
        inverse = jax.lax.linalg.triangular_solve(factor, unit, left_side=True, lower=True)
        x = jnp.matmul(x, inverse.T, precision=EXACT)
    return x


def random_projection(key: jax.Array, size: int, rank: int) -> jax.Array:
    """A random normal matrix [size, rank] that preserves norms on average (Johnson and Lindenstrauss)."""
    return jax.random.normal(key, (size, rank), jnp.float32) * rank**-0.5
