"""The formats by definition; then the same small run in each precision."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.quant.precision import rounded
from scripts.course import Findings, common, main
from scripts.course.panels import Bars
from scripts.course.table import Row, Table

FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
UPDATE, UPDATES = 1e-3, 1000  # the update of a weight of 1, and the number of updates
GRADIENT = 1e-8
SCALE = 2.0**16  # a gradient, stored without and with this loss scale
BASE = common.CONFIGS["precision"]["base"]
RUNS = common.rows_of("precision", "runs")
SUM = f"1 + {UPDATES} x {UPDATE:g}"
SMALL = f"{GRADIENT:g}"
SCALED = f"{GRADIENT:g}, loss scaled"


def measure() -> Findings:
    outcomes = common.train_all(dict.fromkeys(RUNS, BASE), RUNS)
    exact = outcomes["float32"].held_out["loss"]
    runs = [
        {
            "precision": name,
            "state, bytes per parameter": sum(
                outcome.plan["predicted"][part] / outcome.plan["model"]["parameters"]
                for part in ("parameters", "master", "optimizer")
            ),
            "held-out loss": outcome.held_out["loss"],
            "minus float32": round(outcome.held_out["loss"] - exact, 3),
            "config": " ".join(RUNS[name]),
        }
        for name, outcome in outcomes.items()
    ]
    trained = Table(f"A small decoder, {BASE['train']['steps']} updates here in each precision", runs)
    return Findings(
        [Table("What a format can represent", [describe(name) for name in FORMATS]), trained],
        {"stochastic": stochastic_sum()},
        [Bars(trained, ("minus float32",), "Held-out loss minus float32's")],
    )


def describe(name: str) -> Row:
    """The range and the step of a format, and its results for small updates and small gradients."""
    info = jnp.finfo(name)
    total = np.asarray(1.0, info.dtype)
    for _ in range(UPDATES):
        total = (total.astype(np.float32) + np.float32(UPDATE)).astype(info.dtype)
    small, large = (np.asarray(x, np.float32).astype(info.dtype) for x in (GRADIENT, SCALE * GRADIENT))
    return {
        "format": name,
        "bytes": info.bits // 8,
        "largest": f"{float(info.max):.3g}",
        "smallest": f"{float(info.smallest_subnormal):.1g}",
        "step at 1": f"{float(info.eps):.2g}",
        SUM: float(total),
        SMALL: float(small),
        SCALED: float(large) / SCALE,
    }


def stochastic_sum() -> float:
    """The sum in bfloat16 with stochastic rounding: the mean of 1,000 weights."""

    def update(weights: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        return rounded(weights.astype(jnp.float32) + UPDATE, jnp.bfloat16, key), None

    keys = jax.random.split(jax.random.key(0), UPDATES)
    weights, _ = jax.lax.scan(update, jnp.ones(1000, jnp.bfloat16), keys)
    return float(jnp.mean(weights.astype(jnp.float32)))


if __name__ == "__main__":
    main(__file__)
