"""Tables for a terminal: a plan, the list of targets, the named values of a layer."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxmem.machine.console import Printed
from jaxmem.machine.gpus import GPUS
from jaxmem.planning.accuracy import published_range
from jaxmem.planning.breakdown import LABELS
from jaxmem.planning.communication import COLLECTIVES
from jaxmem.planning.result import Plan
from jaxmem.planning.units import format_bytes, format_count, format_seconds
from jaxmem.step.categories import CATEGORIES

SAVINGS = ("logits", "float32 adapters")
MAX_FREE_SHARE = 0.2  # advice that saves memory; not shown if more of it is free
MIN_ROW_SHARE = 0.02  # of the total; a smaller kind has no row of its own
MAX_ROW_SHARE = 0.99  # of its category; nor has one that is nearly all of it


def target_table() -> Group:
    """The table that `--target list` prints."""
    columns = {
        "memory\nGiB": "memory_gib", "rate\nGB/s": "bandwidth_gb_s", "bf16\nTFLOP/s": "bf16_tflops",
        "link\nGB/s": "link_gb_s", "network\nGB/s": "network_gb_s", "host\nGiB": "host_memory_gib",
    }  # fmt: skip
    table = _table("NAME, NAME:GPUS, NAME:HOSTSxGPUS, cpu:N, or a YAML file", "NAME", *columns)
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_gib):
        table.add_row(gpu.name, *(f"{getattr(gpu, field):g}" for field in columns.values()))
    return Group(table, Text("rate: of the device's memory; link: within a host; host: memory per GPU"))


class PlanTable(Group, Printed):
    """The table of a plan and the lines below it, which `print` shows too."""


def plan_table(plan: Plan) -> PlanTable:
    time = plan.timeline
    lines: list[RenderableType] = [_title(plan), _memory(plan), *map(Text, plan.choices)]
    sizes = (f"{phase} {format_bytes(size)}" for phase, size in plan.phases.items() if phase != "step")
    lines += [Text(f"other phases: {', '.join(sizes)}"), _verdict(plan), *_time(plan)]
    if time.collectives:
        lines += _communication(plan)
    if time.host_copies.executed:
        lines.append(_host_copies(plan))
    is_roomy = plan.fits and plan.room > MAX_FREE_SHARE * plan.limit
    for warning in plan.warnings:
        if not (is_roomy and warning.kind in SAVINGS):
            lines.append(Text.assemble((f"{warning.kind}: ", "yellow"), f"{warning.text}; try {warning.cure}"))
    return PlanTable(*lines)


def _title(plan: Plan) -> Text:
    target = plan.target
    count = plan.program.model
    trainable = "" if count.trainable_count == count.parameter_count else f", {count.trainable_count:,} trainable,"
    active = "" if count.active_count == count.parameter_count else f" ({count.active_count:,} active)"
    model = f"{plan.program.cfg.name}: {count.parameter_count:,} parameters{active}{trainable}"
    device = target.gpu.name if target.gpu else target.name.partition(":")[0]
    hosts = f" on {target.hosts} hosts" if target.hosts > 1 else ""
    return Text(f"{model} on {target.count} x {device}{hosts}", style="bold")


def _memory(plan: Plan) -> Table:
    total = plan.bytes_per_device["total"]
    per_parameter = plan.target.count / plan.program.model.parameter_count
    table = _table("Memory per device, planned", "", "compiled", "predicted", "difference", "bytes per\nparameter")

    def row(name: str, size: int, predicted: int | None = None) -> None:
        cells = ("", "")
        if predicted is not None:
            cells = format_bytes(predicted), f"{size / predicted - 1:+.1%}" if predicted else ""
        table.add_row(name, format_bytes(size), *cells, f"{size * per_parameter:.2f}")

    for category in CATEGORIES:
        size = plan.bytes_per_device[category]
        if size or plan.predicted.get(category):
            row(LABELS.get(category, category), size, plan.predicted.get(category))
        for kind, bytes_of_kind in plan.breakdown.kinds.get(category, {}).items():
            if MIN_ROW_SHARE * total < bytes_of_kind < MAX_ROW_SHARE * size:
                row(f"  {kind}", bytes_of_kind)
    table.add_section()
    row("total", total, plan.predicted["total"])
    return table


def _verdict(plan: Plan) -> Text:
    memory = format_bytes(plan.target.memory)
    if plan.reserved:
        memory += f" minus {format_bytes(plan.reserved)} reserved"
    if plan.limit < plan.target.memory - plan.reserved:
        memory = f"memory.budget, {format_bytes(plan.limit)}"
    if plan.fits:
        return Text(f"fits in {memory}: {format_bytes(plan.room)} free", style="green")
    if plan.room < 0:
        worst = max(plan.phases, key=lambda phase: (plan.phases[phase], phase))
        return Text(f"does not fit in {memory}: {worst} needs {format_bytes(-plan.room)} more", style="red")
    host = f"{format_bytes(plan.host_bytes)} of {format_bytes(plan.target.host_memory)} per device"
    return Text(f"does not fit in host memory: {host}", style="red")


def _time(plan: Plan) -> Iterator[Text]:
    time = plan.timeline
    ideal = plan.ideal_flops_per_device
    ratio = f", {time.flops / ideal:.2f} x the minimum" if ideal else ""
    yield Text(f"arithmetic: {format_count(time.flops)}FLOP per step and device{ratio}")
    if plan.target.gpu:
        estimated = f"estimated time per step: {format_seconds(time.seconds)}, bound by {time.bound}"
        yield Text(f"{estimated}; roofline {format_seconds(time.roofline)}")
        if compared := published_range(plan.target):
            yield Text(f"{compared} than planned")


def _communication(plan: Plan) -> Iterator[RenderableType]:
    network = plan.timeline.network
    table = _table("Communication per device and step", "", "count", "bytes", "exposed")
    for kind, traffic in sorted(plan.timeline.traffic.items(), key=lambda kind: -kind[1].wire_bytes):
        if kind in COLLECTIVES:
            sizes = (format_bytes(traffic.wire_bytes), format_bytes(traffic.exposed_bytes))
            table.add_row(kind, f"{traffic.executed:,}", *sizes)
    yield table
    if plan.target.gpu:
        yield Text(f"{network.exposed_share:.1%} of {format_seconds(network.seconds)} of communication is exposed")


def _host_copies(plan: Plan) -> Text:
    size = format_bytes(plan.compiled_step.host_total)
    copies = plan.timeline.host_copies
    text = f"offloaded: {size} of host memory per device; {format_bytes(copies.wire_bytes)} copied per step"
    if plan.target.gpu:
        text += f" in {format_seconds(copies.seconds)}, {1 - copies.exposed_share:.1%} overlapped"
    return Text(text)


def _table(title: str, first: str, *columns: str) -> Table:
    """A table whose first column has names; the other columns have numbers, aligned right."""
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
