"""Activation checkpointing: what N layers save for the backward pass under each policy, and what they recompute.

A layer's backward pass needs what its forward pass computed. Saved for all layers that is N times a layer; with only
the layers' inputs (boundaries) saved it is N boundaries and one layer, for one more forward pass; with sqrt N or log N
boundaries, or one, layers run more often. Boundaries may also be offloaded to host memory and fetched while other
layers compute. (Chen et al., arXiv:1604.06174; Griewank and Walther, ACM TOMS 26(1), 2000.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import models
from jaxmem.config import Decoder, load_config
from jaxmem.config.names import BOUNDARY
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Lines
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Row, Table
from jaxmem.machine import gpus
from jaxmem.machine.gpus import CPU
from jaxmem.models.attention import Tokens
from jaxmem.models.rope import angles
from jaxmem.planning import Target
from jaxmem.planning.compile import compile_all
from jaxmem.planning.hlo import total_flops
from jaxmem.planning.targets import local_target, parse_target, target_devices
from jaxmem.planning.timeline import timeline
from jaxmem.stack import StackOptions, apply_stack
from jaxmem.stack.schedule import schedule

TARGET = "h100-80gb"
POLICIES = ("none", "full", "sqrt", "recursive", "slots_4", "constant")
DEPTHS = (16, 64)
SMALL = {"vocab": 256, "embed": 64, "mlp": 128, "heads": 4, "kv_heads": 4, "head_dim": 16}
OFFLOADED = (("full", ()), ("full", (BOUNDARY,)), ("sqrt", ()))  # policies, and what is offloaded to host memory

# Boundaries that a policy saves of N layers.
FORMULAS: dict[str, Callable[[int], float]] = {
    "full": lambda n: n,
    "sqrt": lambda n: 2 * math.sqrt(n),
    "recursive": lambda n: 1 + math.log2(n),
    "slots_4": lambda _: 5,
    "constant": lambda _: 2,
}


def measure(
    target: str | None = None,
    policies: Sequence[str] = POLICIES,
    depths: Sequence[int] = DEPTHS,
    offloaded: Sequence[tuple[str, tuple[str, ...]]] = OFFLOADED,
) -> Findings:
    """Small layers, compiled for this CPU and run; then offloading, compiled for a GPU."""
    aim, deep = target or TARGET, depths[-1]
    found = {
        (policy, layers): backward(policy, layers, "cpu:1", SMALL, 128, arithmetic=False, runs=layers == deep)
        for layers in depths
        for policy in policies
    }
    rows = [_recomputed(policy, deep, found[policy, deep], found[policies[0], deep]) for policy in policies]
    buffers = [
        {"remat": policy} | {f"{layers} layers": found[policy, layers]["temporaries"] for layers in depths}
        for policy in policies
    ]
    hosted = [
        _hosted(backward(name, 32, aim, {}, 8192, arithmetic=False, host=host, runs=True)) for name, host in offloaded
    ]
    by_name = {row["remat"]: row for row in rows}
    saved = {row["remat"]: row[f"{deep} layers"] for row in buffers}
    in_mib = {
        policy: [(layers, found[policy, layers]["temporaries"] / 2**20) for layers in depths] for policy in policies
    }
    cost = {row["remat"]: [(saved[row["remat"]] / 2**20, row["CPU time"] * 1e3)] for row in rows}
    formats = {"device": "GiB", "host": "GiB", "estimated": "s", "hidden": ".0%", "measured": "s"}
    return Findings(
        [
            Table(f"{deep} small layers", rows, {"arithmetic": ".2f", "CPU time": "ms"}),
            Table(
                "Memory of the backward pass, compiled for this CPU", buffers, {f"{n} layers": "MiB" for n in depths}
            ),
            Table(f"32 layers of llama3-8b on {aim}, 8,192 tokens, frozen weights", hosted, formats),
        ],
        "Boundaries: layer inputs that are saved, with the one in use. Recomputed: layers run after the first forward"
        " pass. Weights are frozen, so without recompute there are two passes of arithmetic, and each share is larger"
        f" than in training. With about 2 sqrt N boundaries {deep} layers need {saved['none'] / saved['sqrt']:.0f}"
        f" times fewer bytes than with everything saved, for {by_name['sqrt']['arithmetic'] - 1:.0%} more arithmetic;"
        f" with one, {by_name['constant']['arithmetic']:.1f} times the arithmetic. Offloaded boundaries leave"
        f" {hosted[1]['device'] / 2**30:.2f} GiB on the device in place of {hosted[0]['device'] / 2**30:.2f} and"
        f" recompute nothing more; {hosted[1]['hidden']:.0%} of the transfers are overlapped with computation.",
        [
            Lines("Memory of the backward pass", "layers", "MiB", in_mib, "xy", {n: str(n) for n in depths}),
            Lines(f"{deep} layers: memory and CPU time", "MiB", "ms", cost, "xy"),
        ],
    )


def _recomputed(policy: str, layers: int, found: Row, none: Row) -> Row:
    plan = schedule(policy, layers)
    return {
        "remat": policy,
        "boundaries": "all activations" if policy == "none" else plan.slots if plan else layers,
        "recomputed": 0 if policy == "none" else layers + (plan.runs if plan else 0),
        "arithmetic": found["flops"] / none["flops"],
        "CPU time": found["measured"],
    }


def _hosted(row: Row) -> Row:
    return {
        "remat": f"{row['policy']}, offloaded" if row["host"] else row["policy"],
        "device": row["temporaries"],
        "host": row["host"],
        "estimated": row["seconds"],
        "hidden": row["hidden"] if row["host"] else None,
        "measured": row["measured"],
    }


def backward(
    policy: str,
    layers: int,
    target: str,
    shape: dict[str, int],
    time: int,
    *,
    arithmetic: bool = True,
    host: tuple[str, ...] = (),
    runs: bool = False,
) -> Row:
    """Bytes, FLOPs and seconds of a gradient on one device, compiled, and `measured` seconds where it `runs` (a CPU, or
    a GPU of this machine). bfloat16 on a GPU. Layers of llama3-8b, changed by `shape`. Without `arithmetic` the FLOPs
    are those of frozen weights too. `host`: names of the values that are offloaded to host memory."""
    base = {"name": "x", "model": {"preset": "llama3-8b", **shape, "layers": layers}, "train": {"steps": 1}}
    cfg = load_config({**base, "data": {"source": "tokens", "path": "unused"}}).model
    assert isinstance(cfg, Decoder)
    aim = _here(parse_target(target)) if runs else parse_target(target)
    runs = runs and aim.is_here
    dtype = jnp.dtype(jnp.float32 if aim.is_cpu else jnp.bfloat16)
    execution = models.Execution(dtype=dtype, stack=StackOptions(policy, host=host))
    network = nnx.eval_shape(lambda: models.build(cfg, nnx.Rngs(0), execution))
    graphdef, state = nnx.split(network)
    place = jax.sharding.SingleDeviceSharding(target_devices(aim, 1000 * aim.memory)[0])

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        network: Any = nnx.merge(graphdef, weights)
        turned = angles(jnp.zeros((1, time), jnp.int32), cfg.rope, cfg.head_dim)
        layer = lambda block, x, _, angles: (block(x, Tokens(angles))[0], None)  # noqa: E731
        y, _ = apply_stack(network.blocks, layer, x, None, turned, options=execution.stack)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    placed = partial(jax.ShapeDtypeStruct, dtype=dtype, sharding=place)
    arguments = jax.tree.map(lambda x: placed(x.shape), nnx.to_pure_dict(state)), placed((1, time, cfg.embed))

    # With frozen weights the temporary buffers are boundaries and one layer; the arithmetic is that of training them.
    def compiled(argnums: int | tuple[int, ...]) -> Any:
        lowered = jax.jit(jax.grad(loss, argnums)).lower(*arguments)
        return compile_all(lowered, {}, here=aim.is_here, code=runs)[0]

    frozen = compiled(1)
    trained = compiled((0, 1)) if arithmetic else frozen
    paced = timeline(frozen.module, aim.gpu or CPU, 1, 1)
    return {
        "policy": policy,
        "layers": layers,
        "boundary": time * cfg.embed * dtype.itemsize,
        "temporaries": frozen.sizes["temporaries"],
        "host": frozen.host_total,
        "flops": total_flops(trained.module),
        "hidden": paced.overlapped_host_share,
        "seconds": paced.seconds,
        "measured": _time(trained.executable, arguments) if runs else None,
    }


def _here(aim: Target) -> Target:
    """This machine's first device if it is the target's kind of GPU."""
    first = jax.devices()[0]
    is_one = aim.gpu is not None and first.platform == "gpu" and gpus.find(first.device_kind) == aim.gpu
    return local_target([first]) if is_one else aim


def _time(run: Any, arguments: Any) -> float:
    return common.seconds(
        run, *jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), arguments)
    )
