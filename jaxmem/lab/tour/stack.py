"""One small run three times: a loop of jax and optax, the library's pieces in a loop of one's own, and a config.

Each does what the one before does and more. The bare loop trains. The pieces know what the step will hold before
anything is allocated, and put the same step on any mesh. The config adds what a run of days needs: metrics in a file,
checkpoints, a restart that goes on bit by bit, evaluation; several processes log once.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.config import Config, load_config
from jaxmem.lab.tour.stops import SIMULATED, Columns, Found, Row, Shown, Stop, only_here

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIVEN: dict[str, Any] = {
    "name": "run",
    "objective": "classify",
    "model": {"family": "mlp", "layers": 2, "embed": 64, "mlp": 128},
    "data": {"source": "digits"},
    "batch": {"global_size": 64},
    "optimizer": {"learning_rate": 5e-3, "schedule": "constant", "clip": None},
    "mesh": {"fsdp": -1},
    "train": {"steps": 60, "log_every": 1},
}


def bare(cfg: Config) -> list[float]:
    """jax, flax and optax."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from jaxmem import models
    from jaxmem.data.digits import BRIGHTEST, Digits

    digits, draws = Digits(), np.random.default_rng(0)
    images = digits.images[..., None] / np.float32(BRIGHTEST)
    graphdef, params = nnx.split(models.build(cfg.model, nnx.Rngs(0)))
    tx = optax.adamw(cfg.optimizer.learning_rate, weight_decay=cfg.optimizer.weight_decay)
    state, losses = tx.init(params), []

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graphdef, params)(x), y))

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(cfg.steps):
        rows = draws.integers(0, len(images), cfg.batch.global_size)
        params, state, value = step(params, state, images[rows], digits.labels[rows].astype(np.int32))
        losses.append(float(value))
    return losses


def pieces(cfg: Config, devices: Sequence[Any]) -> list[float]:
    """The library's step, planned, in a loop of one's own."""
    from jaxmem.data import Loader
    from jaxmem.planning import plan_program
    from jaxmem.step import program

    built = program(cfg, devices)
    plan = plan_program(built)  # its bytes are known here, and nothing is allocated
    state, losses = built.initialise(), []
    with Loader(built.cfg) as loader:
        for _ in range(cfg.steps):
            state, metrics = plan.step(state, built.place(next(loader)))
            losses.append(float(metrics["loss"]))
    return losses


def by_config(cfg: Config, devices: Sequence[Any]) -> list[float]:
    """`jaxmem train`."""
    import json

    from jaxmem.training.run import run

    with contextlib.redirect_stdout(io.StringIO()):
        result = run(cfg, devices)
    return [json.loads(line)["loss"] for line in (result.directory / "metrics.jsonl").read_text().splitlines()]


GIVES: Mapping[str, tuple[Callable[..., Any], str]] = {
    "a bare loop": (bare, "trains"),
    "the library's pieces": (pieces, "and plans, on any mesh, with any setting"),
    "a config": (by_config, "and logs, saves, evaluates, goes on where it stopped"),
}


def layered(target: str | None = None, steps: int | None = None) -> Found:
    """The three on one device; then the config on eight, and stopped half-way and started again."""
    only_here("stack", target)
    import jax

    one, all_of_them = jax.devices()[:1], jax.devices()[:SIMULATED]
    steps = steps or GIVEN["train"]["steps"]
    with tempfile.TemporaryDirectory() as place:

        def config(name: str, *overrides: str) -> Config:
            return load_config({**GIVEN, "output": f"{place}/{name}"}, [f"train.steps={steps}", *overrides])

        runs = {
            "a bare loop": bare(config("bare")),
            "the library's pieces": pieces(config("pieces"), one),
            "a config": by_config(config("whole"), one),
            "a config, 8 devices": by_config(config("eight"), all_of_them),
        }
        by_config(config("again", f"train.steps={steps // 2}", f"checkpoint.every={steps // 2}"), one)
        runs["a config, stopped and started"] = by_config(config("again"), one)
        left = sorted(file.name for file in Path(place, "whole/run").iterdir())
    rows = [_row(name, losses, runs["a config"]) for name, losses in runs.items()]
    columns: Columns = {
        "the run": lambda row: row["name"],
        "lines": lambda row: str(row["lines"] or ""),
        "first loss": lambda row: f"{row['losses'][0]:.3f}",
        "last loss": lambda row: f"{row['losses'][-1]:.3f}",
        "beside the config's": lambda row: "its own rows" if row["off"] is None else f"{row['off']:.0e}",
        "what it does": lambda row: row["gives"],
    }
    note = (
        f"{steps} updates of {GIVEN['batch']['global_size']} pictures. Beside the config's: by how much a loss differs"
        f" at most; 0 is bit for bit. Its metrics have one line an update, on {SIMULATED} devices too. It leaves"
        f" {', '.join(left)}."
    )
    return Found([Shown("One run, three ways to write it", rows, columns)], note, partial(_draw, rows=rows))


def _row(name: str, losses: list[float], expected: list[float]) -> Row:
    run, gives = GIVES.get(name, (None, "one line of the config" if "8" in name else "the same command again"))
    off = max(abs(a - b) for a, b in zip(losses, expected, strict=True)) if run is not bare else None
    lines = len(inspect.getsource(run).splitlines()) if run else 0
    return {"name": name, "lines": lines, "losses": losses, "off": off, "gives": gives}


def _draw(drawn: Figure, rows: Sequence[Row]) -> None:
    axes = drawn.subplots()
    same = [row for row in rows if row["off"] is not None]
    for row in rows:
        if row not in same:
            axes.plot(row["losses"], label=f"{row['name']}, on its own draw of rows", c="gray", alpha=0.6)
    for number, row in enumerate(same):  # they lie on each other, so each is seen in places of its own
        every = (number, len(same))
        axes.plot(row["losses"], "o-", c=f"C{number}", lw=0.6, ms=6, markevery=every, label=row["name"])
    axes.set(yscale="log", xlabel="updates", ylabel="loss")
    axes.legend()


STOP = Stop(
    "stack",
    "one run as a bare loop, with the library's pieces, and by config: what each adds",
    layered,
    uses="simulated",
    config=["mesh.fsdp=8", "checkpoint.every=30", "checkpoint.resume=auto"],
    read=["jaxmem/lab/tour/stack.py", "jaxmem/step/step.py", "jaxmem/training/run.py"],
)
