"""What N layers hold for the backward pass under each recomputation policy, and what they compute again.

    python scripts/recompute.py --output docs/benchmarks/recompute.json --png docs/recompute.png

Layers of llama3-8b's shape in bfloat16, one sequence of 2,048 tokens, compiled for a target that need not be here: the
gradient by the first boundary for the bytes, and by the weights too for the arithmetic. Ten seconds of a core for each.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmem import devices

# Boundaries that a policy keeps of N layers, and how often it runs them beside the ideal three passes.
FORMULAS: dict[str, Callable[[int], float]] = {
    "full": lambda n: n,
    "sqrt": lambda n: 2 * math.sqrt(n),
    "recursive": lambda n: 1 + math.log2(n),
    "slots_4": lambda _: 5,
    "constant": lambda _: 2,
}


def compiled(
    policy: str,
    layers: int,
    target: str,
    shape: dict[str, int],
    time: int,
    *,
    arithmetic: bool = True,
    host: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Bytes and FLOPs of one device; without `arithmetic` the FLOPs are those of frozen weights too. `host`: what
    waits in host memory."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxmem import models
    from jaxmem.config import load_config
    from jaxmem.models.rope import angles
    from jaxmem.planning.compile import compile_all
    from jaxmem.planning.hlo import total_flops
    from jaxmem.planning.targets import parse_target, target_devices
    from jaxmem.planning.timeline import timeline
    from jaxmem.stack import Way, apply_stack

    base = {"name": "x", "model": {"preset": "llama3-8b", **shape, "layers": layers}, "train": {"steps": 1}}
    cfg = load_config({**base, "data": {"source": "tokens", "path": "unused"}}).model
    execution = models.Execution(dtype=jnp.dtype(jnp.bfloat16), stack=Way(policy, host=host))
    network = nnx.eval_shape(lambda: models.build(cfg, nnx.Rngs(0), execution))
    graphdef, state = nnx.split(network)
    aim = parse_target(target)
    place = jax.sharding.SingleDeviceSharding(target_devices(aim, 1000 * aim.memory)[0])

    def placed(x: Any, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=place)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        network = nnx.merge(graphdef, weights)
        turned = angles(jnp.zeros((1, time), jnp.int32), cfg.rope, cfg.head_dim)
        layer = lambda block, x, _, beside: (block(x, beside)[0], None)  # noqa: E731
        y, _ = apply_stack(network.blocks, layer, x, None, turned, way=execution.stack)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    weights = jax.tree.map(placed, nnx.to_pure_dict(state))
    x = jax.ShapeDtypeStruct((1, time, cfg.embed), jnp.bfloat16, sharding=place)

    # Of frozen weights the temporaries are boundaries and one layer; arithmetic is that of training them.
    def made(argnums: int | tuple[int, ...]) -> Any:
        lowered = jax.jit(jax.grad(loss, argnums)).lower(weights, x)
        return compile_all(lowered, {}, here=aim.is_here, code=False)[0]

    frozen = made(1)
    trained = made((0, 1)) if arithmetic else frozen
    return {
        "policy": policy,
        "layers": layers,
        "boundary": time * cfg.embed * 2,
        "temporaries": frozen.sizes["temporaries"],
        "host": frozen.host_total,
        "flops": total_flops(trained.module),
        "hidden": timeline(frozen.module, aim.gpu, 1, 1).hidden,
    }


def rows(policies: Sequence[str], depths: Sequence[int], target: str, **size: Any) -> Iterator[dict[str, Any]]:
    for layers in depths:
        for policy in policies:
            yield compiled(policy, layers, target, **size)


def draw(found: Sequence[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    memory, time = figure.subplots(1, 2)
    for policy in dict.fromkeys(one["policy"] for one in found):
        own = [one for one in found if one["policy"] == policy]
        depths = [one["layers"] for one in own]
        (line,) = memory.plot(depths, [one["temporaries"] / 2**30 for one in own], "o-", label=policy)
        if policy in FORMULAS:
            least = own[0]["temporaries"] - FORMULAS[policy](depths[0]) * own[0]["boundary"]
            formula = [(FORMULAS[policy](n) * own[0]["boundary"] + least) / 2**30 for n in depths]
            memory.plot(depths, formula, ":", color=line.get_color())
        time.plot(depths, [one["flops"] / one["ideal"] for one in own], "o-", label=policy)
    for axes, title in ((memory, "GiB for the backward pass (dotted: formula)"), (time, "arithmetic, ideal = 1")):
        axes.set(xscale="log", yscale="log", xlabel="layers", title=title)
        axes.set_xticks(
            sorted({one["layers"] for one in found}), [str(n) for n in sorted({one["layers"] for one in found})]
        )
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    memory.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100-80gb")
    parser.add_argument("--policies", nargs="+", default=["none", "full", "sqrt", "recursive", "slots_4", "constant"])
    parser.add_argument("--depths", nargs="+", type=int, default=[16, 64, 80, 256])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    devices.stay_on_cpu_without_gpu(only_compile=True)
    found = []
    for one in rows(given.policies, given.depths, given.target, shape={}, time=2048):
        ideal = next((old["flops"] for old in found if (old["policy"], old["layers"]) == ("none", one["layers"])), None)
        found.append({**one, "ideal": ideal or one["flops"]})
        kept = f"{one['temporaries'] / 2**30:7.3f} GiB, {one['flops'] / found[-1]['ideal']:6.3f} x"
        print(f"{one['policy']:10} {one['layers']:4} layers: {kept}", flush=True)
    if given.output:
        given.output.write_text(json.dumps({"target": given.target, "rows": found}, indent=1) + "\n")
    if given.png:
        draw(found, given.png)


if __name__ == "__main__":
    main()
