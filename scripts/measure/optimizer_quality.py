"""What few bytes cost in quality: one small model trained by every optimizer and precision, from the same weights on
the same batches, for several seeds. The table and the figure of docs/optimizers.md.

    python scripts/measure/optimizer_quality.py train                  # resumes; some hours on two cores
    python scripts/measure/optimizer_quality.py train adamw8bit -s 0     # one method, one seed
    python scripts/measure/optimizer_quality.py table --png FILE         # of what has been recorded

A record a run goes to docs/benchmarks/optimizer-quality.jsonl. What is compared is the loss on held-out documents
after the last update, method by method against float32 AdamW of the same seed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "benchmarks" / "optimizer-quality.jsonl"
BASE = "adamw"
# A short run looks for its basis more often. After 400 updates 1e-2, 2e-2, 4e-2 ended at 1.816, 1.729, 1.742 (AdamW
# with 3e-3, 6e-3 at 1.673, 1.728).
LOW_RANK = "optimizer.learning_rate=2e-2 optimizer.refresh_every=50"
METHODS = {  # and the most that its loss may be above AdamW's
    BASE: ("", 0.0),
    "bfloat16": ("precision.parameters=bfloat16", None),
    "bfloat16, stochastic": ("precision.parameters=bfloat16 precision.rounding=stochastic", 0.01),
    "bfloat16, remainder16": ("precision.parameters=bfloat16 precision.master=remainder16", 0.002),
    "bfloat16, remainder8": ("precision.parameters=bfloat16 precision.master=remainder8", 0.002),
    "adamw8bit": ("optimizer.name=adamw8bit", 0.002),
    "adamw4bit": ("optimizer.name=adamw4bit", None),
    "galore": (f"optimizer.name=galore_adamw {LOW_RANK}", 0.03),
    "galore 8-bit": (f"optimizer.name=galore_adamw8bit {LOW_RANK}", None),
    "galore, residual": (f"optimizer.name=galore_adamw optimizer.residual=true {LOW_RANK}", 0.03),
    "qgalore, int8": (f"precision.parameters=int8 optimizer.name=qgalore {LOW_RANK}", 0.05),
    "qgalore, int8, residual": (
        f"precision.parameters=int8 optimizer.name=qgalore optimizer.residual=true {LOW_RANK}",
        0.05,
    ),
    "apollo_mini": ("optimizer.name=apollo_mini optimizer.learning_rate=1e-2", 0.02),
    "apollo_mini, int8": ("precision.parameters=int8 optimizer.name=apollo_mini optimizer.learning_rate=1e-2", 0.10),
}
PEERS = {"adamw, torch": None, "galore, galore-torch": None}  # recorded by scripts/measure/galore_torch.py
SEEDS = (0, 1, 2)


def train(methods: list[str], seeds: list[int], steps: int | None) -> None:
    import jax

    import jaxmem

    for seed in seeds:
        for method in methods:
            overrides, _ = METHODS[method]
            if steps is not None:
                overrides += f" train.steps={steps} train.evaluate_every={steps}"
            if any((r["method"], r["seed"], r["overrides"]) == (method, seed, overrides) for r in records()):
                continue
            name = f"quality-{method.replace(', ', '-').replace(' ', '-')}-{steps or 'all'}-{seed}"
            cfg = jaxmem.load_config(
                ROOT / "configs" / "quality.yaml", [*overrides.split(), f"seed={seed}", f"name={name}"]
            )
            result = jaxmem.train(cfg)
            if result.exit_code or result.step < cfg.steps:  # stopped: the next call goes on with it
                raise SystemExit(result.exit_code or 1)
            logged = (result.directory / "metrics.jsonl").read_text().splitlines()
            curve = [(one["step"], one["loss"]) for one in map(json.loads, logged) if "loss" in one]
            record = {
                "method": method,
                "seed": seed,
                "overrides": overrides,
                "held_out": result.held_out["loss"],
                "curve": curve,
                "steps": result.step,
                "date": dt.date.today().isoformat(),
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "python": platform.python_version(),
            }
            RECORDS.parent.mkdir(parents=True, exist_ok=True)
            with RECORDS.open("a") as file:
                file.write(json.dumps(record) + "\n")


def records() -> list[dict]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


class Row(NamedTuple):
    """A method's seeds beside AdamW's: held-out loss, and what it is above."""

    method: str
    seeds: int
    loss: float
    above: float
    error: float  # the standard error of `above`
    goal: float | None


def compared() -> Iterator[Row]:
    found = {(r["method"], r["seed"]): r["held_out"] for r in records() if "train.steps" not in r["overrides"]}
    goals = {method: None if method == BASE else goal for method, (_, goal) in METHODS.items()}
    for method, goal in {**goals, **PEERS}.items():
        seeds = [s for s in SEEDS if (method, s) in found and (BASE, s) in found]
        if not seeds:
            continue
        above = [found[method, s] - found[BASE, s] for s in seeds]
        error = statistics.stdev(above) / len(above) ** 0.5 if len(above) > 1 else float("nan")
        loss = statistics.mean(found[method, s] for s in seeds)
        yield Row(method, len(seeds), loss, statistics.mean(above), error, goal)


def table(png: Path | None) -> None:
    rows = list(compared())
    print("| method | seeds | loss | above AdamW | goal |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        beside = "" if row.method == BASE else f"{row.above:+.4f} ± {row.error:.4f}"
        goal = "" if row.goal is None else f"{row.goal:.3f}"
        print(f"| {row.method} | {row.seeds} | {row.loss:.4f} | {beside} | {goal} |")
    if png:
        draw([row for row in rows if row.method != BASE], png)


def draw(rows: list[Row], png: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        axes.errorbar(row.above, place, xerr=row.error, fmt="o", color="C0", capsize=3)
        if row.goal is not None:
            axes.plot(row.goal, place, "|", color="C3", markersize=14)
    axes.axvline(0, color="gray", linestyle=":")
    axes.set_yticks(range(len(rows)), [row.method for row in reversed(rows)])
    axes.set(xlabel="held-out loss above float32 AdamW's, nats a byte (red: what is allowed)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(png, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "table"])
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("-s", "--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="other than the config's: to look for learning rates")
    parser.add_argument("--png", type=Path, help="the table as a figure")
    given = parser.parse_args()
    if unknown := set(given.methods) - set(METHODS):
        parser.error(f"no method {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    train(given.methods, given.seeds, given.steps) if given.what == "train" else table(given.png)
