"""A model whose float16 gradients are all zero, and trains with loss scaling; bfloat16 weights that only stochastic
rounding moves."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.quant.precision import rounded
from scripts.course import Findings, main
from scripts.course.panels import Histogram, LinePlot
from scripts.course.table import Row, Table

ROWS, WIDTHS = 1024, (16, 64, 64, 1)
UNIT = 1e-3  # targets are lengths in metres, of about a millimetre
SCALE = 2.0**20
Weights = list[dict[str, jax.Array]]


class Case(NamedTuple):
    """How a run computes: the dtype of the network, the loss scale, and how weights are stored."""

    compute: Any = jnp.float32
    scale: float = 1.0
    stored: Any = jnp.float32
    stochastic: bool = False
    rate: float = 3e-3


SCALED = {
    "float32": Case(),
    "float16, unscaled": Case(jnp.float16),
    f"float16, loss times 2^{int(np.log2(SCALE))}": Case(jnp.float16, SCALE),
}
# Updates of about the learning rate, which is far below half a step of bfloat16 for most weights.
SLOW = 2e-4
ROUNDED = {
    "float32 weights": Case(rate=SLOW),
    "bfloat16, to nearest": Case(stored=jnp.bfloat16, rate=SLOW),
    "bfloat16, stochastic": Case(stored=jnp.bfloat16, stochastic=True, rate=SLOW),
}


def measure(steps: int) -> Findings:
    scaled = {name: train(case, steps) for name, case in SCALED.items()}
    stored = {name: train(case, 4 * steps) for name, case in ROUNDED.items()}
    rows: list[Row] = [
        {"run": name, "loss, first": losses[0], "loss, last": losses[-1], "weights that moved, %": 100 * moved}
        for name, (losses, moved) in (scaled | stored).items()
    ]
    gradients = gradient_sizes()
    tiny, smallest = float(jnp.finfo(jnp.float16).smallest_subnormal), 2.0**-14
    edges = np.arange(-42, 19)
    logs = np.log2(gradients)
    counts = {
        name: np.histogram(logs + shift, edges)[0] / len(logs)
        for name, shift in (("gradients", 0.0), ("times the loss scale", np.log2(SCALE)))
    }
    marks = {"0 in float16 below": np.log2(tiny / 2), "fewer bits below": np.log2(smallest), "infinite above": 16.0}
    facts = {
        "lost": float(np.mean(gradients < tiny / 2)),
        "unscaled": rows[1]["loss, last"] / rows[1]["loss, first"],
        "scaled": rows[2]["loss, last"] / rows[2]["loss, first"],
        "nearest": rows[4]["weights that moved, %"],
        "stochastic": rows[5]["weights that moved, %"],
    }
    title = f"An MLP that predicts lengths of about {UNIT:g} m; loss: mean squared error relative to that of 0"
    return Findings(
        [Table(title, rows)],
        facts,
        [
            Histogram("Sizes of the gradients", "log2 of the absolute value", edges, counts, marks),
            LinePlot("Loss scaling", "step", "loss", _curves(scaled), "y"),
            LinePlot("Rounding of the weights", "step", "loss", _curves(stored), "y"),
        ],
    )


def _curves(runs: Mapping[str, tuple[np.ndarray, float]]) -> dict[str, list[tuple[float, float]]]:
    """Every fortieth part of the losses."""
    return {name: list(enumerate(losses))[:: max(1, len(losses) // 40)] for name, (losses, _) in runs.items()}


def data() -> tuple[jax.Array, jax.Array]:
    """Points, and a smooth function of them in metres."""
    draws = np.random.default_rng(0)
    x = draws.standard_normal((ROWS, WIDTHS[0])).astype(np.float32)
    direction = draws.standard_normal((WIDTHS[0], 4)).astype(np.float32) / 4
    return jnp.asarray(x), jnp.asarray(UNIT * np.sin(2 * x @ direction).sum(axis=1, keepdims=True) / 2)


def initial() -> Weights:
    keys = jax.random.split(jax.random.key(0), len(WIDTHS) - 1)
    sizes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [{"w": jax.random.normal(k, (n, m)) / np.sqrt(n).astype(np.float32), "b": jnp.zeros(m)} for k, n, m in sizes]


def loss_of(weights: Weights, x: jax.Array, target: jax.Array, compute: Any, scale: float) -> jax.Array:
    """The scaled mean squared error in m^2. The network runs in `compute`; its last layer has the unit of the target,
    so every gradient has the factor UNIT twice, and the factor 1 / ROWS of the mean."""
    hidden = x.astype(compute)
    for number, layer in enumerate(weights):
        hidden = hidden @ layer["w"].astype(compute) + layer["b"].astype(compute)
        hidden = jnp.tanh(hidden) if number < len(weights) - 1 else hidden
    error = hidden * jnp.asarray(UNIT, compute) - target.astype(compute)
    error = error.astype(jnp.float32)
    return jnp.float32(scale) * jnp.mean(error * error)


def gradient_sizes() -> np.ndarray:
    """The absolute values of all gradients at the first step, in float32."""
    gradients = jax.grad(loss_of)(initial(), *data(), jnp.float32, 1.0)
    flat = np.abs(np.concatenate([np.asarray(g).ravel() for g in jax.tree.leaves(gradients)]))
    return flat[flat > 0]


def train(case: Case, steps: int) -> tuple[np.ndarray, float]:
    """The loss in each step, relative to that of predicting 0, and the share of the weights that moved."""
    x, target = data()
    begin = jax.tree.map(lambda w: w.astype(case.stored), initial())
    tx = optax.adam(case.rate, eps=1e-18)  # gradients are about 1e-9
    step: Callable[..., Any] = partial(_step, case, tx, x, target)
    keys = jax.random.split(jax.random.key(1), steps)
    (weights, _), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))((begin, tx.init(initial())))
    before, after = (
        np.concatenate([np.asarray(w, np.float32).ravel() for w in jax.tree.leaves(tree)]) for tree in (begin, weights)
    )
    return np.asarray(losses / jnp.mean(target**2)), float(np.mean(before != after))


def _step(case: Case, tx: Any, x: jax.Array, target: jax.Array, carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
    weights, state = carry
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    # Weights are cast to float16 before they are differentiated, as training does: gradients are float16 too.
    cast = jax.tree.map(lambda w: w.astype(case.compute), wide)
    scaled, gradients = jax.value_and_grad(loss_of)(cast, x, target, case.compute, case.scale)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.float32(case.scale), gradients)
    updates, state = tx.update(gradients, state)
    keys = jax.tree.unflatten(jax.tree.structure(wide), list(jax.random.split(key, len(jax.tree.leaves(wide)))))

    def draw(weight: jax.Array, update: jax.Array, key: jax.Array) -> jax.Array:
        return rounded(weight + update, case.stored, key if case.stochastic else None)

    return (jax.tree.map(draw, wide, updates, keys), state), scaled / jnp.float32(case.scale)


if __name__ == "__main__":
    main(__file__)
