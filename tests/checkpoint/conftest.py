"""States that lie on several devices, every bit pattern in them, and their bits."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    step: jax.Array
    params: dict[str, Any]
    opt_state: Any


def mesh(rows: int, columns: int) -> Mesh:
    devices = np.asarray(jax.devices()[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def abstract(on: Mesh, width: int = 32, dtype: Any = jnp.bfloat16) -> State:
    """What the state looks like and lies on: [layer, embed, mlp] split over both axes, vectors over one."""
    params = {
        "layers": {
            "up": jax.ShapeDtypeStruct((3, 16, width), dtype),
            "norm": jax.ShapeDtypeStruct((3, 16), jnp.float32),
        },
        "embed": jax.ShapeDtypeStruct((64, 16), jnp.float32),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = State(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(tx.init, params))
    specs = {0: PartitionSpec(), 2: PartitionSpec(None, "fsdp"), 3: PartitionSpec(None, "fsdp", "tensor")}
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, specs[len(x.shape)])), state
    )


def filled(shapes: Any, seed: int = 0) -> Any:
    """Every bit pattern, NaNs included."""
    rng = np.random.default_rng(seed)

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        bits = rng.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8)
        return jax.device_put(bits.view(x.dtype).reshape(x.shape), x.sharding)

    return jax.tree.map(fill, shapes)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
