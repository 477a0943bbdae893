"""What a config needs on several kinds of GPUs, without a GPU; and the fastest settings on the last of them.

python scripts/plan.py configs/llama3-8b-qlora.yaml rtx4060ti-16gb rtx4090-24gb
python scripts/plan.py configs/llama3-8b.yaml h100-80gb:8 h100-80gb:2x8 --fit
"""

import argparse
from collections.abc import Sequence

import jaxmem
from jaxmem.planning.units import format_bytes, format_seconds

CATEGORIES = ("parameters", "gradients", "optimizer", "activations")


def row(config: jaxmem.Config, target: str) -> list[str]:
    """The bytes per device and the time of a step that is compiled for a target."""
    plan = jaxmem.plan(config, target)
    sizes = plan.bytes_per_device
    seconds = plan.as_json()["estimated_step_seconds"]  # None for CPUs
    fits = "fits" if plan.fits else "does not fit"
    cells = [format_bytes(sizes[category]) for category in CATEGORIES]
    return [target, *cells, format_bytes(sizes["total"]), format_seconds(seconds) if seconds else "", fits]


def main(config: str, targets: Sequence[str], overrides: Sequence[str] = (), *, fit: bool = False) -> None:
    cfg = jaxmem.load_config(config, overrides)
    print("  ".join(f"{name:>14}" for name in ("target", *CATEGORIES, "per device", "step")))
    for target in targets:
        print("  ".join(f"{cell:>14}" for cell in row(cfg, target)), flush=True)
    if fit:
        result = jaxmem.fit(cfg, targets[-1], progress=print)
        print(result.best.description if result.best else "no config fits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plan a config on several targets.")
    parser.add_argument("config")
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="such as h100-80gb:8, or cpu:2")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="change the config")
    parser.add_argument("--fit", action="store_true", help="search for the fastest settings on the last target")
    options = parser.parse_args()
    main(options.config, options.targets, options.set, fit=options.fit)
