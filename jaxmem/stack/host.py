"""What waits in host memory between a forward and a backward pass.

What N layers keep, B bytes each, costs 2 N B over the host's link. The device holds 2 B of it: what is in use, and what
was brought ahead of time. Where a layer computes longer than its bytes travel, nobody waits (Ren et al.,
arXiv:2101.06840). On CPUs there is one memory, and nothing moves.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxmem.config.names import BOUNDARY

HOST = "pinned_host"  # what jax calls it


def to_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def to_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def named(x: Any) -> Any:
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, BOUNDARY), x)
