"""The memory of a step by the number of sequences per device, and the largest number that fits, with and without
recompute. Bytes are estimated; the largest that fits on the target is also compiled."""

import bisect
from collections.abc import Sequence

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.estimate.memory import Estimate
from jaxmem.planning.budget import estimated
from jaxmem.planning.targets import Target, parse_target, usable_memory
from jaxmem.typing import JsonDict
from scripts.course import Findings, common, main
from scripts.course.panels import Bars, LinePlot
from scripts.course.table import Table, gib

BASE = common.CONFIGS["batch_size"]["base"]
POLICIES = common.rows_of("batch_size", "policies")
BATCHES = (1, 4, 16, 64, 256, 512)  # sequences
MOST = 4096  # the search ends at this number of sequences
CARDS = {"10 GB": "rtx3080-10gb", "24 GB": "rtx4090-24gb", "80 GB": "h100-80gb"}
FLOOR = "weights and optimizer state"
STATE = ("parameters", "quantization", "master", "optimizer")


def measure(target: str) -> Findings:
    kind = common.require_gpus("batch_size", target, 1)
    aim = parse_target(f"{kind}:1")
    curves = {name: [estimate_batch(aim, policy, batch) for batch in BATCHES] for name, policy in POLICIES.items()}
    floor = sum(next(iter(curves.values()))[0].categories[category] for category in STATE)
    sizes = [
        {"sequences": batch, FLOOR: gib(floor), **{name: gib(curve[n].total) for name, curve in curves.items()}}
        for n, batch in enumerate(BATCHES)
    ]
    memory = Table(f"{common.title(BASE)} each, on one {kind}: GiB, estimated", sizes)
    fits = [
        {"GPU": name, "usable, GiB": gib(_usable(parse_target(card)))}
        | {policy: largest_batch(parse_target(card), overrides) for policy, overrides in POLICIES.items()}
        for name, card in CARDS.items()
    ]
    most = Table("Sequences that fit, estimated", fits)
    compiled = _compile(aim)
    lines = LinePlot.of(memory, "sequences", "GiB", (*POLICIES, FLOOR), "xy")
    points = {f"{row['policy']}, compiled": [(row["sequences"], row["compiled, GiB"])] for row in compiled}
    errors = [row["estimated, GiB"] / row["compiled, GiB"] - 1 for row in compiled]
    return Findings(
        [memory, most, Table(f"The most that fits on {kind}, compiled", compiled)],
        {"floor": gib(floor), "least": min(errors), "most": max(errors), "rows": fits},
        [
            LinePlot(
                "Memory by batch size, estimated",
                "sequences per device",
                "GiB",
                {**lines.series, **points},
                "xy",
                {row["GPU"]: row["usable, GiB"] for row in fits},
            ),
            Bars(most, list(POLICIES), "The most sequences that fit", grouped=True),
        ],
    )


def estimate_batch(aim: Target, overrides: Sequence[str], batch: int) -> Estimate:
    cfg = load_config(BASE, [*overrides, f"batch.global_size={batch}"])
    return estimated(for_devices(cfg, 1), aim)


def largest_batch(aim: Target, overrides: Sequence[str]) -> int:
    """The most sequences that fit; 0 if not even one does."""
    limit = _usable(aim)

    def is_too_large(batch: int) -> bool:
        return estimate_batch(aim, overrides, batch).total > limit

    return bisect.bisect_left(range(1, MOST + 1), True, key=is_too_large)


def _usable(aim: Target) -> int:
    return usable_memory(aim, load_config(BASE).memory)


def _compile(aim: Target) -> list[JsonDict]:
    """Estimated and compiled bytes of the largest batch of each policy of which any fits."""
    largest = {name: largest_batch(aim, overrides) for name, overrides in POLICIES.items()}
    rows = {
        name: (*overrides, f"batch.global_size={largest[name]}")
        for name, overrides in POLICIES.items()
        if largest[name]
    }
    plans = common.plans(aim.name, BASE, rows)
    return [
        {
            "policy": name,
            "sequences": largest[name],
            "estimated, GiB": gib(estimate_batch(aim, POLICIES[name], largest[name]).total),
            "compiled, GiB": gib(plan["bytes_per_device"]["total"]),
        }
        for name, plan in plans.items()
    ]


if __name__ == "__main__":
    main(__file__)
