"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

Keys and values of all heads are linear functions of one vector of `kv_rank` values per token; a head's key ends with
`rope_dim` rotated dimensions that all heads share. Values have `value_dim` dimensions, fewer than queries and keys;
they are padded with zeros for attention, which supports one size. The KV cache stores keys and padded values of all
heads.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmem.config.networks import Latent
from jaxmem.models.attention import Attention, AttentionSpec
from jaxmem.models.layers import Keys, Modules, RMSNorm, fold_keys
from jaxmem.models.linear import Linear
from jaxmem.models.network import Execution
from jaxmem.models.rope import Angles, rotate
from jaxmem.sharding.arrays import constrain

EPSILON = 1e-6  # epsilon of the norms of latent vectors, equal in all models


class LatentAttention(Attention):
    """Attention whose keys and values are computed from a latent vector per token."""

    inner = ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b")

    def __init__(self, rngs: nnx.Rngs, spec: AttentionSpec, latent: Latent, execution: Execution = Execution()):
        self.spec = spec
        self.execution = execution
        self.latent = latent
        queries = spec.heads * spec.head_dim
        if latent.q_rank is None:
            self.q = Linear(rngs, spec.embed, queries, ("embed", "heads"))
        else:
            self.q_a = Linear(rngs, spec.embed, latent.q_rank, ("embed", "rank"))
            self.q_a_norm = RMSNorm(latent.q_rank, EPSILON)
            self.q_b = Linear(rngs, latent.q_rank, queries, ("rank", "heads"))
        self.kv_a = Linear(rngs, spec.embed, latent.kv_rank + latent.rope_dim, ("embed", "rank"))
        self.kv_a_norm = RMSNorm(latent.kv_rank, EPSILON)
        per_head = spec.head_dim - latent.rope_dim + latent.value_dim
        self.kv_b = Linear(rngs, latent.kv_rank, spec.heads * per_head, ("rank", "heads"))
        self.o = Linear(rngs, spec.heads * latent.value_dim, spec.embed, ("heads", "embed"))

    def _project(
        self, modules: Modules, x: jax.Array, angles: Angles | None, keys: Keys | None
    ) -> tuple[jax.Array, ...]:
        latent = self.latent
        head_dim = self.spec.head_dim
        of_qa, of_q, of_kva, of_kvb = fold_keys(keys, 4)
        if "q" in modules:
            q = modules["q"](x, of_q)
        else:
            q = modules["q_b"](modules["q_a_norm"](modules["q_a"](x, of_qa)), of_q)
        q = self._heads(q, head_dim)
        compressed, shared = jnp.split(modules["kv_a"](x, of_kva), [latent.kv_rank], axis=-1)
        kv = modules["kv_b"](modules["kv_a_norm"](compressed), of_kvb)
        kv = self._heads(kv, latent.value_dim + head_dim - latent.rope_dim)
        k, v = jnp.split(kv, [head_dim - latent.rope_dim], axis=-1)
        shared = jnp.broadcast_to(self._rotate(shared[..., None, :], angles), (*k.shape[:-1], latent.rope_dim))
        plain, rotated = jnp.split(q, [head_dim - latent.rope_dim], axis=-1)
        q = jnp.concatenate([plain, self._rotate(rotated, angles)], axis=-1)
        k = jnp.concatenate([k, shared], axis=-1)
        v = jnp.pad(v, [(0, 0)] * 3 + [(0, head_dim - latent.value_dim)])
        return tuple(constrain(y, "batch", "time", "heads", "head_dim") for y in (q, k, v))

    def _heads(self, x: jax.Array, size: int) -> Float[Array, "batch time heads size"]:
        return constrain(x.reshape(*x.shape[:-1], -1, size), "batch", "time", "heads", "head_dim")

    def _rotate(
        self, x: Float[Array, "batch time heads rope_dim"], angles: Angles | None
    ) -> Float[Array, "batch time heads rope_dim"]:
        """Rotates pairs of neighbouring dimensions. The result has the first dimensions of all pairs first, for queries
        and keys, so the scores are the same."""
        x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        return x if angles is None else rotate(x, angles)
