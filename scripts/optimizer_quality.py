"""What few bytes cost in quality: one small model trained by every optimizer and precision, from the same weights on
the same batches, for several seeds. The table and figure of docs/optimizers.md.

    python scripts/optimizer_quality.py train                    # goes on where it stopped; some hours on two cores
    python scripts/optimizer_quality.py train adamw8bit -s 0     # one method, one seed
    python scripts/optimizer_quality.py table                    # of what has been recorded

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
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "benchmarks" / "optimizer-quality.jsonl"
BASE = "adamw"
METHODS = {  # and the most that its loss may be above AdamW's
    BASE: ("", 0.0),
    "bfloat16": ("precision.parameters=bfloat16", None),
    "bfloat16, stochastic": ("precision.parameters=bfloat16 precision.rounding=stochastic", 0.01),
    "bfloat16, remainder16": ("precision.parameters=bfloat16 precision.master=remainder16", 0.002),
    "bfloat16, remainder8": ("precision.parameters=bfloat16 precision.master=remainder8", 0.002),
    "adamw8bit": ("optimizer.name=adamw8bit", 0.002),
    "adamw4bit": ("optimizer.name=adamw4bit", None),
    "galore": ("optimizer.name=galore_adamw optimizer.learning_rate=1e-2", 0.03),
    "galore 8-bit": ("optimizer.name=galore_adamw8bit optimizer.learning_rate=1e-2", None),
    "qgalore, int8": ("precision.parameters=int8 optimizer.name=qgalore optimizer.learning_rate=1e-2", 0.05),
    "apollo_mini": ("optimizer.name=apollo_mini optimizer.learning_rate=1e-2", 0.02),
    "apollo_mini, int8": ("precision.parameters=int8 optimizer.name=apollo_mini optimizer.learning_rate=1e-2", 0.10),
}
PEERS = {"adamw, torch": None, "galore, galore-torch": None}  # recorded by scripts/compare_galore.py
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
            if result.exit_code:
                raise SystemExit(result.exit_code)
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


def table() -> None:
    found = {(r["method"], r["seed"]): r["held_out"] for r in records() if "train.steps" not in r["overrides"]}
    print("| method | seeds | loss | above AdamW | goal |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for method, goal in {**{name: goal for name, (_, goal) in METHODS.items()}, **PEERS}.items():
        seeds = [s for s in SEEDS if (method, s) in found and (BASE, s) in found]
        if not seeds:
            continue
        above = [found[method, s] - found[BASE, s] for s in seeds]
        error = statistics.stdev(above) / len(above) ** 0.5 if len(above) > 1 else float("nan")
        loss = statistics.mean(found[method, s] for s in seeds)
        wanted = "" if goal is None or method == BASE else f"{goal:.3f}"
        print(f"| {method} | {len(seeds)} | {loss:.4f} | {statistics.mean(above):+.4f} ± {error:.4f} | {wanted} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "table"])
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("-s", "--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="other than the config's: to look for learning rates")
    given = parser.parse_args()
    if unknown := set(given.methods) - set(METHODS):
        parser.error(f"no method {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    train(given.methods, given.seeds, given.steps) if given.what == "train" else table()
