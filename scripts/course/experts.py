"""Three small decoders, trained; then the buffers of one layer of a large mixture, compiled."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.config import load_config
from jaxmem.kernels.grouped_matmul import sort_rows
from jaxmem.models.experts import Experts
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.typing import Tree
from scripts.course import Findings, main
from scripts.course.common import CONFIGS, compile_for, rows_of, train_all
from scripts.course.panels import Bars
from scripts.course.table import Row, Table

BASE = CONFIGS["experts"]["base"]
RUNS = rows_of("experts", "runs")
TOKENS = 2048
COUNTS = (32, 128)
IMPLEMENTATIONS = ("ragged_dot", "blockwise", "triton")


def measure(target: str) -> Findings:
    outcomes = train_all(dict.fromkeys(RUNS, BASE), RUNS)
    rows: list[Row] = [
        {
            "decoder": name,
            "parameters": plan["model"]["parameters"],
            "active per token": plan["model"]["active"],
            "held-out loss": held_out["loss"],
            "largest load": held_out.get("router_load"),
            "config": " ".join(RUNS[name]),
        }
        for name, (plan, held_out) in outcomes.items()
    ]
    trained = Table(f"Small decoders of source text, {BASE['train']['steps']} updates here", rows)
    aim = parse_target(target)
    device = target_devices(aim, 1000 * aim.memory)[0]
    columns = {count: f"{count} experts" for count in COUNTS}
    buffer_rows: list[Row] = [
        {"implementation": name, **{columns[count]: temporaries(device, name, count) / 2**20 for count in COUNTS}}
        for name in IMPLEMENTATIONS
    ]
    buffers = Table(f"Temporary buffers of an expert layer and its gradients on {target}, MiB", buffer_rows)
    dense, mixture = (row["held-out loss"] for row in rows[:2])
    growth = {row["implementation"]: row[columns[COUNTS[1]]] / row[columns[COUNTS[0]]] for row in buffer_rows}
    return Findings(
        [trained, buffers],
        {"lower": dense - mixture, "growth": growth},
        [
            Bars(trained, ("held-out loss",), "Held-out loss, nats per byte"),
            Bars(buffers, tuple(columns.values()), "Temporary buffers of a layer, MiB", grouped=True),
        ],
    )


def temporaries(device: Any, implementation: str, count: int) -> int:
    """Bytes of temporary buffers of a layer, forward and backward."""
    model = load_config({"name": "layer", "model": {"preset": "qwen3-30b-a3b"}, "train": {"steps": 1}}).model
    model = model.replace(experts={"count": count})
    layer = nnx.eval_shape(lambda: Experts(nnx.Rngs(0), model, implementation))
    graphdef, weights = nnx.split(layer)

    def loss(weights: Tree, x: jax.Array) -> jax.Array:
        layer = nnx.merge(graphdef, weights)
        y = _with_ragged_dot(layer, x) if implementation == "ragged_dot" else layer(x)[0]
        return jnp.sum(y.astype(jnp.float32) ** 2)

    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), weights)
    x = jax.ShapeDtypeStruct((1, TOKENS, model.embed), jnp.bfloat16)
    compiled = compile_for(device, jax.grad(loss, argnums=(0, 1)), weights, x)
    return compiled.sizes["temporaries"]


def _with_ragged_dot(layer: Experts, x: jax.Array) -> jax.Array:
    choices, shares, _ = layer._route(x, None)
    groups = sort_rows(choices[0], layer.cfg.count)
    gate, up, down = (matrices.trainable(x.dtype)["weight"] for matrices in (layer.gate, layer.up, layer.down))
    matmul = partial(jax.lax.ragged_dot, group_sizes=groups.stops - groups.starts)
    rows = x[0][groups.rows]
    y = matmul(jax.nn.silu(matmul(rows, gate)) * matmul(rows, up), down)
    y = y * shares.reshape(-1, 1)[groups.order].astype(y.dtype)
    return jnp.zeros(x.shape[1:], jnp.float32).at[groups.rows].add(y.astype(jnp.float32))


if __name__ == "__main__":
    main(__file__)
