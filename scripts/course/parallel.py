"""The layouts, compiled for eight GPUs; then one matmul sharded in two ways over simulated devices."""

from collections.abc import Iterator

from jaxmem.config import load_config
from jaxmem.machine import devices
from jaxmem.typing import JsonDict, JsonView
from scripts.course import SIMULATED, Findings, common, main
from scripts.course.panels import Bars
from scripts.course.parameter_server import busiest_link
from scripts.course.table import Row, Table, gib

GPUS = 8
BASE = common.CONFIGS["parallel"]["base"]
LAYOUTS = common.rows_of("parallel", "layouts")
SIZE = 256  # rows and columns of the matrices of the sharded matmul
PARTS = ("parameters", "optimizer", "gradients", "activations", "other")


def measure(target: str, base: JsonDict = BASE) -> Findings:
    kind = common.require_gpus("parallel", target, GPUS)
    plans = common.plans(f"{kind}:{GPUS}", base, LAYOUTS)
    rows = [_row(base, name, plan) for name, plan in plans.items()]
    link, ring = busiest_link(plans["data parallel"]["bytes_per_device"]["parameters"], GPUS)
    sent = rows[0]["sent, GiB"] * link / ring  # in the dtype that the all-reduce sends
    server = {"layout": "parameter server: the link of the server", "sent, GiB": sent, "exposed, %": 100.0}
    rows.append({**dict.fromkeys(rows[0]), **server, "most bytes": "push; pull sends the same number"})
    devices.simulate(SIMULATED)  # after the steps, which run on GPUs if this machine has them
    memory = [
        {"layout": name, **{part: gib(plan["bytes_per_device"][part]) for part in PARTS}}
        for name, plan in plans.items()
    ]
    return Findings(
        [
            Table(f"{common.title(base)} on {GPUS} x {kind}", rows),
            Table(f"A matmul of {SIZE} x {SIZE} matrices over {SIMULATED} devices", list(sharded_matmuls())),
        ],
        {"sequences": base["batch"]["global_size"], "times": link / ring},
        [Bars(Table("Memory per device, GiB", memory), PARTS)],
    )


def _row(base: JsonDict, name: str, plan: JsonView) -> Row:
    from jaxmem.pipeline.stages import Pipeline

    cfg = load_config(base, LAYOUTS[name])
    pipeline = Pipeline(32, cfg.mesh.stage, cfg.batch.accumulate, cfg.pipeline.rounds, cfg.pipeline.name)
    sent = plan["collectives"]
    wire, exposed = (sum(kind[field] for kind in sent.values()) for field in ("wire_bytes", "exposed_bytes"))
    return {
        "layout": name,
        "per device, GiB": gib(plan["bytes_per_device"]["total"]),
        "sent, GiB": gib(wire),
        "exposed, %": 100 * exposed / wire,
        "step, s": plan["estimated_step_seconds"],
        "idle, %": 100 * pipeline.bubble or None,
        "most bytes": max(sent, key=lambda kind: sent[kind]["wire_bytes"]),
        "measured, GiB": gib(plan["measured"]),
    }


def sharded_matmuls() -> Iterator[Row]:
    """x @ w with the columns and with the rows of w sharded: communication, and the error relative to float64."""
    import jax
    import numpy as np

    from jaxmem.distributed.communicator import Communicator

    comm = Communicator(jax.devices()[:SIMULATED])
    draws = np.random.default_rng(0)
    x, w = (draws.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    exact = x.astype(np.float64) @ w.astype(np.float64)
    n = comm.size
    size = 4 * SIZE * SIZE
    columns = comm.put(np.stack([x @ part for part in np.split(w, n, axis=1)]))
    rows = comm.put(np.stack([a @ b for a, b in zip(np.split(x, n, axis=1), np.split(w, n, axis=0), strict=True)]))
    gathered = np.concatenate(np.asarray(comm.all_gather(columns)), axis=1)
    summed = np.asarray(comm.allreduce(rows))
    for name, collective, result, wire in (
        ("columns", "all-gather", gathered, size * (n - 1) // n),
        ("rows", "all-reduce", summed, 2 * size * (n - 1) // n),
    ):
        error = float(np.abs(result - exact).max() / np.abs(exact).max())
        yield {"sharded by": name, "then": collective, "bytes sent per device": wire, "relative error": error}


if __name__ == "__main__":
    main(__file__)
