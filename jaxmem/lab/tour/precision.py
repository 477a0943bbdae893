"""What number formats can hold, and what a run loses in each.

A format with e bits of exponent and m of mantissa spans 2^(2^e) and moves in steps of 2^-m of a number's size. bfloat16
has float32's span and its steps are 65,536 times as wide: an update below half a step is rounded to none, unless it is
rounded up as often as it is large. float16 has finer steps and no room below 6e-8: gradients vanish there, unless the
loss they come from is multiplied first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop, only_here
from jaxmem.lab.tour.trained import DECODER, Run, trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
WEIGHT, UPDATE, UPDATES = 1.0, 1e-3, 1000  # a weight, and what is added to it so often
GRADIENT, SCALE = 1e-8, 2.0**16  # what a format makes of it, and of so many times it
BASE: dict[str, Any] = {
    "model": DECODER,
    "data": {"source": "stdlib", "sequence_length": 128},
    "batch": {"global_size": 8},
    "optimizer": {"learning_rate": 1e-3, "warmup": 10},
    "train": {"steps": 200},
}
RUNS: Mapping[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16, a float32 copy": ("precision.parameters=bfloat16", "precision.master=float32"),
    "bfloat16, 8 bits more": ("precision.parameters=bfloat16", "precision.master=remainder8"),
    "bfloat16, rounded stochastically": ("precision.parameters=bfloat16", "precision.rounding=stochastic"),
    "bfloat16, rounded to the nearest": ("precision.parameters=bfloat16",),
    "products in float16, loss scaled": ("precision.compute=float16", "precision.loss_scale=dynamic"),
    "products in float16, loss as it is": ("precision.compute=float16",),
}


def held(target: str | None = None, steps: int | None = None) -> Found:
    """What formats hold, by definition; and the same small run under each precision, here."""
    only_here("precision", target)
    formats, runs = [_format(name) for name in FORMATS], list(_runs(steps or BASE["train"]["steps"]))
    holds: Columns = {
        "format": lambda row: row["name"],
        "bytes": lambda row: str(row["bytes"]),
        "largest": lambda row: f"{row['largest']:.2g}",
        "smallest": lambda row: f"{row['smallest']:.1g}",
        "step at 1": lambda row: f"{row['step']:.2g}",
        f"{WEIGHT:g} + {UPDATES} x {UPDATE:g}": lambda row: f"{row['sum']:.3g}",
        f"{GRADIENT:g}": lambda row: f"{row['gradient']:.1g}",
        "scaled": lambda row: f"{row['scaled']:.1g}",
    }
    costs: Columns = {
        "precision": lambda row: row["name"],
        "B/param": lambda row: f"{row['state']:.1f}",
        "loss": lambda row: f"{row['loss']:.3f}",
        "beside float32": lambda row: f"{row['loss'] - runs[0]['loss']:+.3f}",
        "config": lambda row: " ".join(row["overrides"]),
    }
    pure = next(row for row in runs if row["name"] == "bfloat16, rounded stochastically")
    (drawn,) = (row["drawn"] for row in formats if row["drawn"])
    note = (
        f"B/param: weights, their copies and AdamW's two moments; pure bfloat16 with its gradients is"
        f" {pure['state'] + 2:.0f}. Loss: nats a byte of text held out, after {runs[0]['steps']} updates from one"
        " start. The sum adds as an optimizer does, rounding after each update; stochastically rounded, bfloat16 comes"
        f" to {drawn:.2f}. The last two columns are a small gradient as it is, and through a scaled loss; those of this"
        " small run are large enough for float16 either way."
    )
    tables = [
        Shown("What a format holds", formats, holds),
        Shown("A small decoder, trained here under each precision", runs, costs),
    ]
    return Found(tables, note, partial(_draw, formats=formats, runs=runs))


def _format(name: str) -> Row:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxmem.quant.precision import rounded

    told = jnp.finfo(name)
    total = np.asarray(WEIGHT, told.dtype)
    for _ in range(UPDATES):
        total = (total.astype(np.float32) + np.float32(UPDATE)).astype(told.dtype)
    drawn = None
    if name == "bfloat16":

        def update(many: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            return rounded(many.astype(jnp.float32) + UPDATE, jnp.bfloat16, key), None

        keys = jax.random.split(jax.random.key(0), UPDATES)
        many, _ = jax.lax.scan(update, jnp.full(1000, WEIGHT, jnp.bfloat16), keys)
        drawn = float(jnp.mean(many.astype(jnp.float32)))
    small, large = (np.asarray(x, np.float32).astype(told.dtype) for x in (GRADIENT, SCALE * GRADIENT))
    return {
        "name": name,
        "bytes": told.bits // 8,
        "largest": float(told.max),
        "smallest": float(told.smallest_subnormal),
        "step": float(told.eps),
        "sum": float(total),
        "drawn": drawn,
        "gradient": float(small),
        "scaled": float(large) / SCALE,
    }


def _runs(steps: int) -> Iterator[Row]:
    given = {**BASE, "train": {"steps": steps}}
    for name, ran in trained({name: Run(given, overrides) for name, overrides in RUNS.items()}).items():
        state = sum(ran.plan["predicted"][part] for part in ("parameters", "master", "optimizer"))
        yield {
            "name": name,
            "overrides": list(RUNS[name]),
            "steps": steps,
            "state": state / ran.plan["model"]["parameters"],
            "loss": ran.held_out["loss"],
        }


def _draw(drawn: Figure, formats: Sequence[Row], runs: Sequence[Row]) -> None:
    holds, losses = drawn.subplots(1, 2)
    for place, row in enumerate(formats):
        holds.plot((row["smallest"], row["largest"]), (place, place), lw=14, solid_capstyle="butt")
    holds.set(xscale="log", xlabel="from the smallest to the largest number", ylim=(len(formats) - 0.5, -0.5))
    holds.set_yticks(range(len(formats)), [f"{row['name']}\nstep {row['step']:.1g}" for row in formats], fontsize=8)
    losses.barh([row["name"] for row in runs], [row["loss"] - runs[0]["loss"] for row in runs])
    losses.axvline(0, c="gray", lw=0.8)
    losses.set(xlabel="loss beside float32's")
    losses.tick_params(axis="y", labelsize=8)
    losses.invert_yaxis()


STOP = Stop(
    "precision",
    "what number formats hold, and what training in each of them loses",
    held,
    uses="devices",
    config=["precision.parameters=bfloat16", "precision.rounding=stochastic", "precision.loss_scale=dynamic"],
    read=["jaxmem/quant/precision.py", "jaxmem/optim/master.py", "jaxmem/step/step.py"],
    takes="about a minute",
)
