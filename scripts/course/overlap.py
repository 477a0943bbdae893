"""The schedule of a compiled step on eight GPUs: kernels, communication and host copies over time, for ZeRO-3 without
and with XLA's latency-hiding scheduler, and for other layouts."""

from jaxmem.config import load_config
from jaxmem.planning.compile import compile_elsewhere, without_cache
from jaxmem.planning.hlo import read_module
from jaxmem.planning.targets import Target, parse_target, target_devices
from jaxmem.planning.timeline import KERNEL, WAIT, Timeline, timeline
from jaxmem.report.page import ROWS
from jaxmem.step.programs import XlaOptions, program
from scripts.course import Findings, common, main
from scripts.course.panels import COLOURS, DARK, Spans
from scripts.course.table import Row, Table

GPUS = 8
BASE, LAYOUTS = common.CONFIGS["overlap"]["base"], common.rows_of("overlap", "layouts")
# Options that replace those of jaxmem, for the first layout alone.
NO_HIDING: XlaOptions = {"xla_gpu_enable_latency_hiding_scheduler": False}
OVERLAPPED, EXPOSED = "overlapped communication and copies, ms", "exposed, ms"
KERNELS = "kernels alone, ms"
TRANSFER = "transfer"
KEY = {
    KERNEL: ("kernels", DARK),
    WAIT: ("exposed: kernels wait for a transfer", COLOURS[3]),
    TRANSFER: ("transfers", COLOURS[4]),
}


def measure(target: str) -> Findings:
    kind = common.require_gpus("overlap", target, GPUS)
    aim = parse_target(f"{kind}:{GPUS}")
    first, *_ = LAYOUTS
    schedules = {name: schedule(aim, name, NO_HIDING if name == first else {}) for name in LAYOUTS}
    rows = {name: _row(name, step) for name, step in schedules.items()}
    table = Table(f"A step of {common.title(BASE)} on {GPUS} x {kind}, planned", list(rows.values()))
    longest = max(step.seconds for step in schedules.values())
    without, hidden = (rows[name] for name in list(LAYOUTS)[:2])
    return Findings(
        [table],
        {
            "without": without[EXPOSED],
            "with": hidden[EXPOSED],
            "step": without["step, ms"],
            "faster": hidden["step, ms"],
            "tensor": rows["tensor parallel"]["exposed, %"],
        },
        [spans(name, step, longest) for name, step in schedules.items()],
        (10,),
    )


def schedule(aim: Target, layout: str, options: XlaOptions) -> Timeline:
    """The timeline of a layout's step, compiled with these options in addition to those of jaxmem."""
    with without_cache():
        built = program(load_config(BASE, LAYOUTS[layout]), target_devices(aim, 1000 * aim.memory))
        module, _ = compile_elsewhere(built.lower_step(), options)
    return timeline(read_module(module), aim.gpu, aim.count, aim.per_host)


def _row(name: str, step: Timeline) -> Row:
    sent = (step.network, step.host_copies)
    exposed = sum(traffic.exposed_seconds for traffic in sent)
    transfers = sum(traffic.seconds for traffic in sent)
    return {
        "schedule": name,
        "step, ms": 1e3 * step.seconds,
        KERNELS: 1e3 * (step.arithmetic + step.memory),
        "communication, ms": 1e3 * step.network.seconds,
        "host copies, ms": 1e3 * step.host_copies.seconds or None,
        OVERLAPPED: 1e3 * (transfers - exposed),
        EXPOSED: 1e3 * exposed,
        "exposed, %": 100 * exposed / transfers if transfers else 0.0,
    }


def spans(name: str, step: Timeline, longest: float) -> Spans:
    """The rows of a timeline in milliseconds; all panels have the axis of the longest step."""
    scale = 1e3 * step.seconds
    rows = step.rows()
    drawn = {
        title: [
            (scale * begin, scale * end, kind if kind in (KERNEL, WAIT) else TRANSFER) for begin, end, kind in rows[row]
        ]
        for row, title in ROWS.items()
        if row in rows
    }
    return Spans(f"{name}: {scale:,.0f} ms", drawn, KEY, "ms", 1e3 * longest)


if __name__ == "__main__":
    main(__file__)
