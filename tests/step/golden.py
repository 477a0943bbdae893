"""Losses that stay what they are: of a few updates of small models, recorded with the tests.

    python -m tests.step.golden             # how far this jax, on this machine, is from what is recorded
    python -m tests.step.golden --settings  # and the decoder with each setting that changes memory and time only
    python -m tests.step.golden --record    # in place of what is recorded

Every version of jax that jaxmem runs on must give them to rounding (TOLERANCE). Where they change:

- The change was to leave numbers alone (a refactor, a layout, a kernel): then it is wrong. `git bisect run python -m
tests.step.golden` finds it.
- The change is of the numbers (an initialiser, an optimizer's rule, a loss): record them anew in the same commit, whose
  message says why they moved and shows that what was trained got no worse (`scripts/bench/quality.py`).
- A new jax draws other random numbers, or rounds otherwise by more: the same, once for all versions; if they cannot
  agree, the version is no longer the same answer and docs/faults.md says so.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmem.config import Config, load_config
from jaxmem.machine.devices import simulate
from jaxmem.step.programs import Program, program

FILE = Path(__file__).parent / "data/golden.json"
UPDATES, TOLERANCE = 5, 2e-5  # of each loss
DECODER = {
    "preset": "tiny",
    "vocab": 264,
    "layers": 2,
    "embed": 32,
    "mlp": 64,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
}
PICTURES = {"family": "vit", "layers": 2, "embed": 32, "mlp": 64, "heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "decoder, adamw": {"model": DECODER},
    "decoder, adamw8bit": {"model": DECODER, "optimizer": {"name": "adamw8bit"}},
    "vit, lion": {
        "model": PICTURES,
        "objective": "classify",
        "data": {"source": "digits"},
        "optimizer": {"name": "lion"},
    },
}


# What changes memory and time, and no number: (sections, devices).
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "mesh": ({"mesh": {"fsdp": 4, "tensor": 2}}, 8),
    "groups": ({"mesh": {"replica": 2, "fsdp": 2, "context": 2}, "zero": 1}, 8),
    "stages": ({"mesh": {"stage": 2, "fsdp": 2}, "batch": {"global_size": 8, "accumulate": 2}}, 4),
    "micro-batches": ({"batch": {"global_size": 8, "accumulate": 4}, "mesh": {"fsdp": 2}}, 2),
    "recomputed": ({"memory": {"remat": "full"}}, 1),
    "by a schedule": ({"memory": {"remat": "sqrt"}}, 1),
    "in chunks": ({"memory": {"loss_chunk": 50, "mlp_chunk": 5, "head_groups": 2}}, 1),
    "attention by blocks": ({"memory": {"attention": "blockwise"}}, 1),
    "kept in host memory": ({"memory": {"remat": "full", "offload": ["activations", "optimizer"]}}, 1),
    "update during": ({"memory": {"update": "during"}, "optimizer": {"clip": None}}, 1),
    "all together": (
        {
            "mesh": {"fsdp": 2, "tensor": 2},
            "batch": {"global_size": 8, "accumulate": 2},
            "memory": {"remat": "full", "loss_chunk": 50, "mlp_chunk": 5, "head_groups": 2, "offload": "optimizer"},
        },
        4,
    ),
}


def config(name: str, **sections: Any) -> Config:
    given = MODELS[name]
    data = {"sequence_length": 24, **given.get("data", {})}
    # With the usual epsilon of 1e-8 Adam's update of a gradient near zero is its sign, which rounding decides.
    optimizer = {"learning_rate": 1e-2, "warmup": 2, **({"epsilon": 1e-3} if "adamw" in name else {})}
    optimizer |= given.get("optimizer", {}) | sections.pop("optimizer", {})
    base = {"name": "golden", "batch": {"global_size": 8}, "train": {"steps": 10}}
    return load_config({**base, **given, "data": data, "optimizer": optimizer, **sections})


def rows(built: Program, update: int) -> dict[str, np.ndarray]:
    """The same 8 rows for every cut into micro-batches: two documents in each row of tokens, a fifth of which does not
    count."""
    draw, found = np.random.default_rng(update), {}
    for name, spec in sorted(built.spec.batch.items()):
        shape = (8, *spec.shape[2:])
        if name == "mask":
            values: np.ndarray = draw.random(shape) < 0.8
        elif name in ("positions", "segment_ids"):
            place = np.arange(shape[-1])
            half = shape[-1] // 2
            values = np.broadcast_to(place % half if name == "positions" else 1 + place // half, shape)
        else:
            values = draw.integers(0, 10, shape)
        found[name] = values.reshape(spec.shape).astype(spec.dtype)
    return found


def losses(cfg: Config, devices: int = 1) -> list[float]:
    """Of each update, from new weights on."""
    return losses_of_runs(cfg, devices, 1)[0]


def losses_of_runs(cfg: Config, devices: int, runs: int) -> list[list[float]]:
    """Of one program that is run so often, each time from new weights on."""
    built = program(cfg, jax.devices()[:devices])
    step, found = built.lower_step().compile(), []
    for _ in range(runs):
        state, own = built.initialise(), []
        for update in range(UPDATES):
            state, metrics = step(state, built.place(rows(built, update)))
            own.append(float(metrics["loss"]))
        found.append(own)
    return found


def recorded() -> dict[str, list[float]]:
    return json.loads(FILE.read_text())


def off(mine: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(mine, theirs, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="in place of what is recorded")
    parser.add_argument("--settings", action="store_true", help="the decoder with each memory setting, on 8 devices")
    args = parser.parse_args()
    if args.settings:
        simulate(8)
    found = {name: losses(config(name)) for name in MODELS}
    if args.record:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    far = {name: off(found[name], theirs) for name, theirs in recorded().items()}
    for name, difference in far.items():
        print(f"{name:20} {found[name][-1]:.6f} after {UPDATES} updates, off by {difference:.1e}")
    base = "decoder, adamw"
    for way, (sections, devices) in WAYS.items() if args.settings else ():
        plain = {key: sections[key] for key in ("optimizer",) if key in sections}
        cfg = config(base, **sections)
        once, again = losses_of_runs(cfg, devices, 2)
        far[way] = off(once, losses(config(base, **plain)) if plain else found[base])
        same = once == again
        print(
            f"{way:20} off by {far[way]:.1e}, {'the same bits' if same else 'OTHER BITS'} when it runs again",
            flush=True,
        )
        far[way] = far[way] if same else 1.0
    return int(max(far.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
