"""One matmul and its update, compiled for 2 x 4 GPUs in each layout: the blocks of each device, and the collectives."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxmem.config import load_config
from jaxmem.planning.compile import compile_program
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.planning.timeline import Timeline, timeline
from jaxmem.sharding.layout import Layout, layout_for
from jaxmem.sharding.table import Axes
from scripts.course import Findings, common, main
from scripts.course.panels import Blocks
from scripts.course.table import Row, Table

GPUS = 8
ROWS, COLUMNS, TOKENS = 4096, 8192, 16384
MIB = 2**20
SENT = "collectives (devices)"
# What GSPMD, the part of XLA that divides programs, calls the communication that it adds.
EXPLAINED = {
    "all-gather": "each device sends its block to all; then all have the complete array",
    "all-reduce": "the arrays of all devices are added; then all have the complete sum",
    "reduce-scatter": "the arrays of all devices are added; then each has a block of the sum",
}


class Case(NamedTuple):
    """A layout of configs.yaml, and the logical axes of the weight, of the input and of the result."""

    overrides: Sequence[str]
    weight: Axes = ("embed", "mlp")
    input: Axes = ("batch", "embed")
    result: Axes = ("batch", None)


CASES = {name: Case(overrides) for name, overrides in common.rows_of("shardings", "layouts").items()}
# The rows of the weight are sharded, so each device has a part of each sum.
CASES["tensor, all-reduce"] = CASES["tensor, all-reduce"]._replace(weight=("mlp", "embed"), input=("batch", "mlp"))


def measure(target: str) -> Findings:
    kind = common.require_gpus("shardings", target, GPUS)
    devices = target_devices(parse_target(f"{kind}:{GPUS}"), 10**12)
    rows, panels = [], []
    for name, case in CASES.items():
        layout = layout_for(load_config(common.CONFIGS["shardings"]["base"], case.overrides), devices)
        arrays = shardings(layout, case)
        rows.append(_row(name, arrays, timed(layout, case, f"{kind}:{GPUS}")))
        column = [_blocks(part, *array, titled=not panels) for part, array in arrays.items()]
        column[0] = replace(column[0], title=name.replace(", ", "\n").replace(": ", "\n"))
        column[-1] = replace(column[-1], x=rows[-1][SENT].replace(", ", "\n"))
        panels.append(column)
    kinds = Table("The names of the communication", [{"collective": k, "what": v} for k, v in EXPLAINED.items()])
    title = f"A weight of {ROWS:,} x {COLUMNS:,} in float32, {TOKENS:,} tokens, on {GPUS} x {kind}, per device"
    whole = rows[0]["weight, MiB"]
    facts = {"whole": whole, "zero3": rows[3]["weight, MiB"], "moved": rows[0]["sent, MiB"] / whole}
    by_array = [column[line] for line in range(len(panels[0])) for column in panels]
    return Findings([Table(title, rows), kinds], facts, by_array, [1.6] * len(CASES))


def shardings(layout: Layout, case: Case) -> dict[str, tuple[NamedSharding, tuple[int, int]]]:
    """The sharding and the shape of each array, by the tables of `jaxmem.sharding.table`."""
    shape = (ROWS, COLUMNS)
    return {
        "weight": (layout.sharding("weights", case.weight, shape), shape),
        "gradient": (layout.sharding("gradients", case.weight, shape), shape),
        "optimizer state": (layout.sharding("optimizer", case.weight, shape), shape),
        "input": (layout.sharding("activations", case.input, (TOKENS, ROWS)), (TOKENS, ROWS)),
    }


def step(layout: Layout, case: Case) -> Any:
    """The jitted step of gradient descent with momentum: (weight, moment, x) -> (weight, moment). Only the places of
    arrays are stated; GSPMD adds the communication."""
    places = {name: place for name, (place, _) in shardings(layout, case).items()}

    def run(weight: jax.Array, moment: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weight: jax.Array) -> jax.Array:
            weight = put(weight, layout.sharding("compute", case.weight, weight.shape))
            result = x @ weight
            result = put(result, layout.sharding("activations", case.result, result.shape))
            return jnp.sum(result * result)

        gradient = put(jax.grad(loss)(weight), places["gradient"])
        moment = put(0.9 * moment + gradient, places["optimizer state"])
        return weight - put(moment, places["weight"]), moment

    put = jax.lax.with_sharding_constraint
    return jax.jit(run, out_shardings=(places["weight"], places["optimizer state"]))


def timed(layout: Layout, case: Case, target: str) -> Timeline:
    places = shardings(layout, case)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        for place, shape in (places[name] for name in ("weight", "optimizer state", "input"))
    ]
    lowered = step(layout, case).lower(*arguments)
    aim = parse_target(target)
    return timeline(compile_program(lowered, here=False).module, aim.gpu, aim.count, aim.per_host)


def _row(name: str, arrays: Mapping[str, tuple[NamedSharding, tuple[int, int]]], timed: Timeline) -> Row:
    sizes = {part: 4 * _size(*array) / MIB for part, array in arrays.items()}
    counts = Counter(
        (sent.message.kind, sent.message.group) for sent in timed.collectives if sent.message.wire_bytes > MIB
    )
    return {
        "layout": name,
        **{f"{part}, MiB": size for part, size in sizes.items()},
        "sent, MiB": timed.network.wire_bytes / MIB,
        SENT: ", ".join(f"{kind} ({group})" for kind, group in sorted(counts)),
    }


def _size(place: NamedSharding, shape: tuple[int, int]) -> int:
    """Elements of the block of a device."""
    rows, columns = place.shard_shape(shape)
    return rows * columns


def _blocks(part: str, place: NamedSharding, shape: tuple[int, int], *, titled: bool) -> Blocks:
    """The blocks of an array, with the numbers of the devices that have each of them."""
    number = {device: n for n, device in enumerate(place.mesh.devices.flat)}
    owners: dict[tuple[int, int, int, int], list[int]] = {}
    for device, (down, across) in place.devices_indices_map(shape).items():
        (top, bottom, _), (left, right, _) = down.indices(shape[0]), across.indices(shape[1])
        owners.setdefault((top, left, bottom - top, right - left), []).append(number[device])
    copies = len(next(iter(owners.values())))
    texts = {block: _numbers(sorted(devices)) for block, devices in owners.items()}
    return Blocks("", texts, (copies - 1) / (GPUS - 1), part if titled else "")


def _numbers(devices: Sequence[int]) -> str:
    """The numbers of devices; a range if they are consecutive."""
    if len(devices) > 2 and devices[-1] - devices[0] == len(devices) - 1:
        return f"{devices[0]}-{devices[-1]}"
    return " ".join(map(str, devices))


if __name__ == "__main__":
    main(__file__)
