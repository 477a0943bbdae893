"""What N layers hold for the backward pass under each recomputation policy, and what they compute again.

A layer goes back through what it made on its way forward. Kept of all layers that is N times a layer; kept of none but
their boundaries it is N boundaries and one layer, for one more forward pass; with sqrt N or log N boundaries, or one,
layers run again more often. Boundaries may also wait in host memory, and come back while other layers compute.
(Chen et al., arXiv:1604.06174; Griewank and Walther, ACM TOMS 26(1), 2000.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.config import Decoder, load_config
from jaxmem.config.names import BOUNDARY
from jaxmem.lab.tour import timed
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxmem.planning import Target

TARGET = "h100-80gb"
POLICIES = ("none", "full", "sqrt", "recursive", "slots_4", "constant")
DEPTHS = (16, 64)
SMALL = {"vocab": 256, "embed": 64, "mlp": 128, "heads": 4, "kv_heads": 4, "head_dim": 16}
ON_HOST = (("full", ()), ("full", (BOUNDARY,)), ("sqrt", ()))  # policies, and what waits in host memory

# Boundaries that a policy keeps of N layers.
FORMULAS: dict[str, Callable[[int], float]] = {
    "full": lambda n: n,
    "sqrt": lambda n: 2 * math.sqrt(n),
    "recursive": lambda n: 1 + math.log2(n),
    "slots_4": lambda _: 5,
    "constant": lambda _: 2,
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
    """Bytes, FLOPs and seconds of a gradient on one device, estimated, and `measured` where it `runs`: on a CPU, and on
    a GPU that is here. Numbers of a GPU are in bfloat16. Layers of llama3-8b but for `shape`. Without `arithmetic` the
    FLOPs are those of frozen weights too. `host`: what waits in host memory."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxmem import models
    from jaxmem.machine.gpus import CPU
    from jaxmem.models.rope import angles
    from jaxmem.planning.compile import compile_all
    from jaxmem.planning.hlo import total_flops
    from jaxmem.planning.targets import parse_target, target_devices
    from jaxmem.planning.timeline import timeline
    from jaxmem.stack import StackOptions, apply_stack

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
        layer = lambda block, x, _, beside: (block(x, beside)[0], None)  # noqa: E731
        y, _ = apply_stack(network.blocks, layer, x, None, turned, way=execution.stack)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    placed = partial(jax.ShapeDtypeStruct, dtype=dtype, sharding=place)
    given = jax.tree.map(lambda x: placed(x.shape), nnx.to_pure_dict(state)), placed((1, time, cfg.embed))

    # Of frozen weights the temporaries are boundaries and one layer; arithmetic is that of training them.
    def made(argnums: int | tuple[int, ...]) -> Any:
        lowered = jax.jit(jax.grad(loss, argnums)).lower(*given)
        return compile_all(lowered, {}, here=aim.is_here, code=runs)[0]

    frozen = made(1)
    trained = made((0, 1)) if arithmetic else frozen
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
        "measured": _timed(trained.executable, given) if runs else None,
    }


def _here(aim: Target) -> Target:
    """This machine's first device, where it is such a GPU."""
    import jax

    from jaxmem.machine import gpus
    from jaxmem.planning.targets import local_target

    first = jax.devices()[0]
    is_one = aim.gpu is not None and first.platform == "gpu" and gpus.find(first.device_kind) == aim.gpu
    return local_target([first]) if is_one else aim


def _timed(run: Any, given: Any) -> float:
    import jax
    import jax.numpy as jnp

    return timed.seconds(run, *jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), given))


def by_policy(
    target: str | None = None,
    policies: Sequence[str] = POLICIES,
    depths: Sequence[int] = DEPTHS,
    on_host: Sequence[tuple[str, tuple[str, ...]]] = ON_HOST,
) -> Found:
    """Small layers on this CPU, compiled and run; then what waits in host memory, compiled for a GPU."""
    aim = target or TARGET
    rows = list(_small(policies, depths))
    deepest = [row for row in rows if row["layers"] == depths[-1]]
    hosted = [backward(name, 32, aim, {}, 8192, arithmetic=False, host=host, runs=True) for name, host in on_host]
    for row in hosted:
        row["name"] = f"{row['policy']}, on the host" if row["host"] else row["policy"]
    work: Columns = {
        "remat": lambda row: row["policy"],
        "boundaries": lambda row: "all between" if row["kept"] is None else str(row["kept"]),
        "run again": lambda row: str(row["again"]),
        "arithmetic": lambda row: f"{row['flops'] / deepest[0]['flops']:.2f} x",
        "CPU, here": lambda row: f"{row['measured'] * 1e3:,.0f} ms",
    }
    sizes: Columns = {"remat": lambda row: row["policy"]}
    for layers in depths:
        sizes[f"{layers} layers"] = partial(_size, rows=rows, layers=layers)
    away: Columns = {
        "remat": lambda row: row["name"],
        "device, GiB": lambda row: f"{row['temporaries'] / 2**30:.2f}",
        "host, GiB": lambda row: f"{row['host'] / 2**30:.2f}",
        "estimate": lambda row: f"{row['seconds']:.2f} s",
        "hidden": lambda row: f"{row['hidden']:.0%}" if row["host"] else "",
    }
    if any(row["measured"] for row in hosted):
        away["measured"] = lambda row: f"{row['measured']:.2f} s"
    tables = [
        Shown(f"{depths[-1]} small layers: what is kept, and how many layers run again", deepest, work),
        Shown("MiB for the backward pass, compiled for this CPU", deepest, sizes),
        Shown(f"32 layers of llama3-8b on {aim}, 8,192 tokens, frozen weights", hosted, away),
    ]
    return Found(tables, _note(deepest, hosted), partial(_draw, rows=rows))


def _small(policies: Sequence[str], depths: Sequence[int]) -> Iterator[Row]:
    from jaxmem.stack import schedule

    for layers in depths:
        for policy in policies:
            plan = schedule(policy, layers)
            again = 0 if policy == "none" else layers + (plan.runs if plan else 0)
            kept = None if policy == "none" else plan.slots if plan else layers
            runs = layers == depths[-1]
            found = backward(policy, layers, "cpu:1", SMALL, 128, arithmetic=False, runs=runs)
            yield {**found, "again": again, "kept": kept}


def _size(row: Row, rows: Sequence[Row], layers: int) -> str:
    (own,) = (one for one in rows if (one["policy"], one["layers"]) == (row["policy"], layers))
    return f"{own['temporaries'] / 2**20:.2f}"


def _note(deepest: Sequence[Row], hosted: Sequence[Row]) -> str:
    by_name = {row["policy"]: row for row in deepest}
    none, root, least = by_name["none"], by_name["sqrt"], by_name["constant"]
    stay, away = hosted[0], hosted[1]
    more, most = root["flops"] / none["flops"] - 1, least["flops"] / none["flops"]
    return (
        "Boundaries: the layers' inputs that are kept, the one in use included. Run again: layers, after the first"
        " pass. Weights are frozen here, so that without recomputation there are two passes of arithmetic; a third, for"
        f" their gradients, makes each share less. With about 2 sqrt N boundaries {none['layers']} layers need"
        f" {none['temporaries'] / root['temporaries']:.0f} times fewer bytes than with everything kept, for {more:.0%}"
        f" more arithmetic; with one, {most:.1f} times the arithmetic. Boundaries in host memory leave the device"
        f" {away['temporaries'] / 2**30:.2f} GiB in place of {stay['temporaries'] / 2**30:.2f} and run nothing more;"
        f" {away['hidden']:.0%} of their way there and back lies beside kernels."
    )


def _draw(drawn: Figure, rows: Sequence[Row]) -> None:
    depth, time = drawn.subplots(1, 2)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        (line,) = depth.plot([row["layers"] for row in own], [row["temporaries"] / 2**20 for row in own], "o-")
        time.plot(own[-1]["temporaries"] / 2**20, own[-1]["measured"] * 1e3, "o", color=line.get_color(), label=policy)
    layers = sorted({row["layers"] for row in rows})
    depth.set(xscale="log", yscale="log", xlabel="layers", title="MiB for the backward pass")
    depth.set_xticks(layers, [str(n) for n in layers])
    depth.set_yticks((1, 2, 4, 8, 16, 32), ("1", "2", "4", "8", "16", "32"))
    time.set(xscale="log", yscale="log", xlabel="MiB for the backward pass")
    time.set(title=f"ms of a processor here, {layers[-1]} layers")
    time.set_xticks((1, 2, 4, 8, 16, 32), ("1", "2", "4", "8", "16", "32"))
    time.set_yticks((50, 100, 200, 400, 800), ("50", "100", "200", "400", "800"))
    for axes in (depth, time):
        axes.minorticks_off()
    time.legend()


STOP = Stop(
    "checkpointing",
    "N, sqrt N, log N boundaries: bytes kept against layers run again; offload",
    by_policy,
    uses="devices",
    config=["memory.remat=sqrt", "memory.offload=activations"],
    read=["jaxmem/stack/schedule.py", "jaxmem/stack/scheduled.py", "jaxmem/sharding/host.py"],
)
