"""Small layers, compiled for this CPU and run; then offloading, compiled for a GPU."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import models
from jaxmem.config import Decoder, load_config
from jaxmem.config.names import BOUNDARY
from jaxmem.machine.gpus import CPU
from jaxmem.models.attention import Tokens
from jaxmem.models.network import Execution
from jaxmem.models.rope import angles
from jaxmem.planning.compile import compile_program
from jaxmem.planning.hlo import total_flops
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.planning.timeline import timeline
from jaxmem.stack.apply import apply_call, stack_call
from jaxmem.stack.call import StackOptions
from jaxmem.stack.recompute_plan import recompute_plan
from jaxmem.typing import Tree
from scripts.course import Findings, common, main
from scripts.course.panels import LinePlot
from scripts.course.table import Row, Table, gib

POLICIES = ("none", "full", "sqrt", "recursive", "slots_4", "constant")
DEPTHS = (16, 64)
SMALL = {"vocab": 256, "embed": 64, "mlp": 128, "heads": 4, "kv_heads": 4, "head_dim": 16}
# Name -> policy, and the names of values that are offloaded to host memory.
OFFLOADED = {"full": ("full", ()), "full, offloaded": ("full", (BOUNDARY,)), "sqrt": ("sqrt", ())}

# The number of boundaries that a policy saves for N layers.
FORMULAS: dict[str, Callable[[int], float]] = {
    "full": lambda n: n,
    "sqrt": lambda n: 2 * math.sqrt(n),
    "recursive": lambda n: 1 + math.log2(n),
    "slots_4": lambda _: 5,
    "constant": lambda _: 2,
}


def measure(target: str, depths: Sequence[int] = DEPTHS) -> Findings:
    measured = {
        policy: {layers: backward(policy, layers, "cpu:1", SMALL, tokens=128) for layers in depths}
        for policy in POLICIES
    }
    rows = [_row(policy, by_layers, measured["none"]) for policy, by_layers in measured.items()]
    small = Table("The backward pass of small layers, compiled for this CPU and run on it", rows)
    offloaded = {name: backward(policy, 32, target, {}, 8192, host=of) for name, (policy, of) in OFFLOADED.items()}
    hosted = [
        {
            "remat": name,
            "device, GiB": gib(row["temporaries"]),
            "host, GiB": gib(row["host"]),
            "estimated, s": row["seconds"],
            "overlapped, %": 100 * row["hidden"] if row["host"] else None,
        }
        for name, row in offloaded.items()
    ]
    by_policy = {row["remat"]: row for row in rows}
    memory = f"{depths[-1]} layers, MiB"
    arithmetic = f"{depths[-1]} layers, arithmetic"
    none, root, constant = (by_policy[policy] for policy in ("none", "sqrt", "constant"))
    sizes = {
        name: [(layers, row["temporaries"] / 2**20) for layers, row in by_layers.items()]
        for name, by_layers in measured.items()
    }
    cost = {name: [(row[memory], row["CPU time, ms"])] for name, row in by_policy.items()}
    return Findings(
        [small, Table(f"32 layers of llama3-8b on {target}, 8,192 tokens, frozen weights", hosted)],
        {
            "depth": depths[-1],
            "fewer": none[memory] / root[memory],
            "more": root[arithmetic] - 1,
            "constant": constant[arithmetic],
        },
        [
            LinePlot("Memory of the backward pass", "layers", "MiB", sizes, "xy"),
            LinePlot(f"{depths[-1]} layers: memory and CPU time", "MiB", "ms", cost, "xy"),
        ],
    )


def _row(policy: str, by_layers: Mapping[int, Row], none: Mapping[int, Row]) -> Row:
    deep = max(by_layers)
    plan = recompute_plan(policy, deep)
    return {
        "remat": policy,
        "boundaries": "all activations" if policy == "none" else plan.slots if plan else deep,
        "recomputed": 0 if policy == "none" else deep + (plan.runs if plan else 0),
        **{f"{layers} layers, MiB": row["temporaries"] / 2**20 for layers, row in by_layers.items()},
        f"{deep} layers, arithmetic": by_layers[deep]["flops"] / none[deep]["flops"],
        "CPU time, ms": 1e3 * by_layers[deep]["measured"],
    }


def backward(
    policy: str,
    layers: int,
    target: str,
    shape: dict[str, int],
    tokens: int,
    *,
    trained: bool = False,
    host: tuple[str, ...] = (),
) -> Row:
    """Bytes, FLOPs and seconds of a compiled gradient on one device, and `measured` seconds if this machine is the
    target. The layers are those of llama3-8b, changed by `shape`, in bfloat16 on a GPU. Weights are frozen, so the
    temporary buffers are boundaries and one layer; `trained`: count the FLOPs with trainable weights. `host`: names of
    the values that are offloaded to host memory."""
    base = {"name": "x", "model": {"preset": "llama3-8b", **shape, "layers": layers}, "train": {"steps": 1}}
    cfg = load_config({**base, "data": {"source": "tokens", "path": "unused"}}).model
    assert isinstance(cfg, Decoder)
    aim = parse_target(target)
    dtype = jnp.dtype(jnp.float32 if aim.is_cpu else jnp.bfloat16)
    execution = Execution(dtype=dtype, stack=StackOptions(policy, host=host))
    network = nnx.eval_shape(lambda: models.build(cfg, nnx.Rngs(0), execution))
    graphdef, state = nnx.split(network)
    place = jax.sharding.SingleDeviceSharding(target_devices(aim, 1000 * aim.memory)[0])

    def loss(weights: Tree, x: jax.Array) -> jax.Array:
        network: Any = nnx.merge(graphdef, weights)
        turned = angles(jnp.zeros((1, tokens), jnp.int32), cfg.rope, cfg.head_dim)
        layer = lambda block, x, _, angles: (block(x, Tokens(angles))[0], None)  # noqa: E731
        y, _ = apply_call(stack_call(network.blocks, layer, x, None, turned, options=execution.stack))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    placed = partial(jax.ShapeDtypeStruct, dtype=dtype, sharding=place)
    arguments = jax.tree.map(lambda x: placed(x.shape), nnx.to_pure_dict(state)), placed((1, tokens, cfg.embed))

    def compiled(argnums: int | tuple[int, ...]) -> Any:
        lowered = jax.jit(jax.grad(loss, argnums)).lower(*arguments)
        return compile_program(lowered, here=aim.is_here)

    frozen = compiled(1)
    measured = None
    if aim.is_here:
        ones = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), arguments)
        measured = common.seconds(frozen.executable, *ones)
    timed = timeline(frozen.module, aim.gpu or CPU, 1, 1)
    copies = timed.host_copies
    return {
        "policy": policy,
        "layers": layers,
        "boundary": tokens * cfg.embed * dtype.itemsize,
        "temporaries": frozen.sizes["temporaries"],
        "host": frozen.host_total,
        "flops": total_flops((compiled((0, 1)) if trained else frozen).module),
        "hidden": 1.0 - copies.exposed_share if copies.seconds else None,
        "seconds": timed.seconds,
        "measured": measured,
    }


if __name__ == "__main__":
    main(__file__)
