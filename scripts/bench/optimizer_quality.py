"""The quality of optimizers and precisions: one small model is trained with each, from the same weights on the same
batches, for several seeds. Makes the table and the figure of docs/optimizers.md.

    python scripts/bench/optimizer_quality.py train                  # resumes; some hours on two cores
    python scripts/bench/optimizer_quality.py train adamw8bit -s 0   # one method, one seed
    python scripts/bench/optimizer_quality.py table --png FILE       # of the recorded runs

Each run adds a record to docs/benchmarks/optimizer-quality.jsonl. The table compares the loss on held-out documents
after the last update with that of float32 AdamW with the same seed. The methods are in optimizer_quality.yaml."""

import argparse
import datetime as dt
import json
import os
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmem.typing import JsonDict

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import yaml

from jaxmem.report.figure import figure
from scripts.course.table import Table

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/quality.yaml"
RECORDS = ROOT / "docs/benchmarks/optimizer-quality.jsonl"
SEEDS = (0, 1, 2)
BASE = "adamw"
METHODS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())  # name -> overrides, goal
PEERS = {"adamw, torch": BASE, "galore, galore-torch": "galore"}  # recorded by tests/optim/galore_torch.py


def train(methods: list[str], seeds: list[int], steps: int | None) -> None:
    import jax

    from jaxmem.config import load_config
    from jaxmem.training.run import run

    for seed in seeds:
        for method in methods:
            overrides, _ = METHODS[method]
            if steps is not None:
                overrides += f" train.steps={steps} train.evaluate_every={steps}"
            if any((r["method"], r["seed"], r["overrides"]) == (method, seed, overrides) for r in records()):
                continue
            name = f"quality-{method.replace(', ', '-').replace(' ', '-')}-{steps or 'all'}-{seed}"
            cfg = load_config(CONFIG, [*overrides.split(), f"seed={seed}", f"name={name}"])
            result = run(cfg)
            if result.exit_code or result.step < cfg.steps:  # stopped: the next call resumes it
                raise SystemExit(result.exit_code or 1)
            rows = map(json.loads, (result.directory / "metrics.jsonl").read_text().splitlines())
            curve = [(row["step"], row["loss"]) for row in rows if "loss" in row]
            versions = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
            add_record(
                method, seed, overrides, held_out=result.held_out["loss"], curve=curve, steps=result.step, **versions
            )


def add_record(method: str, seed: int, overrides: str, **outcome: Any) -> None:
    record = {"method": method, "seed": seed, "overrides": overrides, **outcome}
    record |= {"date": dt.date.today().isoformat(), "python": platform.python_version()}
    with RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")


def records() -> list[JsonDict]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


def compared() -> Iterator[JsonDict]:
    """A row per method: means over seeds, and the standard error of the difference from AdamW's loss. A run is compared
    with the last run of AdamW that is recorded before it: that of the same code."""
    base: dict[int, float] = {}
    losses: dict[tuple[str, int], tuple[float, float]] = {}  # of a method and seed: its loss, and AdamW's
    for record in records():
        seed = record["seed"]
        if "train.steps" in record["overrides"]:
            continue
        if record["method"] == BASE:
            base[seed] = record["held_out"]
        if seed in base:
            losses[record["method"], seed] = record["held_out"], base[seed]
    for method in (*METHODS, *PEERS):
        of_seeds = [losses[method, seed] for seed in SEEDS if (method, seed) in losses]
        if of_seeds:
            above = [loss - of_adamw for loss, of_adamw in of_seeds]
            yield {
                "method": method,
                "seeds": len(of_seeds),
                "loss": statistics.mean(loss for loss, _ in of_seeds),
                "above AdamW": f"{statistics.mean(above):+.4f}",
                "error": f"{statistics.stdev(above) / len(above) ** 0.5:.4f}" if len(above) > 1 else None,
                "goal": METHODS.get(method, (None, None))[1],
            }


def draw_compared(file: Path) -> None:
    rows = [row for row in compared() if row["method"] != BASE]
    with figure(file, 7, 0.5 + 0.35 * len(rows)) as canvas:
        axes = canvas.subplots()
        for place, row in enumerate(reversed(rows)):
            error = float(row["error"] or "nan")
            axes.errorbar(float(row["above AdamW"]), place, xerr=error, fmt="o", color="C0", capsize=3)
            if row["goal"] is not None:
                axes.plot(row["goal"], place, "|", color="C3", markersize=14)
        axes.axvline(0, color="gray", linestyle=":")
        axes.set_yticks(range(len(rows)), [row["method"] for row in reversed(rows)])
        axes.set_title("Quality: held-out loss relative to float32 AdamW", fontsize=10)
        axes.set(xlabel="loss above float32 AdamW, nats per byte (red: goal)")
        axes.grid(axis="x", alpha=0.3)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["train", "table"])
    options.add_argument("methods", nargs="*", default=list(METHODS))
    options.add_argument("-s", "--seeds", nargs="+", type=int, default=list(SEEDS))
    options.add_argument("--steps", type=int, help="number of updates, instead of that of the config")
    options.add_argument("--png", type=Path, help="the table as a figure")
    args = options.parse_args()
    if unknown := set(args.methods) - set(METHODS):
        options.error(f"unknown method {', '.join(sorted(unknown))}; expected one of {', '.join(METHODS)}")
    if args.what == "train":
        train(args.methods, args.seeds, args.steps)
        return
    print(Table("", list(compared())).markdown())
    if args.png:
        draw_compared(args.png)


if __name__ == "__main__":
    main()
