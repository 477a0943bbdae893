"""The quality of methods on a real model: SmolLM2-135M is trained further with each method on documentation in English.

    python scripts/bench/quality.py train MODEL.gguf                    # resumes; a JSON file for each run
    python scripts/bench/quality.py train MODEL.gguf adamw qlora-16     # some methods
    python scripts/bench/quality.py table --png FILE                    # of the recorded runs, short and complete
    python scripts/bench/quality.py left                                # runs and updates that are missing
    python scripts/bench/quality.py formats MODEL.gguf                  # before training: its loss in each format

MODEL.gguf: SmolLM2-135M-Instruct, see docs/how-to/chat.md. The corpus is the docstrings of packages that jaxmem[dev]
installs and of the standard library, a document for each module. A run has 100 updates of 1,024 tokens. The learning
rate of a method is that of its three with the lowest loss on the packages in VALIDATION after 25 updates; the reported
loss is that of runs of full length on the packages in HELD_OUT, which choose nothing. MAIN methods have two seeds. A
run of 100 updates takes 6 to 12 minutes on two idle cores, all runs 6 to 12 hours.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxmem.typing import JsonDict

if TYPE_CHECKING:  # jax reads the platform when it is imported
    from jaxmem.step.programs import Program

os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs/benchmarks/quality-135m"
FORMATS_RECORD = ROOT / "docs/benchmarks/formats-135m.json"
WORK = ROOT / "runs/quality-135m"
STEPS = 100
SEARCH_STEPS = 25
LENGTH = 512  # tokens of a row
PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "email", "http", "importlib", "json", "logging",
    "multiprocessing", "unittest", "urllib", "xml", "flax", "grain", "jax", "matplotlib", "numpy", "optax", "orbax",
    "pydantic", "rich",
)  # fmt: skip
HELD_OUT = ("email", "optax", "rich", "unittest")
VALIDATION = ("concurrent", "grain", "http", "logging")
MAX_CHARACTERS = 20_000  # of a document
PACKAGE_CHARACTERS = {
    "held-out": 30_000,
    "validation": 15_000,
}  # of each package; about 32,000 and 15,000 tokens in all


class Method(NamedTuple):
    overrides: str
    learning_rates: tuple[float, ...]  # the best one is chosen by runs of SEARCH_STEPS


FULL = (1e-5, 3e-5, 1e-4)
ADAPTER = (1e-4, 3e-4, 1e-3)
PROJECTED = (1e-4, 3e-4, 1e-3)
APOLLO = (3e-5, 1e-4, 3e-4)
_BFLOAT16 = "precision.parameters=bfloat16 precision.rounding=stochastic"
_GALORE_RESIDUAL = "optimizer.name=galore_adamw optimizer.refresh_every=25 optimizer.residual=true"
_QGALORE_RESIDUAL = (
    "precision.parameters=int8 optimizer.name=qgalore optimizer.refresh_every=25 optimizer.residual=true"
)
_LORA = "adapter.kind=lora adapter.alpha=16"
_APOLLO_MINI = "optimizer.name=apollo_mini optimizer.project_embeddings=true"
BASE = "adamw"
MAIN = {
    BASE: Method("", FULL),
    "adamw-bfloat16": Method(_BFLOAT16, FULL),
    "adamw8bit": Method(f"{_BFLOAT16} optimizer.name=adamw8bit", FULL),
    "int8-apollo-mini": Method(f"precision.parameters=int8 {_APOLLO_MINI}", APOLLO),
    "qlora-16": Method("adapter.kind=qlora adapter.embeddings=bfloat16 adapter.alpha=16 adapter.rank=16", ADAPTER),
}
UNPACKED = "prompt"  # a soft prompt is before each document, so its rows have one document each
METHODS = MAIN | {
    "adamw4bit": Method(f"{_BFLOAT16} optimizer.name=adamw4bit", FULL),
    "remainder8": Method("precision.parameters=bfloat16 precision.master=remainder8 optimizer.name=adamw8bit", FULL),
    "galore": Method("optimizer.name=galore_adamw optimizer.refresh_every=25", PROJECTED),
    "galore-residual": Method(_GALORE_RESIDUAL, PROJECTED),
    "qgalore": Method("precision.parameters=int8 optimizer.name=qgalore optimizer.refresh_every=25", PROJECTED),
    "qgalore-residual": Method(_QGALORE_RESIDUAL, PROJECTED),
    "apollo-mini": Method(_APOLLO_MINI, APOLLO),
    "muon": Method("optimizer.name=muon", PROJECTED),
    "lora-16": Method(f"{_LORA} adapter.rank=16", ADAPTER),
    "qlora-16-int8": Method(
        "adapter.kind=qlora adapter.base=int8 adapter.embeddings=bfloat16 adapter.alpha=16 adapter.rank=16", ADAPTER
    ),
    "dora-16": Method("adapter.kind=dora adapter.alpha=16 adapter.rank=16", ADAPTER),
    "lora-4": Method(f"{_LORA} adapter.rank=4", ADAPTER),
    "lora-64": Method(f"{_LORA} adapter.rank=64", ADAPTER),
    "last-layers": Method("adapter.kind=last_layers", FULL),
    UNPACKED: Method("adapter.kind=prompt data.packing=false", (1e-3, 3e-3, 1e-2)),
    # With a learning rate of AdamW, beside which they are shown after SEARCH_STEPS.
    "compute-bfloat16": Method("precision.compute=bfloat16", FULL[:1]),
    "fp8-row": Method("precision.compute=fp8 precision.fp8_scaling=row", FULL[:1]),
    "fp8-tensor": Method("precision.compute=fp8", FULL[:1]),
    "fp8-mxfp8": Method("precision.compute=fp8 precision.fp8_scaling=mxfp8", FULL[:1]),
    "fp8-saved": Method("memory.save_dtype=fp8 memory.remat=dots", FULL[:1]),
}


_FP8_ROW = "precision.compute=fp8 precision.fp8_scaling=row"
# How the weights are stored or computed with, without training.
FORMATS = {
    "float32": "",
    "computed in bfloat16": "precision.compute=bfloat16",
    "matmuls in FP8, a scale per tensor": "precision.compute=fp8",
    "matmuls in FP8, a scale per row": _FP8_ROW,
    "the same, only gate and up": f"{_FP8_ROW} precision.fp8_layers=['*.gate','*.up']",
    "the same, only down": f"{_FP8_ROW} precision.fp8_layers=['*.down']",
    "the same, only q and k": f"{_FP8_ROW} precision.fp8_layers=['*.q','*.k']",
    "the same, only v": f"{_FP8_ROW} precision.fp8_layers=['*.v']",
    "the same, only o": f"{_FP8_ROW} precision.fp8_layers=['*.o']",
    "int8": "adapter.kind=qlora adapter.base=int8",
    "nf4": "adapter.kind=qlora adapter.base=nf4",
    "nf4, embedding in bfloat16": "adapter.kind=qlora adapter.base=nf4 adapter.embeddings=bfloat16",
    "nf4, blocks of 32": "adapter.kind=qlora adapter.base=nf4 precision.block_size=32",
}


class Run(NamedTuple):
    method: str
    learning_rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.learning_rate:g}-{self.steps}-{self.seed}"

    @property
    def evaluated(self) -> str:
        """The part of the corpus that its loss is measured on."""
        return "held-out" if self.steps == STEPS else "validation"

    def record(self) -> JsonDict | None:
        file = RECORDS / f"{self.name}.json"
        return json.loads(file.read_text()) if file.is_file() else None


def runs_of(name: str) -> Iterator[Run]:
    """The runs of a method, in order; those of full length follow as soon as the learning rate is chosen."""
    search = [Run(name, rate, 0, SEARCH_STEPS) for rate in METHODS[name].learning_rates]
    yield from search
    losses = {run.learning_rate: record["loss"] for run in search if (record := run.record())}
    if len(losses) == len(search):
        best = min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate])
        yield from (Run(name, best, seed, STEPS) for seed in range(2 if name in MAIN else 1))


def documents(package: str) -> Iterator[str]:
    """The docstrings of each module of a package."""
    places = [Path(sysconfig.get_path(kind)) / package for kind in ("stdlib", "purelib", "platlib")]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise SystemExit(f"error: the package {package} is not installed; pip install 'jaxmem[dev]'")
    for file in sorted(folder.rglob("*.py")):
        if "test" in file.as_posix().removeprefix(str(folder)):
            continue
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        tree = ast.parse(file.read_bytes())
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        text = "\n\n".join(filter(None, texts))
        if len(text) > 200:
            yield text[:MAX_CHARACTERS]


def write_corpus() -> dict[str, str]:
    """Writes a file for each part of the corpus. Returns the SHA-256 of each, which a record states."""
    WORK.mkdir(parents=True, exist_ok=True)
    evaluated = (*HELD_OUT, *VALIDATION)
    parts = {
        "train": [text for name in PACKAGES if name not in evaluated for text in documents(name)],
        "held-out": [text for name in HELD_OUT for text in _first(documents(name), PACKAGE_CHARACTERS["held-out"])],
        "validation": [
            text for name in VALIDATION for text in _first(documents(name), PACKAGE_CHARACTERS["validation"])
        ],
    }
    digests = {}
    for part, texts in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (WORK / f"{part}.jsonl").write_text(lines)
        digests[part] = hashlib.sha256(lines.encode()).hexdigest()
    for file in RECORDS.glob("*.json"):
        if json.loads(file.read_text())["corpus"] != digests:
            raise SystemExit(f"error: {file} was made with other versions of the packages; move {RECORDS} away")
    return digests


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters > 0:
            yield text[:characters]
            characters -= len(text)


def settings(run: Run, model: Path) -> JsonDict:
    """The config of a run, without what its method changes."""
    return {
        "name": run.name,
        "output": str(WORK),
        "seed": run.seed,
        "model": {"hf": str(model)},
        "data": {"source": "jsonl", "path": str(WORK / "train.jsonl"), "sequence_length": LENGTH, "held_out": 0.0},
        "batch": {"global_size": 2},
        "optimizer": {"learning_rate": run.learning_rate, "schedule": "cosine", "warmup": run.steps // 10},
        "train": {"steps": run.steps, "log_every": 5},
        "checkpoint": {"every": 10, "keep": 1},
    }


def train(run: Run, model: Path, corpus: dict[str, str]) -> None:
    import jax

    import jaxmem

    cfg = jaxmem.load_config(settings(run, model), METHODS[run.method].overrides.split())
    start = time.monotonic()
    result = jaxmem.train(cfg, jax.devices()[:1])
    if result.exit_code or result.step < run.steps:  # stopped: the next call resumes it
        raise SystemExit(result.exit_code or 1)
    seconds = time.monotonic() - start
    rows = map(json.loads, (result.directory / "metrics.jsonl").read_text().splitlines())
    text = str(WORK / f"{run.evaluated}.jsonl")
    in_float32 = {}
    if cfg.precision.compute == "fp8":  # what training with it costs, apart from what computing with it costs
        overrides = ["precision.compute=float32", "precision.fp8_scaling=tensor"]
        in_float32 = {"loss_in_float32": jaxmem.evaluate(result.directory, text, overrides=overrides)["loss"]}
    record = {
        **run._asdict(),
        "overrides": METHODS[run.method].overrides,
        "evaluated": run.evaluated,
        "loss": jaxmem.evaluate(result.directory, text)["loss"],
        **in_float32,
        "curve": [(row["step"], row["loss"]) for row in rows if "loss" in row],
        "state_bytes_per_parameter": state_bytes(result.program),
        "seconds": round(seconds, 1),
        "corpus": corpus,
        **environment(),
    }
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{run.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(result.directory)


STATE = ("parameters", "quantization", "master", "gradients", "optimizer")  # without activations


def state_bytes(program: Program) -> dict[str, float]:
    """Bytes per parameter on a GPU: a step compiled for a CPU has float32 copies of bfloat16 state."""
    from jaxmem.estimate.memory import estimate

    categories = estimate(program.cfg, "gpu").categories
    return {name: categories[name] / program.model.parameter_count for name in STATE}


def train_all(methods: Sequence[str], model: Path) -> None:
    """Shorter runs first, then those of each seed, so that an interrupted call leaves methods that can be compared."""
    corpus = write_corpus()
    while missing := [run for method in methods for run in runs_of(method) if run.record() is None]:
        run = min(missing, key=lambda run: (run.steps, run.seed))
        print(f"{run.name}: {len(missing)} runs known to be missing", flush=True)
        train(run, model, corpus)


def measure_formats(model: Path) -> None:
    import jaxmem

    corpus = write_corpus()
    losses = {}
    for name, overrides in FORMATS.items():
        given = [f"data.sequence_length={LENGTH}", *overrides.split()]
        losses[name] = jaxmem.evaluate(str(model), str(WORK / "validation.jsonl"), overrides=given)["loss"]
        print(f"| {name} | {losses[name]:.4f} | {losses[name] - losses['float32']:+.4f} |", flush=True)
    record = {"losses": losses, "overrides": FORMATS, "corpus": corpus, **environment()}
    FORMATS_RECORD.write_text(json.dumps(record, indent=1) + "\n")


def environment() -> JsonDict:
    import jax

    return {
        "device": f"{jax.devices()[0].device_kind}, {len(os.sched_getaffinity(0))} cores",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy", "gguf")},
        "python": platform.python_version(),
    }


class Row(NamedTuple):
    """A method with runs of full length."""

    method: str
    learning_rate: float
    losses: dict[int, float]  # held-out, by seed
    above: dict[int, float]  # AdamW's loss with the same seed is subtracted
    size: float  # state, in bytes per parameter


def rows(methods: Sequence[str]) -> Iterator[Row]:
    base = {record["seed"]: record["loss"] for record in _complete(BASE)}
    for method in methods:
        records = _complete(method)
        if records:
            losses = {record["seed"]: record["loss"] for record in records}
            above = {seed: loss - base[seed] for seed, loss in losses.items() if seed in base}
            size = sum(records[0]["state_bytes_per_parameter"].values())
            yield Row(method, records[0]["learning_rate"], losses, above, size)


def _complete(method: str) -> list[JsonDict]:
    return [record for run in runs_of(method) if run.steps == STEPS and (record := run.record())]


def print_search(methods: Sequence[str]) -> None:
    """The runs that choose a learning rate, each beside AdamW with the same one."""
    print("| method | learning rate | validation loss | above AdamW | computed in float32, above AdamW |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for run in (run for method in methods for run in runs_of(method) if run.steps == SEARCH_STEPS):
        record, base = run.record(), run._replace(method=BASE).record()
        if record:
            losses = (record["loss"], record.get("loss_in_float32"))
            above = " | ".join(f"{loss - base['loss']:+.4f}" if base and loss else "" for loss in losses)
            print(f"| {run.method} | {run.learning_rate:g} | {record['loss']:.4f} | {above} |")


def print_table(compared: Sequence[Row]) -> None:
    print("| method | learning rate | held-out loss, by seed | above AdamW with the same seed | bytes per parameter |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in compared:
        losses = ", ".join(f"{loss:.4f}" for loss in row.losses.values())
        above = ", ".join(f"{difference:+.4f}" for difference in row.above.values() if row.method != BASE)
        print(f"| {row.method} | {row.learning_rate:g} | {losses} | {above} | {row.size:.2f} |")
    if any(row.method == UNPACKED for row in compared):
        print(f"\n{UNPACKED}: not comparable, the loss of the first {LENGTH} tokens of each document")


def print_peers(methods: Sequence[str]) -> None:
    """Runs of other libraries (quality_peers.py) beside those with the same method, learning rate, rows and seed."""
    print("| method | libraries' loss while training, minus ours: mean | largest | held-out loss, minus ours |")
    print("| --- | ---: | ---: | ---: |")
    for run in (run for method in methods for run in runs_of(method) if run.steps == STEPS):
        record = run.record()
        file = RECORDS / f"peers/{run.name}.json"
        if record and file.is_file():
            peer = json.loads(file.read_text())
            differences = [theirs[1] - ours[1] for ours, theirs in zip(record["curve"], peer["curve"], strict=True)]
            mean = sum(differences) / len(differences)
            held_out = peer["loss"] - record["loss"]
            print(f"| {run.method} | {mean:+.4f} | {max(differences, key=abs):+.4f} | {held_out:+.4f} |")


def comparable(rows: Iterable[Row]) -> list[Row]:
    """The rows that a figure shows: those with a loss of AdamW on the same rows of the corpus."""
    return [row for row in rows if row.above and row.method != UNPACKED]


def draw(compared: Sequence[Row], file: Path) -> None:
    from jaxmem.report.figure import figure

    with figure(file, 7, 5) as canvas:
        axes = canvas.subplots()
        for row in compared:
            above = statistics.mean(row.above.values())
            axes.plot(row.size, above, "o", color="C0" if row.method in MAIN else "C7")
            place = {"textcoords": "offset points", "xytext": (3, 4), "rotation": 50, "rotation_mode": "anchor"}
            axes.annotate(row.method, (row.size, above), fontsize=7, **place)
        axes.set_title(f"SmolLM2-135M after {STEPS} updates of 1,024 tokens", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("weights, gradients and optimizer state, bytes per parameter")
        axes.set_ylabel("held-out loss above AdamW, nats per token")
        axes.margins(x=0.15, y=0.15)  # for the names
        axes.grid(alpha=0.3)


def print_left(methods: Sequence[str]) -> None:
    total = 0
    for method in methods:
        missing = [run for run in runs_of(method) if run.record() is None]
        total += sum(run.steps for run in missing)
        print(f"{method:18}", ", ".join(run.name for run in missing) or "complete")
    print(f"{total} updates, besides those of full length whose learning rate is not chosen yet")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = options.add_subparsers(dest="command", required=True)
    for command in ("train", "table", "left", "formats"):
        parser = commands.add_parser(command)
        if command in ("train", "formats"):
            parser.add_argument("model", type=Path, metavar="MODEL.gguf")
        if command == "formats":
            continue
        parser.add_argument("methods", nargs="*", default=list(METHODS), metavar="METHOD")
        if command == "table":
            parser.add_argument("--png", type=Path, metavar="FILE", help="also draw loss against bytes per parameter")
    args = options.parse_args()
    if args.command == "formats":
        measure_formats(args.model)
        return
    if unknown := set(args.methods) - set(METHODS):
        options.error(f"unknown method {', '.join(sorted(unknown))}; expected one of {', '.join(METHODS)}")
    if args.command == "train":
        train_all(args.methods, args.model)
    elif args.command == "table":
        compared = list(rows(args.methods))
        drawn = comparable(compared)
        if args.png and not drawn:
            needed = args.methods if _complete(BASE) else [BASE]
            missing = [run.name for method in needed for run in runs_of(method) if run.record() is None]
            names = ", ".join(missing) or f"a method besides {UNPACKED}"
            options.error(f"table --png requires runs of full length; missing: {names}; use the command train")
        print_search(args.methods)
        print()
        print_table(compared)
        print()
        print_peers(args.methods)
        if args.png:
            draw(drawn, args.png)
    else:
        print_left(args.methods)


if __name__ == "__main__":
    main()
