"""The layouts, compiled for eight GPUs."""

from jaxmem.config import load_config
from jaxmem.typing import JsonDict, JsonView
from scripts.course import Findings, common, main
from scripts.course.panels import Bars
from scripts.course.parameter_server import busiest_link
from scripts.course.table import Row, Table, gib

GPUS = 8
BASE = common.CONFIGS["parallel"]["base"]
LAYOUTS = common.rows_of("parallel", "layouts")
PARTS = ("parameters", "optimizer", "gradients", "activations", "other")


def measure(target: str, base: JsonDict = BASE) -> Findings:
    kind = common.require_gpus("parallel", target, GPUS)
    plans = common.plans(f"{kind}:{GPUS}", base, LAYOUTS)
    rows = [_row(base, name, plan) for name, plan in plans.items()]
    link, ring = busiest_link(plans["data parallel"]["bytes_per_device"]["parameters"], GPUS)
    sent = rows[0]["sent, GiB"] * link / ring  # in the dtype that the all-reduce sends
    server = {"layout": "parameter server: the link of the server", "sent, GiB": sent, "exposed, %": 100.0}
    rows.append({**dict.fromkeys(rows[0]), **server, "most bytes": "push; pull sends the same number"})
    memory = [
        {"layout": name, **{part: gib(plan["bytes_per_device"][part]) for part in PARTS}}
        for name, plan in plans.items()
    ]
    return Findings(
        [Table(f"{common.title(base)} on {GPUS} x {kind}", rows)],
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
    }


if __name__ == "__main__":
    main(__file__)
