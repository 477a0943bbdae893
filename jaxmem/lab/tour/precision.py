"""What number formats can represent, and what training in each of them loses.

A format with e bits of exponent and m of mantissa spans 2^(2^e), in steps of 2^-m relative to the number. bfloat16 has
the range of float32 and steps 65,536 times as large: an update below half a step is lost, unless rounding is
stochastic. float16 has finer steps and nothing below 6e-8: small gradients vanish, unless the loss is scaled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Row, Table
from jaxmem.quant.precision import rounded

FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
UPDATE, UPDATES = 1e-3, 1000  # what is added to a weight of 1 this often
GRADIENT, SCALE = 1e-8, 2.0**16  # stored as it is, and through a loss scaled by this
BASE: dict[str, Any] = {
    "model": common.DECODER,
    "data": common.TEXT,
    "batch": {"global_size": 8},
    "optimizer": {"learning_rate": 1e-3, "warmup": 10},
    "train": {"steps": 200},
}
RUNS: common.Overrides = {
    "float32": (),
    "bfloat16 + float32 master weights": ("precision.parameters=bfloat16", "precision.master=float32"),
    "bfloat16 + 8-bit remainder": ("precision.parameters=bfloat16", "precision.master=remainder8"),
    "bfloat16, stochastic rounding": ("precision.parameters=bfloat16", "precision.rounding=stochastic"),
    "bfloat16, round to nearest": ("precision.parameters=bfloat16",),
    "float16 compute, loss scaling": ("precision.compute=float16", "precision.loss_scale=dynamic"),
    "float16 compute, no loss scaling": ("precision.compute=float16",),
}
SUM, SMALL, SCALED = f"1 + {UPDATES} x {UPDATE:g}", f"{GRADIENT:g}", f"{GRADIENT:g}, loss scaled"


def measure() -> Findings:
    """The formats by definition; and the same small run in each precision, here."""
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
        "State: weights, their master weights or remainders, and AdamW's two moments. Loss: nats per byte, from the"
        " same initial weights. The sum rounds after each addition, as an optimizer does; with stochastic rounding"
        f" bfloat16 comes to {stochastic_sum():.2f}.",
        [Bars(trained, ("minus float32",), "Held-out loss minus float32's")],
    )


def describe(name: str) -> Row:
    """A format's range and step, and what becomes of small updates and small gradients in it."""
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
    """The sum in bfloat16 with stochastic rounding, the mean of 1,000 weights."""

    def update(weights: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        return rounded(weights.astype(jnp.float32) + UPDATE, jnp.bfloat16, key), None

    keys = jax.random.split(jax.random.key(0), UPDATES)
    weights, _ = jax.lax.scan(update, jnp.ones(1000, jnp.bfloat16), keys)
    return float(jnp.mean(weights.astype(jnp.float32)))
