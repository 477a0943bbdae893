"""A plan for people: where the memory of one device goes, what a step costs, what to look at. Fits 40 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxmem.config import Save
from jaxmem.machine.gpus import GPUS
from jaxmem.planning.breakdown import PARTS
from jaxmem.planning.planned import Plan
from jaxmem.planning.text import count, duration, readable

NAMES = {"parameters": "weights"}
NARROW = 66  # columns; below, some have no place
MANY = 0.02  # of the total: a kind that is named for itself
LARGEST = 2  # that are said to dominate


class Targets:
    """What `--target list` shows."""

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = {
            "memory": "memory_gib",
            "rate": "bandwidth_gb_s",
            "bf16": "bf16_tflops",
            "link": "link_gb_s",
            "network": "network_gb_s",
            "host": "host_memory_gib",
        }
        shown = dict(list(columns.items())[: 6 if options.max_width >= NARROW else 2])
        table = Table(title="NAME, NAME:GPUS, NAME:HOSTSxGPUS, cpu:N, or a YAML file", title_justify="left")
        table.add_column("NAME", no_wrap=True)
        for column in shown:
            table.add_column(column, justify="right")
        for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_gib):
            table.add_row(gpu.name, *(f"{getattr(gpu, field):g}" for field in shown.values()))
        about = "memory, host memory: GiB; rate of the memory, link within a host, network: GB/s; bf16: TFLOP/s"
        yield Group(table, Text(about))


class Report:
    """A plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Group(*self._parts(options))

    def _parts(self, options: ConsoleOptions) -> Iterator[RenderableType]:
        plan = self.plan
        yield Text(
            f"{plan.program.cfg.name}: {plan.program.model.parameters:,} parameters on {_devices(plan)}", style="bold"
        )
        yield self._memory(wide=options.max_width >= NARROW)
        yield Text(f"most of it: {', '.join(self._largest())}")
        if isinstance(kept := plan.program.cfg.memory.remat, Save):
            yield Text(f"kept of each layer: its input, {', '.join(kept.save)}")
        yield from self._verdict()
        yield from self._time()
        if plan.timeline.traffic:
            yield self._messages(wide=options.max_width >= NARROW)
            if plan.estimated_step_seconds is not None:
                yield Text(
                    f"{plan.timeline.exposed_share:.1%} of the messages' {duration(plan.timeline.network)} is exposed"
                )
        yield from self._host()
        for warned in plan.warnings:
            yield Text.assemble((f"{warned.kind}: ", "yellow"), f"{warned.text}; try {warned.cure}")

    def _memory(self, *, wide: bool) -> Table:
        plan = self.plan
        total, devices = plan.bytes_per_device["total"], plan.target.count
        table = Table(title="Memory of one device", title_justify="left")
        table.add_column("", overflow="fold")
        table.add_column("compiled", justify="right", no_wrap=True)
        if wide:
            table.add_column("predicted", justify="right", no_wrap=True)
            table.add_column("difference", justify="right", no_wrap=True)
        table.add_column("B/param", justify="right", no_wrap=True)

        def row(name: str, size: int, predicted: int | None = None, *, known: bool = True) -> None:
            each = f"{size * devices / plan.program.model.parameters:.2f}"
            said = "" if predicted is None else readable(predicted)
            off = f"{size / predicted - 1:+.1%}" if predicted and known else ""
            table.add_row(name, readable(size), *((said, off) if wide else ()), each)

        for part in PARTS:
            size = plan.bytes_per_device[part]
            if size or plan.predicted.get(part):
                row(NAMES.get(part, part), size, plan.predicted.get(part))
            for kind, held in plan.kinds.get(part, {}).items():
                if held > MANY * total and len(plan.kinds[part]) > 1:
                    row(f"  {kind}", held)
        table.add_section()
        row("total", total, plan.predicted["total"])
        return table

    def _largest(self) -> Iterator[str]:
        """What dominates: of a part that consists of several kinds, its kinds."""
        plan, whole = self.plan, self.plan.bytes_per_device["total"]
        sizes = {NAMES.get(part, part): plan.bytes_per_device[part] for part in PARTS if part != "activations"}
        sizes |= plan.kinds.get("activations", {})
        for name, size in sorted(sizes.items(), key=lambda kind: -kind[1])[:LARGEST]:
            yield f"{name} {size / whole:.0%}"

    def _verdict(self) -> Iterator[Text]:
        plan = self.plan
        phases = {phase: size for phase, size in plan.phases.items() if size is not None}
        others = ", ".join(f"{phase} {readable(size)}" for phase, size in phases.items() if phase != "step")
        yield Text(f"other phases: {others}")
        of = f"{readable(plan.target.memory)}" + (f" less {readable(plan.reserved)} reserved" if plan.reserved else "")
        if plan.limit < plan.target.memory - plan.reserved:
            of = f"memory.budget, {readable(plan.limit)}"
        if plan.fits and plan.spilled:
            yield Text(f"{readable(plan.spilled)} too much for {of}: it lies in the host's memory", style="yellow")
        elif plan.fits:
            yield Text(f"fits in {of}: {readable(plan.room)} left", style="green")
        elif plan.room < 0:
            worst = max(phases, key=phases.__getitem__)
            yield Text(f"does not fit in {of}: {worst} needs {readable(-plan.room)} more", style="red")
        else:
            host = f"{readable(plan.host_bytes)} of {readable(plan.target.host_memory)}"
            yield Text(f"does not fit in host memory: {host} for each device", style="red")

    def _time(self) -> Iterator[Text]:
        plan, time = self.plan, self.plan.timeline
        ideal = plan.ideal_flops_per_device
        yield Text(f"arithmetic: {count(time.flops)}FLOP a step and device, {time.flops / ideal:.2f} x the ideal")
        if plan.estimated_step_seconds is not None:
            yield Text(
                f"a step takes about {duration(time.seconds)}, bound by {time.bound};"
                f" no less than {duration(time.roofline)} by roofline"
            )

    def _host(self) -> Iterator[RenderableType]:
        """What lies in the host's memory, and how long it travels."""
        plan, moved = self.plan, self.plan.timeline.host_traffic
        if not moved:
            return
        size, sent = plan.compiled_step.host_total, sum(one.wire_bytes for one in moved.values())
        text = f"{readable(size)} of the host's memory for each device; {readable(sent)} to and fro a step"
        if plan.estimated_step_seconds is not None:
            seconds = sum(one.seconds for one in moved.values())
            text += f", {duration(seconds)}, of which {plan.timeline.overlapped_host_share:.1%} beside kernels"
        yield Text(text)

    def _messages(self, *, wide: bool) -> Table:
        table = Table(title="Messages of one device and step", title_justify="left")
        table.add_column("")
        for column in ("times", "bytes", "exposed")[0 if wide else 1 :]:
            table.add_column(column, justify="right", no_wrap=True)
        for kind, one in sorted(self.plan.timeline.traffic.items(), key=lambda kind: -kind[1].wire_bytes):
            cells = (f"{one.executed:,}", readable(one.wire_bytes), readable(one.exposed_bytes))
            table.add_row(kind, *cells[0 if wide else 1 :])
        return table


def _devices(plan: Plan) -> str:
    target = plan.target
    name = target.gpu.name if target.gpu else target.name.partition(":")[0]
    hosts = f" on {target.hosts} hosts" if target.hosts > 1 else ""
    return f"{target.count} x {name}{hosts}"
