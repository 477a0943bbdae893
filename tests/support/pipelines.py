"""Every pipeline schedule with every recompute policy and ZeRO stage, compared with one device.

    python -m tests.support.pipelines                     # all 180 combinations
    python -m tests.support.pipelines 1f1b full zero=2    # only those with these names

Each combination makes two updates of a tiny model on 8 simulated devices (2 stages x 2 replicas x 2 shards), with
dropout and with a layer that has to be padded. A table entry is the largest relative difference of the losses, gradient
norms and weights from those of one device without a recompute policy. The exit status is 1 if one is over `TOLERANCE`.
"""

import itertools
import sys
from collections import defaultdict

import jax
import numpy as np

import tests.conftest  # noqa: F401, sets the flags of XLA
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Config
from jaxmem.config.recompute import POLICIES
from tests.step.conftest import Trained
from tests.step.test_pipeline import devices_of, staged

TOLERANCE = 2e-5
ROUNDS = {"gpipe": 1, "circular": 2, "1f1b": 1, "interleaved_1f1b": 2}
NAMED = "save"  # the policy {save: [attention, mlp_hidden]}
RECOMPUTE = [*(f"{name}_2" if policy.has_number else name for name, policy in POLICIES.items()), NAMED]
STAGES = range(4)  # of ZeRO
COMBINATIONS = list(itertools.product(ROUNDS, RECOMPUTE, STAGES))
SECTIONS = {"layers": 7, "dropout": 0.2}


def config(schedule: str, remat: str, zero: int) -> Config:
    policy = {"save": ["attention", "mlp_hidden"]} if remat == NAMED else remat
    mesh = {"stage": 2, "replica": 2, "fsdp": 2}
    how = {"schedule": schedule, "rounds": ROUNDS[schedule], "memory": {"remat": policy}, "zero": zero}
    return staged(mesh, **SECTIONS, **how)


def difference(cfg: Config, alone: Trained) -> float:
    """The largest difference of metrics and weights after two updates, relative to their size."""
    run = Trained(cfg, devices_of(cfg), updates=2)
    expected = SavedState(run.built).complete_params(alone.params, alone.built.cfg.model_dump())
    pairs = [*zip(jax.tree.leaves(run.metrics), jax.tree.leaves(alone.metrics), strict=True)]
    pairs += zip(jax.tree.leaves(run.params), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-3)) for a, b in pairs)


def main(names: list[str]) -> int:
    alone = Trained(staged({}, **SECTIONS), updates=2)
    chosen = [one for one in COMBINATIONS if all(name in (one[0], one[1], f"zero={one[2]}") for name in names)]
    rows: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    failed = 0
    print("| schedule | recompute | " + " | ".join(f"zero={zero}" for zero in STAGES) + " |")
    print("| --- " * 6 + "|")
    for schedule, remat, zero in chosen:
        try:
            found = difference(config(schedule, remat, zero), alone)
            failed += found > TOLERANCE
            rows[schedule, remat][zero] = f"{found:.0e}"
        except Exception as error:  # noqa: BLE001, any error is a failure of this combination
            failed += 1
            rows[schedule, remat][zero] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if zero == max(stage for *one, stage in chosen if (*one,) == (schedule, remat)):
            entries = (rows[schedule, remat].get(zero, "") for zero in STAGES)
            print(f"| {schedule} | {remat} | " + " | ".join(entries) + " |", flush=True)
    print(f"{len(chosen)} combinations, {failed} over {TOLERANCE}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
