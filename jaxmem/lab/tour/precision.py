"""What number formats can represent, and what training in each of them loses.

A format with e bits of exponent and m of mantissa spans 2^(2^e), in steps of 2^-m relative to the number. bfloat16 has
the range of float32 and steps 65,536 times as large: an update below half a step is lost, unless rounding is
stochastic. float16 has finer steps and nothing below 6e-8: small gradients vanish, unless the loss is scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings, refuse_target
from jaxmem.lab.tour.table import Row, Table
from jaxmem.lab.tour.training import DECODER, TEXT, train_each
from jaxmem.quant.precision import rounded

FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
WEIGHT, UPDATE, UPDATES = 1.0, 1e-3, 1000  # a weight, and what is added to it this often
GRADIENT, SCALE = 1e-8, 2.0**16  # stored as it is, and through a loss scaled by this
BASE: dict[str, Any] = {
    "model": DECODER,
    "data": TEXT,
    "batch": {"global_size": 8},
    "optimizer": {"learning_rate": 1e-3, "warmup": 10},
    "train": {"steps": 200},
}
RUNS: Mapping[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16 + float32 master weights": ("precision.parameters=bfloat16", "precision.master=float32"),
    "bfloat16 + 8-bit remainder": ("precision.parameters=bfloat16", "precision.master=remainder8"),
    "bfloat16, stochastic rounding": ("precision.parameters=bfloat16", "precision.rounding=stochastic"),
    "bfloat16, round to nearest": ("precision.parameters=bfloat16",),
    "float16 compute, loss scaling": ("precision.compute=float16", "precision.loss_scale=dynamic"),
    "float16 compute, no loss scaling": ("precision.compute=float16",),
}
SUM, SMALL, SCALED = f"{WEIGHT:g} + {UPDATES} x {UPDATE:g}", f"{GRADIENT:g}", f"{GRADIENT:g}, loss scaled"


def measure(target: str | None = None, steps: int | None = None) -> Findings:
    """The formats by definition; and the same small run in each precision, here."""
    refuse_target("precision", target)
    formats = [describe(name) for name in FORMATS]
    runs: list[Row] = []
    for name, outcome in train_each(BASE, steps, RUNS).items():
        state = sum(outcome.plan["predicted"][part] for part in ("parameters", "master", "optimizer"))
        loss = outcome.held_out["loss"]
        runs.append(
            {
                "precision": name,
                "bytes per parameter": state / outcome.plan["model"]["parameters"],
                "loss": loss,
                "minus float32": loss - (runs[0]["loss"] if runs else loss),
                "config": " ".join(RUNS[name]),
            }
        )
    (stochastic,) = (row["stochastic sum"] for row in formats if row["stochastic sum"])
    digits = {"largest": ".2g", "smallest": ".1g", "step at 1": ".2g", SUM: ".3g", SMALL: ".1g", SCALED: ".1g"}
    return Findings(
        [
            Table("What a format can represent", formats, {**digits, "stochastic sum": None}),
            Table(
                "A small decoder, trained here in each precision",
                runs,
                {"bytes per parameter": ".1f", "loss": ".3f", "minus float32": "+.3f"},
            ),
        ],
        "Bytes per parameter: weights, their master weights or remainders, and AdamW's two moments. Loss: nats per byte"
        f" of held-out text after {steps or BASE['train']['steps']} updates from the same weights. The sum rounds after"
        f" each addition, as an optimizer does; with stochastic rounding bfloat16 comes to {stochastic:.2f}.",
        [
            Bars("Range of each format", formats, ("largest",), begin="smallest", log=True, labels=False),
            Bars("Held-out loss minus float32's", runs, ("minus float32",), "+.3f"),
        ],
    )


def describe(name: str) -> Row:
    """A format's range and step, and what becomes of small updates and small gradients in it."""
    info = jnp.finfo(name)
    total = np.asarray(WEIGHT, info.dtype)
    for _ in range(UPDATES):
        total = (total.astype(np.float32) + np.float32(UPDATE)).astype(info.dtype)
    stochastic = None
    if name == "bfloat16":

        def update(many: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            return rounded(many.astype(jnp.float32) + UPDATE, jnp.bfloat16, key), None

        keys = jax.random.split(jax.random.key(0), UPDATES)
        many, _ = jax.lax.scan(update, jnp.full(1000, WEIGHT, jnp.bfloat16), keys)
        stochastic = float(jnp.mean(many.astype(jnp.float32)))
    small, large = (np.asarray(x, np.float32).astype(info.dtype) for x in (GRADIENT, SCALE * GRADIENT))
    return {
        "format": name,
        "bytes": info.bits // 8,
        "largest": float(info.max),
        "smallest": float(info.smallest_subnormal),
        "step at 1": float(info.eps),
        SUM: float(total),
        SMALL: float(small),
        SCALED: float(large) / SCALE,
        "stochastic sum": stochastic,
    }
