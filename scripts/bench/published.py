"""Training runs that other people measured, against the plans of the same settings. No GPU is needed.

    python scripts/bench/published.py                        # all rows of published.yaml, about an hour
    python scripts/bench/published.py MaxText torchtune      # rows whose names begin so
    python scripts/bench/published.py --modules DIR          # keeps compiled modules, and reads those of DIR
    python scripts/bench/published.py --modules DIR --write  # writes docs/accuracy.md and what `plan` says of its times

A module contains the instructions, bytes and trip counts of a step; the model of time is applied to it afterwards. Kept
modules stay right if only the model of time changes; after other changes delete them. The exit code is 1 if a figure is
off by more than 10 % and its row does not say why.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import yaml

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError
from jaxmem.planning.accuracy import FILE, kind_of
from jaxmem.planning.compile import CompiledProgram, compile_program
from jaxmem.planning.result import Plan
from jaxmem.planning.targets import Target, parse_target, target_devices, usable_memory
from jaxmem.report.figure import digest_of
from jaxmem.step.programs import program
from scripts.course.panels import draw
from scripts.course.table import Table

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).with_suffix(".yaml")
PAGE = ROOT / "docs/accuracy.md"
BEGIN, END = "<!-- begin: python scripts/bench/published.py --write -->", "<!-- end -->"
PROGRAMS = {"xla": "Programs compiled by XLA", "pytorch": "PyTorch programs"}
HEADER = "# Published seconds relative to planned ones, by kind of target; written by scripts/bench/published.py.\n"
TOLERANCE = 0.1  # relative difference above which a row says why


@dataclass(frozen=True)
class Published:
    """A run that was measured: its settings, its figures, and where they are written."""

    name: str
    source: str
    software: str
    date: str
    program: str  # a key of PROGRAMS
    target: str
    config: Mapping[str, Any]  # dotted keys
    published: Mapping[str, float]
    gpu: Mapping[str, float] = field(default_factory=dict)  # fields of the GPU that differ from the target's
    differs: str = ""
    why: str = ""

    @property
    def cfg(self) -> Config:
        return load_config({}, [f"{key}={json.dumps(value)}" for key, value in self.config.items()])

    @property
    def devices(self) -> Target:
        target = parse_target(self.target)
        gpu = replace(target.gpu, **self.gpu)
        return replace(target, gpu=gpu, memory=gpu.memory)

    @property
    def tokens(self) -> float:
        """Tokens per step and GPU."""
        cfg = self.cfg
        return cfg.batch.global_size * cfg.data.sequence_length / self.devices.count

    @property
    def seconds(self) -> float | None:
        if (rate := self.published.get("tokens_per_second")) is not None:
            return self.tokens / rate
        return self.published.get("seconds")


def read_rows(text: str) -> list[Published]:
    """The rows of a file such as published.yaml."""
    raw = yaml.safe_load(text)
    rows = []
    for entry in raw["rows"]:
        if not str(entry.get("source") or "").startswith("https://"):
            raise UserError(f"row {entry.get('name')!r} has no source; give the address of the page with its figures")
        if entry.get("program") not in PROGRAMS:
            allowed = ", ".join(PROGRAMS)
            raise UserError(f"row {entry['name']!r}: unknown program {entry.get('program')!r}; expected {allowed}")
        rows.append(Published(**{**entry, "config": {**raw["base"], **entry["config"]}}))
    return rows


def planned(row: Published, modules: Path | None) -> Plan:
    """The plan of a row. The memory of the GPU is not a limit, since other programs may need less than ours."""
    target = row.devices
    cfg = row.cfg
    built = program(cfg, target_devices(target, 1000 * usable_memory(target, cfg.memory)))
    key = hashlib.sha256(json.dumps([row.config, row.target, row.gpu], sort_keys=True).encode()).hexdigest()[:16]
    files = None if modules is None else (modules / f"{key}.module", modules / f"{key}.assignment")
    if files and all(file.exists() for file in files):
        return Plan(built, target, CompiledProgram(*(file.read_bytes() for file in files)), 0.0)
    step = compile_program(built.lower_step(), here=False)
    if files:
        modules.mkdir(parents=True, exist_ok=True)
        files[0].write_bytes(step.serialized_module)
        files[1].write_bytes(step.assignment)
    return Plan(built, target, step, 0.0)


def compare(row: Published, modules: Path | None) -> dict[str, Any]:
    """Planned and published figures of a row; `refused` is the reason if the program does not support its config."""
    try:
        plan = planned(row, modules)
    except UserError as error:
        return {"name": row.name, "refused": "; ".join(str(error).splitlines())}
    seconds = plan.timeline.seconds
    gib = plan.compiled_step.total / 2**30
    published_gib = row.published.get("gib")
    return {
        "name": row.name,
        "program": row.program,
        "seconds": seconds,
        "published_seconds": row.seconds,
        "seconds_ratio": seconds / row.seconds if row.seconds else None,
        "tokens_per_second": row.tokens / seconds,
        "mfu": plan.ideal_flops_per_device / seconds / plan.target.gpu.flops,
        "gib": gib,
        "published_gib": published_gib,
        "gib_ratio": gib / published_gib if published_gib else None,
    }


def differences(result: Mapping[str, Any]) -> list[str]:
    """The figures of a row that are off by more than TOLERANCE."""
    ratios = {"seconds": result.get("seconds_ratio"), "GiB": result.get("gib_ratio")}
    return [f"{unit} {ratio - 1:+.0%}" for unit, ratio in ratios.items() if ratio and abs(ratio - 1) > TOLERANCE]


def table_of(results: Sequence[Mapping[str, Any]]) -> str:
    """A table with the planned value, the published value and their ratio, for times and for memory."""
    rows = []
    for result in results:
        row: dict[str, Any] = {"run": result["name"]}
        for unit, figure in (("s", "seconds"), ("GiB", "gib")):
            ratio = result[f"{figure}_ratio"]
            row[f"{unit}, planned"] = result[figure] if ratio else None
            row[f"{unit}, published"] = result[f"published_{figure}"]
            row[f"ratio of {unit}"] = f"{ratio:.2f}" if ratio else None
        has_time = result["seconds_ratio"] is not None
        row["tokens/s per GPU, planned"] = round(result["tokens_per_second"]) if has_time else None
        row["MFU, planned"] = f"{result['mfu']:.0%}" if has_time else None
        rows.append(row)
    return Table("", rows).markdown()


def report(rows: Sequence[Published], results: Sequence[Mapping[str, Any]]) -> str:
    """The comparison as Markdown: a table for each kind of program, refused rows, and the reasons for differences."""
    by_name = {row.name: row for row in rows}
    parts = []
    for program_kind, title in PROGRAMS.items():
        chosen = [result for result in results if result.get("program") == program_kind]
        if chosen:
            parts.append(f"## {title}\n\n{table_of(chosen)}")
            reasons = [
                f"- {result['name']}: {', '.join(off)}. {by_name[result['name']].why or 'Unexplained.'}"
                for result in chosen
                if (off := differences(result))
            ]
            if reasons:
                parts.append("Off by more than 10 %:\n\n" + "\n".join(reasons))
    refused = [f"- {result['name']}: {result['refused']}" for result in results if "refused" in result]
    if refused:
        parts.append("Not supported by jaxmem:\n\n" + "\n".join(refused))
    sources = [
        f"- [{row.name}]({row.source}) ({row.software}; {row.date})" + (f": {row.differs}" if row.differs else "")
        for row in rows
    ]
    return "\n\n".join([*parts, "## Sources, and what differs from our program", "\n".join(sources)]) + "\n"


@dataclass(frozen=True)
class Comparison:
    """Planned over published values on logarithmic axes, with the diagonal and 10 % to both sides."""

    title: str
    points: Mapping[str, Sequence[tuple[float, float]]]  # (published, planned)
    height: float = 4.5  # inches

    def draw(self, axes: Any) -> None:
        values = [value for points in self.points.values() for point in points for value in point]
        ends = (min(values) / 1.5, max(values) * 1.5)
        for factor, style in ((1.0, "-"), (1 + TOLERANCE, ":"), (1 - TOLERANCE, ":")):
            axes.plot(ends, [factor * end for end in ends], color="grey", lw=1, ls=style)
        for number, (label, points) in enumerate(self.points.items()):
            if points:
                axes.scatter(*zip(*points, strict=True), s=18, label=label, color=f"C{number}", zorder=3)
        axes.set(title=self.title, xlabel="published", ylabel="planned", xscale="log", yscale="log")


def write(rows: Sequence[Published], results: Sequence[Mapping[str, Any]]) -> None:
    """Writes the generated part of the page, its figure, and the ranges that `jaxmem plan` prints."""
    compared = [result for result in results if "refused" not in result]
    panels = []
    for title, figure in (("Seconds per step", "seconds"), ("GiB per GPU", "gib")):
        points = {
            label: [
                (result[f"published_{figure}"], result[figure])
                for result in compared
                if result["program"] == name and result[f"published_{figure}"]
            ]
            for name, label in PROGRAMS.items()
        }
        panels.append(Comparison(title, points))
    picture = PAGE.with_suffix(".png")
    draw(picture, panels)
    caption = "planned over published, with the diagonal and 10 % to both sides"
    image = f"![{caption}]({picture.name})<!-- figure {digest_of(picture)} -->"
    before, tail = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = tail.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{image}\n\n{report(rows, results)}\n{END}{after}", encoding="utf-8")
    FILE.write_text(HEADER + yaml.safe_dump(ranges(rows, compared), sort_keys=False), encoding="utf-8")


def ranges(rows: Sequence[Published], results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """For each kind of target, the least and the largest published time relative to the planned one: of programs that
    XLA compiled, if there are any."""
    targets = {row.name: row.devices for row in rows}
    by_kind: dict[str, dict[str, list[float]]] = {}
    for result in results:
        if result["seconds_ratio"]:
            of_kind = by_kind.setdefault(kind_of(targets[result["name"]]), {})
            of_kind.setdefault(result["program"], []).append(1 / result["seconds_ratio"])
    chosen = {kind: by_program.get("xla") or by_program["pytorch"] for kind, by_program in by_kind.items()}
    return {
        kind: {"least": round(min(values), 2), "most": round(max(values), 2), "runs": len(values)}
        for kind, values in chosen.items()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="beginnings of names of rows; default: all")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of rows")
    parser.add_argument("--modules", type=Path, help="directory of compiled modules")
    parser.add_argument(
        "--write", action="store_true", help="write docs/accuracy.md, its figure, and ranges for `plan`"
    )
    args = parser.parse_args(arguments)
    try:
        rows = read_rows(args.rows.read_text(encoding="utf-8"))
    except UserError as error:
        print(f"{args.rows}: {error}", file=sys.stderr)
        return 2
    rows = [row for row in rows if row.name.startswith(tuple(args.names))]
    results = []
    for row in rows:
        print(row.name, file=sys.stderr, flush=True)
        results.append(compare(row, args.modules))
    print(report(rows, results))
    if args.write:
        write(rows, results)
    return int(any(differences(result) and not row.why for row, result in zip(rows, results, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
