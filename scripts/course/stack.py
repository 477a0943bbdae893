"""The three runs on one device; then the config on eight devices, and stopped half-way and started again."""

import contextlib
import inspect
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmem import models
from jaxmem.config import Config, load_config
from jaxmem.data import Loader
from jaxmem.data.digits import MAX_BRIGHTNESS, Digits
from jaxmem.planning import plan_program
from jaxmem.step import program
from jaxmem.training.run import run
from jaxmem.typing import Tree
from scripts.course import SIMULATED, Findings, main
from scripts.course.common import CONFIGS
from scripts.course.panels import LinePlot
from scripts.course.table import Table

BASE = CONFIGS["stack"]["base"]


def bare_loop(cfg: Config) -> list[float]:
    """jax, flax and optax."""
    digits = Digits()
    draws = np.random.default_rng(0)
    images = digits.images[..., None] / np.float32(MAX_BRIGHTNESS)
    graphdef, params = nnx.split(models.build(cfg.model, nnx.Rngs(0)))
    tx = optax.adamw(cfg.optimizer.learning_rate, weight_decay=cfg.optimizer.weight_decay)
    state = tx.init(params)
    losses = []

    @jax.jit
    def step(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Tree:
        def loss(params: Tree) -> jax.Array:
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graphdef, params)(x), y))

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(cfg.steps):
        rows = draws.integers(0, len(images), cfg.batch.global_size)
        params, state, value = step(params, state, images[rows], digits.labels[rows].astype(np.int32))
        losses.append(float(value))
    return losses


def library_loop(cfg: Config, devices: Sequence[Any]) -> list[float]:
    """The planned step of the library, in a loop of your own."""
    built = program(cfg, devices)
    plan = plan_program(built)  # its memory is known before anything is allocated
    state = built.initialise()
    losses = []
    with Loader(built.cfg) as loader:
        for _ in range(cfg.steps):
            state, metrics = plan.step(state, built.place(next(loader)))
            losses.append(float(metrics["loss"]))
    return losses


def by_config(cfg: Config, devices: Sequence[Any]) -> list[float]:
    """`jaxmem train`."""
    with contextlib.redirect_stdout(io.StringIO()):
        result = run(cfg, devices)
    return [json.loads(line)["loss"] for line in (result.directory / "metrics.jsonl").read_text().splitlines()]


def measure() -> Findings:
    first = jax.devices()[:1]
    eight = jax.devices()[:SIMULATED]
    steps = BASE["train"]["steps"]
    with tempfile.TemporaryDirectory() as place:

        def config(name: str, *overrides: str) -> Config:
            return load_config({**BASE, "output": f"{place}/{name}"}, overrides)

        by_config(config("again", f"train.steps={steps // 2}", f"checkpoint.every={steps // 2}"), first)
        expected = by_config(config("config"), first)
        runs: list[tuple[str, Any, str, list[float]]] = [
            ("bare loop", bare_loop, "trains", bare_loop(config("bare"))),
            (
                "library loop",
                library_loop,
                "also plans, on any mesh, with any setting",
                library_loop(config("parts"), first),
            ),
            ("config", by_config, "also logs, saves, evaluates, resumes", expected),
            ("config, 8 devices", None, "one line of the config", by_config(config("eight"), eight)),
            ("config, stopped and started", None, "the same command again", by_config(config("again"), first)),
        ]
        files = sorted(file.name for file in Path(place, "config/run").iterdir())
    rows = []
    for name, source, does, losses in runs:
        difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        rows.append(
            {
                "run": name,
                "lines without imports": len(inspect.getsource(source).splitlines()) if source else None,
                "first loss": losses[0],
                "last loss": losses[-1],
                "difference": "its own batches" if source is bare_loop else difference,
                "what it does": does,
            }
        )
    series = {name: list(enumerate(losses)) for name, _, _, losses in runs}
    return Findings(
        [Table("One run, written in three ways", rows)],
        {"steps": steps, "images": BASE["batch"]["global_size"], "files": ", ".join(files)},
        [LinePlot("Training loss", "updates", "loss", series, "y")],
    )


if __name__ == "__main__":
    main(__file__)
