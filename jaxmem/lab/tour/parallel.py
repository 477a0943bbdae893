"""Every way to split a model over devices: what each holds, sends, and how much of that nothing hides.

Data parallel devices hold all and split the batch; ZeRO takes away what each holds of the optimizer's state (1), the
gradients (2) and the weights (3); tensor parallel devices split each product, context parallel ones the sequence, and
stages the layers. A parameter server is the other way to be data parallel: all goes through one device's link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.lab.tour import compiled
from jaxmem.lab.tour.bars import stacked
from jaxmem.lab.tour.stops import SIMULATED, Columns, Found, Row, Shown, Stop
from jaxmem.machine import devices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET, GPUS = "h100-80gb", 8
BASE: dict[str, Any] = {
    "name": "tour",
    "model": {"preset": "llama3-8b"},
    "data": {"source": "tokens", "path": "unused", "sequence_length": 4096},
    "batch": {"global_size": 8},
    "memory": {"remat": "full"},
    "train": {"steps": 1000},
}
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "data parallel": ("zero=0", "mesh.fsdp=8"),
    "ZeRO-1: state split": ("zero=1", "mesh.fsdp=8"),
    "ZeRO-2: and gradients": ("zero=2", "mesh.fsdp=8"),
    "ZeRO-3 (FSDP): and weights": ("zero=3", "mesh.fsdp=8"),
    "hybrid: ZeRO-3 in two groups": ("zero=3", "mesh.replica=2", "mesh.fsdp=4"),
    "tensor": ("mesh.tensor=8",),
    "context": ("mesh.context=8",),
    "stages, one after the other": ("mesh.stage=8", "zero=1"),
    "stages, 8 micro-batches": ("mesh.stage=8", "zero=1", "batch.accumulate=8"),
    "stages, in two rounds": ("mesh.stage=8", "zero=1", "batch.accumulate=8", "pipeline.rounds=2"),
}
SIZE = 256  # of the matrices whose product is split
DRAWN = (4, 8)  # stages and micro-batches of the timeline


def split(target: str | None = None, base: dict[str, Any] = BASE) -> Found:
    """The layouts compiled for eight GPUs; one product split in both ways over simulated devices, here."""
    kind, _, count = (target or TARGET).partition(":")
    if count not in ("", str(GPUS)):
        raise UserError(f"target {target}: the tour's layouts are of {GPUS} GPUs; leave the number out")
    plans = compiled.plans(f"{kind}:{GPUS}", {name: load_config(base, changes) for name, changes in LAYOUTS.items()})
    rows = [_row(name, plan) for name, plan in plans.items()]
    rows.append(_server(rows[0]))
    devices.simulate(SIMULATED)  # only now: steps run on GPUs, if they are here
    holds: Columns = {
        "layout": lambda row: row["name"],
        "GiB": lambda row: f"{row['total'] / 2**30:.1f}" if row["total"] else "",
        "sends, GiB": lambda row: f"{row['wire'] / 2**30:.1f}",
        "exposed": lambda row: f"{row['exposed']:.0%}",
        "step, s": lambda row: f"{row['step']:.2f}" if row["step"] else "",
        "idle": lambda row: f"{row['bubble']:.0%}" if row["bubble"] else "",
        "most by": lambda row: row["most"],
    }
    holds |= compiled.measured(rows)
    ways: Columns = {
        "the matrix split by": lambda row: row["name"],
        "then": lambda row: row["collective"],
        "a device sends": lambda row: f"{row['wire']:,} B",
        "off by": lambda row: f"{row['error']:.0e}",
    }
    note = (
        f"Of one device and one update of {base['batch']['global_size']} sequences of"
        f" {base['data']['sequence_length']:,} tokens. Exposed: bytes sent while nothing is computed. Idle: the"
        " share of a pipeline's ticks in which a stage has nothing to do; with one micro-batch that is plain model"
        f" parallelism. A server's link carries {rows[-1]['wire'] / rows[0]['wire']:.1f} times what an all-reduce"
        " sends over each."
    )
    tables = [
        Shown(f"{base['model'].get('preset', 'a model')} on {GPUS} x {kind}", rows, holds),
        Shown(f"A product of {SIZE} x {SIZE} matrices over {SIMULATED} devices", list(_products()), ways),
    ]
    return Found(tables, note, partial(_draw, rows=rows))


def _row(name: str, plan: dict[str, Any]) -> Row:
    from jaxmem.stack.pipeline import Pipeline

    changes = dict(change.split("=") for change in LAYOUTS[name])
    sent = plan["collectives"]
    wire, exposed = (sum(kind[field] for kind in sent.values()) for field in ("wire_bytes", "exposed_bytes"))
    stages = int(changes.get("mesh.stage", 1))
    micro, rounds = (int(changes.get(key, 1)) for key in ("batch.accumulate", "pipeline.rounds"))
    return {
        "name": name,
        "overrides": list(LAYOUTS[name]),
        "total": plan["bytes_per_device"]["total"],
        "measured": plan.get("measured"),
        "parts": plan["bytes_per_device"],
        "wire": wire,
        "exposed": exposed / wire,
        "step": plan["estimated_step_seconds"],
        "bubble": Pipeline(layers=32, stages=stages, micro_batches=micro, rounds=rounds).bubble,
        "collectives": sent,
        "most": max(sent, key=lambda kind: sent[kind]["wire_bytes"]),
    }


def _server(parallel: Row) -> Row:
    """The link of a server that as many workers push to and pull from, in the dtype that the all-reduce sends."""
    from jaxmem.lab.parameter_server import busiest_link

    link, ring = busiest_link(parallel["parts"]["parameters"], GPUS)
    return {
        "name": "parameter server, its link",
        "overrides": [],
        "total": None,
        "wire": parallel["wire"] * link / ring,
        "exposed": 1.0,
        "step": None,
        "bubble": 0.0,
        "most": "push; pull as much",
    }


def _products() -> Iterator[Row]:
    import jax
    import numpy as np

    from jaxmem.distributed.communicator import Communicator

    comm = Communicator(jax.devices()[:SIMULATED])
    draws = np.random.default_rng(0)
    x, w = (draws.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    exact = x.astype(np.float64) @ w.astype(np.float64)
    n, whole = comm.size, 4 * SIZE * SIZE
    columns = comm.put(np.stack([x @ part for part in np.split(w, n, axis=1)]))
    rows = comm.put(np.stack([a @ b for a, b in zip(np.split(x, n, axis=1), np.split(w, n, axis=0), strict=True)]))
    gathered = np.concatenate(np.asarray(comm.all_gather(columns)), axis=1)
    summed = np.asarray(comm.allreduce(rows))
    for name, collective, found, wire in (
        ("columns", "all-gather", gathered, whole * (n - 1) // n),
        ("rows", "all-reduce", summed, 2 * whole * (n - 1) // n),
    ):
        error = float(np.abs(found - exact).max() / np.abs(exact).max())
        yield {"name": name, "collective": collective, "wire": wire, "error": error}


def _draw(drawn: Figure, rows: Sequence[Row]) -> None:
    from jaxmem.stack.pipeline import Pipeline

    held, ticks = drawn.subplots(1, 2, width_ratios=(1.2, 1))
    known = [{**row["parts"], "name": row["name"]} for row in rows if row["total"]]
    stacked(held, known, {part: part for part in ("parameters", "optimizer", "gradients", "activations", "other")})
    held.set(xlabel="GiB of a device")
    held.tick_params(axis="y", labelsize=7)
    held.legend(fontsize=7)
    stages, micro = DRAWN
    pipeline = Pipeline(layers=8, stages=stages, micro_batches=micro)
    for stage in range(stages):
        for batch in range(micro):
            ticks.barh(stage, 1, left=stage + batch, color=f"C{batch}", edgecolor="white")
            ticks.text(stage + batch + 0.5, stage, str(batch), ha="center", va="center", color="white", fontsize=8)
    ticks.set(xlim=(0, pipeline.ticks), xlabel="ticks", ylabel="stage", yticks=range(stages))
    ticks.invert_yaxis()
    ticks.set_title(f"{micro} micro-batches through {stages} stages: {pipeline.bubble:.0%} idle", fontsize=10)


STOP = Stop(
    "parallel",
    "every way to split a model over eight GPUs: what each holds, sends and hides",
    split,
    uses="compiler",
    config=["mesh.fsdp=8", "zero=3", "mesh.tensor=8", "mesh.context=8", "mesh.stage=8"],
    read=["jaxmem/sharding/table.py", "jaxmem/stack/pipeline.py", "jaxmem/lab/parameter_server.py"],
)
