"""Every way to shard a model over devices: what each device stores and sends, and how much of that is exposed.

Data parallelism replicates everything and shards the batch; ZeRO shards the optimizer state (1), the gradients (2) and
the weights (3); tensor parallelism shards each matmul, context parallelism the sequence, and pipeline parallelism the
layers. A parameter server is another form of data parallelism: everything goes over one device's link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import SIMULATED, Findings
from jaxmem.lab.tour.table import Row, Table
from jaxmem.machine import devices

TARGET, GPUS = "h100-80gb", 8
BASE = common.llm_config("llama3-8b", 4096, memory={"remat": "full"}, batch={"global_size": 8})
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "data parallel": ("zero=0", "mesh.fsdp=8"),
    "ZeRO-1: optimizer state sharded": ("zero=1", "mesh.fsdp=8"),
    "ZeRO-2: and gradients": ("zero=2", "mesh.fsdp=8"),
    "ZeRO-3 (FSDP): and weights": ("zero=3", "mesh.fsdp=8"),
    "hybrid: ZeRO-3 in two groups": ("zero=3", "mesh.replica=2", "mesh.fsdp=4"),
    "tensor parallel": ("mesh.tensor=8",),
    "context parallel": ("mesh.context=8",),
    "pipeline, 1 micro-batch": ("mesh.stage=8", "zero=1"),
    "pipeline, 8 micro-batches": ("mesh.stage=8", "zero=1", "batch.accumulate=8"),
    "pipeline, interleaved in 2 rounds": ("mesh.stage=8", "zero=1", "batch.accumulate=8", "pipeline.rounds=2"),
}
SIZE = 256  # of the matrices whose matmul is sharded
STAGES, MICRO_BATCHES = 4, 8  # of the timeline
PARTS = ("parameters", "optimizer", "gradients", "activations", "other")


def measure(target: str | None = None, base: dict[str, Any] = BASE) -> Findings:
    """The layouts compiled for eight GPUs; one matmul sharded in both ways over simulated devices, here."""
    from jaxmem.stack.stages import Pipeline

    kind, _, count = (target or TARGET).partition(":")
    if count not in ("", str(GPUS)):
        raise UserError(
            f"tour parallel does not support --target {target}: layouts are for {GPUS} GPUs; leave the number out"
        )
    plans = common.plans(f"{kind}:{GPUS}", {name: load_config(base, changes) for name, changes in LAYOUTS.items()})
    rows = [_row(name, plan) for name, plan in plans.items()]
    rows.append(_server(rows[0]))
    devices.simulate(SIMULATED)  # only now: steps run on GPUs, if they are here
    matmuls = list(sharded_matmuls())
    pipeline = Pipeline(layers=8, stages=STAGES, micro_batches=MICRO_BATCHES)
    names = [f"micro-batch {number}" for number in range(MICRO_BATCHES)]
    stages = [{"stage": f"stage {stage}", "begin": stage, **dict.fromkeys(names, 1)} for stage in range(STAGES)]
    formats = {"per device": "GiB", "sent": "GiB", "exposed": ".0%", "step": "s", "idle": ".0%", "measured": "GiB"}
    length, model = base["data"]["sequence_length"], base["model"].get("preset", "a model")
    return Findings(
        [
            Table(f"{model} on {GPUS} x {kind}", rows, {**formats, "collectives": None, "parts": None}),
            Table(f"A matmul of {SIZE} x {SIZE} matrices over {SIMULATED} devices", matmuls, {"relative error": ".0e"}),
        ],
        f"Per device and update of {base['batch']['global_size']} sequences of {length:,} tokens. Exposed: the share of"
        " bytes sent while nothing is computed. Idle: the share of a pipeline's time slots in which a stage waits; with"
        " one micro-batch that is plain model parallelism. A server's link carries"
        f" {rows[-1]['sent'] / rows[0]['sent']:.1f} times what an all-reduce sends over each link.",
        [
            Bars("Memory per device", [{"layout": row["layout"], **row["parts"]} for row in rows[:-1]], PARTS, "GiB"),
            Bars(
                f"{MICRO_BATCHES} micro-batches through {STAGES} stages: {pipeline.bubble:.0%} idle",
                stages,
                names,
                begin="begin",
                labels=False,
            ),
        ],
    )


def _row(name: str, plan: dict[str, Any]) -> Row:
    from jaxmem.stack.stages import Pipeline

    changes = dict(change.split("=") for change in LAYOUTS[name])
    sent = plan["collectives"]
    wire, exposed = (sum(kind[field] for kind in sent.values()) for field in ("wire_bytes", "exposed_bytes"))
    stages, micro, rounds = (int(changes.get(key, 1)) for key in ("mesh.stage", "batch.accumulate", "pipeline.rounds"))
    return {
        "layout": name,
        "per device": plan["bytes_per_device"]["total"],
        "sent": wire,
        "exposed": exposed / wire,
        "step": plan["estimated_step_seconds"],
        "idle": Pipeline(layers=32, stages=stages, micro_batches=micro, rounds=rounds).bubble or None,
        "most bytes": max(sent, key=lambda kind: sent[kind]["wire_bytes"]),
        "measured": plan.get("measured"),
        "collectives": sent,
        "parts": plan["bytes_per_device"],
    }


def _server(parallel: Row) -> Row:
    """The link of a server that as many workers push to and pull from, in the dtype that the all-reduce sends."""
    from jaxmem.lab.parameter_server import busiest_link

    link, ring = busiest_link(parallel["parts"]["parameters"], GPUS)
    own = {"layout": "parameter server, its link", "sent": parallel["sent"] * link / ring, "exposed": 1.0}
    return {**dict.fromkeys(parallel), **own, "most bytes": "push; pull as much"}


def sharded_matmuls() -> Iterator[Row]:
    """x w with the columns and with the rows of w sharded: communication, and the error against float64."""
    import jax
    import numpy as np

    from jaxmem.distributed.communicator import Communicator

    comm = Communicator(jax.devices()[:SIMULATED])
    draws = np.random.default_rng(0)
    x, w = (draws.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    exact = x.astype(np.float64) @ w.astype(np.float64)
    n, size = comm.size, 4 * SIZE * SIZE
    columns = comm.put(np.stack([x @ part for part in np.split(w, n, axis=1)]))
    rows = comm.put(np.stack([a @ b for a, b in zip(np.split(x, n, axis=1), np.split(w, n, axis=0), strict=True)]))
    gathered = np.concatenate(np.asarray(comm.all_gather(columns)), axis=1)
    summed = np.asarray(comm.allreduce(rows))
    for name, collective, found, wire in (
        ("columns", "all-gather", gathered, size * (n - 1) // n),
        ("rows", "all-reduce", summed, 2 * size * (n - 1) // n),
    ):
        error = float(np.abs(found - exact).max() / np.abs(exact).max())
        yield {"sharded by": name, "then": collective, "bytes sent per device": wire, "relative error": error}
