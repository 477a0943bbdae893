"""The layers that are saved, recomputed and freed, tick by tick, under each policy; and inference in two buffers."""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from jaxmem.machine.terminal import say_text
from jaxmem.stack.recompute_plan import recompute_plan
from scripts.course import Findings, main
from scripts.course.panels import DARK, PALE, Cells
from scripts.course.table import Table

LAYERS = 16
HELD, AGAIN = "inputs in memory, at most", "layers run again"
POLICIES = ("every_2", "sqrt", "recursive", "slots_4")
# What happens to the input of a layer in a tick.
KEY = {
    ".": ("not in memory", PALE),
    "s": ("saved", "#7a8c9c"),
    "F": ("forward", DARK),
    "R": ("recomputed", "#d55e00"),
    "B": ("backward", "#f0c75e"),
}
SIGNS = {".": "·", "s": "■", "F": "F", "R": "R", "B": "B"}  # in the terminal
CELL, LINE, TICK = 14, 30, 0.35  # of the animation: pixels of a cell and of a row, seconds of a tick
SQUARE = f'width="{CELL}" height="{CELL}" stroke="#555"'


def measure(layers: int) -> Findings:
    chains = {"save all (full)": list(save_all(layers))}
    chains |= {policy: list(frames(policy, layers)) for policy in POLICIES}
    chains["inference, two buffers"] = list(inference(layers))
    rows = [
        {
            "policy": name,
            "ticks": len(chain),
            HELD: max(layers - frame.count(".") for frame in chain),
            AGAIN: sum("R" in frame for frame in chain),
        }
        for name, chain in chains.items()
    ]
    by_name = {row["policy"]: row for row in rows}
    facts = {
        "layers": layers,
        "all": by_name["save all (full)"][HELD],
        "root_held": by_name["sqrt"][HELD],
        "root_again": by_name["sqrt"][AGAIN],
    }
    longest = max(map(len, chains.values()))
    panels = [Cells(name, over_time(chain), KEY, y="layer", row=0.13, end=longest) for name, chain in chains.items()]
    return Findings([Table(f"A chain of {layers} layers", rows)], facts, panels, (7, 7), animation(chains))


def frames(policy: str, layers: int) -> Iterator[str]:
    """The state of the input of each layer in each tick of a forward and a backward pass: a letter of KEY."""
    plan = recompute_plan(policy, layers)
    assert plan is not None
    slots: dict[int, int] = {0: 0}  # slot -> the layer whose input it has
    for layer in range(layers):
        yield _frame(layers, slots, layer, "F")
        if layer + 1 < layers:
            slots[plan.forward_slots[layer + 1]] = layer + 1
    for layer in reversed(range(layers)):
        for again, _, target in plan.steps[plan.begin[layer] : plan.end[layer]]:
            yield _frame(layers, slots, again, "R")
            slots[target] = again + 1
        yield _frame(layers, slots, layer, "B")
        slots = {slot: saved for slot, saved in slots.items() if saved < layer}


def save_all(layers: int) -> Iterator[str]:
    """The input of every layer is saved."""
    for layer in range(layers):
        yield _frame(layers, {n: n for n in range(layer)}, layer, "F")
    for layer in reversed(range(layers)):
        yield _frame(layers, {n: n for n in range(layer)}, layer, "B")


def inference(layers: int) -> Iterator[str]:
    """Only the input and the output of the running layer are in memory."""
    for layer in range(layers):
        yield _frame(layers, {0: min(layer + 1, layers - 1)}, layer, "F")


def _frame(layers: int, slots: Mapping[int, int], running: int, letter: str) -> str:
    saved = set(slots.values())
    return "".join(letter if n == running else "s" if n in saved else "." for n in range(layers))


def over_time(chain: Sequence[str]) -> dict[str, str]:
    """A row per layer, the last one on top, and a column per tick."""
    layers = len(chain[0])
    return {str(n) if n % 4 == 0 else " " * n: "".join(frame[n] for frame in chain) for n in reversed(range(layers))}


def animation(chains: Mapping[str, Sequence[str]]) -> str:
    """An SVG in which each chain is a row of layers that change their colours; browsers run it without a script."""
    ticks = max(map(len, chains.values()))
    layers = len(next(iter(chains.values()))[0])
    shapes = []
    for row, (name, chain) in enumerate(chains.items()):
        y = 10 + row * LINE
        shapes.append(_label(8, y, name))
        for layer in range(layers):
            colours = [KEY[frame[layer]][1] for frame in chain] + [PALE] * (ticks - len(chain))
            times = f'dur="{ticks * TICK:g}s" calcMode="discrete" repeatCount="indefinite"'
            animate = f'<animate attributeName="fill" values="{";".join(colours)}" {times}/>'
            shapes.append(f'<rect x="{180 + layer * (CELL + 4)}" y="{y}" {SQUARE}>{animate}</rect>')
    y = 10 + len(chains) * LINE
    for number, (meaning, colour) in enumerate(KEY.values()):
        x = 8 + 98 * number
        shapes += (f'<rect x="{x}" y="{y}" {SQUARE} fill="{colour}"/>', _label(x + 18, y, meaning))
    size = f'width="{max(500, 190 + layers * (CELL + 4))}" height="{y + LINE}"'
    style = '<style>text{font:12px sans-serif}</style><rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(shapes)}</svg>\n'


def _label(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y + 11}">{text}</text>'


def play(policy: str = "sqrt", layers: int = LAYERS, seconds: float = 0.15) -> None:
    """Prints the frames of a policy: on a terminal one over the other, otherwise a line each."""
    end = "\r" if sys.stdout.isatty() and shutil.get_terminal_size().columns > 2 * layers + 20 else "\n"
    signs = ", ".join(f"{SIGNS[letter]} {name}" for letter, (name, _) in KEY.items())
    say_text(f"\n{policy}, the layers in each tick ({signs}):")
    for tick, frame in enumerate(frames(policy, layers)):
        print(f"tick {tick:3}  {' '.join(SIGNS[letter] for letter in frame)}", end=end, flush=True)
        time.sleep(seconds if end == "\r" else 0)
    print()


if __name__ == "__main__":
    main(__file__)
    play()
