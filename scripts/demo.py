"""One screen about the run of configs/demo.yaml: its text, its memory, and the effect of lines of its config.

jaxmem train configs/demo.yaml --simulate 2
python scripts/demo.py [CHANGE]...
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The sizes of buffers do not depend on the optimization of the code for CPUs; this halves the compile time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax

import jaxmem
from jaxmem.inference.chat import TextGenerator
from jaxmem.inference.generate import Sampling
from jaxmem.planning.result import plan_program
from jaxmem.step.programs import program

RUN = Path("runs/demo")
PROMPTS = (
    "    def __",
    "    def close(self",
    "        if x is",
    "            raise",
    "        raise Type",
    "    try:\n        return int(x)\n    except Value",
)
CATEGORIES = ("parameters", "gradients", "optimizer", "activations")
DEVICES = 2  # as in the run
CHANGES = ("zero=3", "zero=0", "memory.remat=full")
MIB = 2**20
WIDTH = min(shutil.get_terminal_size().columns, 80)
NEXT = """
Next:
  . .venv/bin/activate
  jaxmem generate runs/demo \\
      --prompt '    def __' --temperature 0
  jaxmem plan configs/demo.yaml \\
      --simulate 2 memory.remat=full
  jaxmem doctor
Your GPU and your model: README.md"""


def continuations() -> Iterator[str]:
    """The last line of each prompt, and its most likely continuation."""
    model = TextGenerator(RUN, Sampling(0.0), tokens=10, stops=["\n"])
    for prompt, text in zip(PROMPTS, model.complete_all(PROMPTS), strict=True):
        yield f"  {prompt.splitlines()[-1].strip():>14} | {text.strip()}"[:WIDTH]


def bar(name: str, size: float, largest: float) -> str:
    """A name, a size, and a bar. On a narrow terminal a setting is named without its section."""
    label = f"{name:25}" if WIDTH >= 60 else f"{name.rpartition('.')[2]:15}"
    start = f"  {label}{size / MIB:5.1f} MiB "
    return start + "#" * max(1, round((WIDTH - len(start)) * size / largest))


def compiled(change: str) -> int:
    """Planned bytes per device of the demo's step, with one line of its config changed."""
    cfg = jaxmem.load_config("configs/demo.yaml", (change,))
    return plan_program(program(cfg, jax.devices())).bytes_per_device["total"]


def main(changes: Sequence[str]) -> None:
    jaxmem.simulate(DEVICES)
    print("\nThe trained model completes lines of Python", flush=True)
    print(*continuations(), sep="\n")

    plan = json.loads((RUN / "plan.json").read_text())
    here = plan["bytes_per_device"]
    count = plan["target"]["devices"]
    total = here["total"]
    print(f"\nMemory per device, on {count}: {total / MIB:.0f} MiB")
    for category in CATEGORIES:
        print(bar(category, here[category], total))
    print(bar("other", total - sum(here[category] for category in CATEGORIES), total))

    print(f"\nThe same step on {DEVICES} devices, with one line of its config changed", flush=True)
    with ThreadPoolExecutor(2) as pool:
        sizes = dict(zip(changes, pool.map(compiled, changes), strict=True))
    for change, size in sizes.items():
        print(bar("no change" if change == CHANGES[0] else change, size, max(sizes.values())), flush=True)
    print(f"Activations are {here['activations'] / total:.0%} of the memory of so small a model.")
    print("In large models weights and optimizer state are most: see README.md")
    print(NEXT)


if __name__ == "__main__":
    main(sys.argv[1:] or CHANGES)
