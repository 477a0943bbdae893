"""Every two settings together: a config with both trains to the plain config's loss, or is refused in one line.

    python -m tests.support.pairs --results FILE       # all pairs; a stopped command continues where it was
    python -m tests.support.pairs --rows 10 --seed 7   # ten rows
    python -m tests.support.pairs --try memory.remat=sqrt precision.parameters=int8

A row is a config with a setting for many fields, drawn so that it has many pairs that no row before it has (a covering
array). It trains a tiny model for three updates, evaluates it and, if it saves checkpoints, resumes before the last
update. Its losses must be those of the same row on one device without any of the settings that change memory and
communication only (NEUTRAL). A pair counts as tried when a row with it has trained. A row that is refused, which some
settings are only when the model is known, is reduced to the fewest settings that are refused, and no later row has all
of them. At the end the pairs that are refused alone are listed with the reason.

FILE has a line of JSON per row; with --failed the rows in it that failed are tried again. With --reduce a row that
fails is reduced to the fewest settings that still fail.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":
    from jaxmem.machine.devices import simulate

    # As in tests/conftest.py: compiled fast rather than fast.
    quick = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    quick += " --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}"
    simulate(8)

import jax
import numpy as np

from jaxmem.config import Config
from jaxmem.config.mesh import MESH_AXES
from jaxmem.errors import UserError
from jaxmem.kernels import triton_launch
from jaxmem.step.programs import Program
from jaxmem.training.run import run
from jaxmem.training.telemetry import DivergedError
from tests.kernels import interpreter
from tests.support.pair_settings import NEUTRAL, SETTINGS, Row, config, field, overrides, refusal

triton_launch.INTERPRETER = interpreter.interpret

# Up to ten times as long to compile, or to run in the interpreter: only in rows that begin with it.
SLOW = ("galore", "memory.experts=triton")
LONGEST = 40  # settings of a row
DRAWN = 20  # rows of which the one with the most pairs that are left is tried
FRESH = 10  # rows after which compiled programs are forgotten


class Cover:
    """Rows until each pair of settings is in a row that has trained, or is refused.

    `left`: the pairs that are neither. `refused`: the refused pairs, and why. Call `add` or `refuse` with a row before
    the next one is drawn.
    """

    def __init__(self, seed: int, done: Iterable[Row] = (), settings: Sequence[str] = SETTINGS) -> None:
        self._draw, self._settings = random.Random(seed), settings
        self._fields = sorted({field(setting) for setting in settings})
        self._wrong: dict[frozenset[str], str] = {}  # settings that a run refused together, and why
        self.left = {
            frozenset(pair) for pair in itertools.combinations(settings, 2) if field(pair[0]) != field(pair[1])
        }
        self.refused: dict[frozenset[str], str] = {}
        self._order = sorted(map(sorted, self.left), reverse=True)
        self._draw.shuffle(self._order)
        alone = [setting for setting in settings if refusal((setting,))]
        assert not alone, alone
        for row in done:
            self.add(row)

    def add(self, row: Row) -> None:
        """A row that has trained."""
        self.left -= {frozenset(pair) for pair in itertools.combinations(row, 2)}

    def refuse(self, row: Row, message: str) -> None:
        """The fewest settings that are refused when the model is known."""
        self._wrong[frozenset(row)] = message

    def refusal(self, row: Row) -> str | None:
        for settings, message in self._wrong.items():
            if settings <= {*row}:
                return message
        return refusal(row)

    def next_row(self) -> Row | None:
        while self._order:
            first = tuple(self._order[-1])
            if frozenset(first) not in self.left:
                self._order.pop()
            elif message := self.refusal(first):
                self.refused[frozenset(first)] = message
                self.left.discard(frozenset(first))
            else:
                return max((self._longer(first) for _ in range(DRAWN)), key=self._gain)
        return None

    def _gain(self, row: Row) -> int:
        return sum(frozenset(pair) in self.left for pair in itertools.combinations(row, 2))

    def _longer(self, row: Row) -> Row:
        """The row with a setting for other fields, each with a pair that is left."""
        for name in self._draw.sample(self._fields, len(self._fields)):
            if len(row) == LONGEST or any(field(setting) == name for setting in row):
                continue
            new = {
                setting: sum(frozenset((setting, other)) in self.left for other in row) + self._draw.random()
                for setting in self._settings
                if field(setting) == name
            }
            for setting in sorted(new, key=new.__getitem__, reverse=True)[:3]:
                is_slow = any(slow in setting and not any(slow in other for other in row) for slow in SLOW)
                if new[setting] >= 1 and not is_slow and not self.refusal((*row, setting)):
                    row = (*row, setting)
                    break
        return row


def trained(given: list[str]) -> list[float]:
    """The losses of the updates, then the loss of held-out data after each of them if the config evaluates."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"output={folder}", f"checkpoint.path={folder}/saved"]
        if any("objective.name=dpo" in text for text in given):  # beside the data, it would be that of another row
            paths.append(f"data.reference_logprobs={folder}/reference.npz")
        cfg = config([*given, *paths])
        devices = jax.devices()[: math.prod(getattr(cfg.mesh, axis) for axis in MESH_AXES)]
        losses = _losses(cfg, devices)
        if cfg.checkpoint.every is not None and cfg.checkpoint.resume == "auto":
            shutil.rmtree(max(Path(folder, "saved", cfg.name).glob("[0-9]*"), key=lambda path: int(path.name)))
            resumed = _losses(cfg, devices)
            assert resumed == losses, f"resumed: {resumed}, not {losses}"
    return losses


def _losses(cfg: Config, devices: Sequence[Any]) -> list[float]:
    # What a run says of its memory takes up to a quarter of the time of a row.
    only_folder = mock.patch(
        "jaxmem.training.run.write_description", lambda _, folder, **_more: folder.mkdir(parents=True, exist_ok=True)
    )
    with contextlib.redirect_stdout(io.StringIO()), only_folder:
        result = run(cfg, devices)
    lines = map(json.loads, (result.directory / "metrics.jsonl").read_text().splitlines())
    losses = {name: {line["step"]: line[name] for line in lines if name in line} for name in ("loss", "held_out_loss")}
    return [loss for by_step in losses.values() for _, loss in sorted(by_step.items())]


def tolerance(row: Row) -> float:
    """Of the losses: rounding, and with stored or computed values of few bits what rounding decides."""
    cfg = config(overrides(row))
    if cfg.precision.compute in ("bfloat16", "float16", "fp8") or cfg.precision.gradients == "bfloat16":
        return 2e-2
    if cfg.memory.save_dtype == "fp8":
        return 2e-2
    is_coarse = cfg.precision.parameters != "float32"
    return 5e-3 if is_coarse or cfg.optimizer.name != "sgd" else 1e-4


@functools.lru_cache(4)
def plain_losses(given: tuple[str, ...]) -> list[float]:
    """The losses on one device."""
    return trained(list(given))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a row: `refusal`, the line that refused it; `failure`, what is wrong with it. None: it trained to
    the losses of the plain config."""

    failure: str | None = None
    refusal: str | None = None

    @property
    def kind(self) -> str:
        """Rows whose outcomes have the same kind are wrong in the same way."""
        return self.refusal or (self.failure or "").partition(":")[0]


def outcome(row: Row) -> Outcome:
    result = _compared(row)
    if result.kind == "loss" and "precision.compute=fp8" in overrides(row):
        # Between matmuls in FP8, sums in bfloat16 differ by layout in their last bit, which decides how the next matmul
        # rounds. In float32 this is rare, so the losses agree unless something is wrong.
        plain_losses.cache_clear()
        with mock.patch("jaxmem.step.execution.compute_dtype", return_value=np.dtype("float32")):
            result = _compared(row)
        plain_losses.cache_clear()
    return result


def _compared(row: Row) -> Outcome:
    given = overrides(row)
    try:
        mine = trained(given)
        plain = plain_losses(tuple(text for text in given if not text.startswith(NEUTRAL)))
    except DivergedError as error:
        return Outcome(f"diverged: {error}")
    except UserError as error:  # some settings are refused when the model is known
        is_line = len(str(error).splitlines()) == 1
        return Outcome(refusal=str(error)) if is_line else Outcome(f"UserError of several lines: {error}")
    except Exception as error:  # noqa: BLE001, whatever it is, it is a fault
        return Outcome(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    cfg = config(given)
    has_short_gradients = "bfloat16" in (cfg.precision.gradients, cfg.precision.parameters)
    is_coarse_dpo = cfg.objective.name == "dpo" and (cfg.precision.compute != "float32" or has_short_gradients)
    # The scale of a micro-batch decides which updates overflow. DPO's margins are differences between sums of
    # log-probabilities, so rounding decides where its updates lead.
    if is_coarse_dpo or cfg.precision.loss_scale == "dynamic":
        mine, plain = mine[:1], plain[:1]
    # APOLLO scales a gradient by its norm, which is noise if that is 0. Activations that are saved in FP8 change the
    # gradients that FP8 matmuls round.
    is_rounded_twice = {"precision.compute=fp8", "memory.save_dtype=fp8"} <= {*given}
    if is_rounded_twice or any("optimizer.name=apollo" in text for text in given):
        mine, plain = mine[:2], plain[:2]
    off = max(abs(a / b - 1) for a, b in zip(mine, plain, strict=True))
    first = abs(mine[0] / plain[0] - 1)
    wrong = not (off < tolerance(row) and first < min(tolerance(row), 2e-2 if is_coarse_dpo else 1e-2))
    return Outcome(f"loss: {mine} where the plain config has {plain}" if wrong else None)


class _AcceptedError(Exception):
    """Ends a run whose config is not refused."""


def _accept(built: Program, _: str | None) -> None:
    built.lower_step()  # traces the step, which may refuse it
    raise _AcceptedError


def refused_at_run(row: Row) -> Outcome:
    """The outcome of a row, as far as a run is refused: without compiling or training."""
    with mock.patch("jaxmem.planning.result.plan_program", _accept):
        try:
            trained(overrides(row))
        except UserError as error:
            return Outcome(refusal=str(error))
        except Exception:  # noqa: BLE001, another fault than that which is reduced
            return Outcome()
    raise AssertionError("the run was not ended")


def reduced(row: Row, kind: str, outcome: Callable[[Row], Outcome]) -> Row:
    """The fewest settings of a row with an outcome of this kind."""
    size = len(row) // 2
    while size:
        for start in range(0, len(row), size):
            fewer = row[:start] + row[start + size :]
            if refusal(fewer) is None and outcome(fewer).kind == kind:
                row = fewer
                break
        else:
            size //= 2
        size = min(size, len(row) // 2)
    return row


@dataclasses.dataclass
class Results:
    """A file with a line of JSON per row. While a row is tried, it is in a file beside it: XLA may end the process."""

    path: Path | None

    @property
    def _current(self) -> Path | None:
        return self.path and self.path.with_suffix(".current")

    def begin(self, row: Row) -> None:
        if self._current:
            self._current.write_text(json.dumps(row))

    def end(self) -> None:
        if self._current:
            self._current.unlink()

    def record_ended(self) -> None:
        """Records the row that has ended the process before."""
        if self._current and self._current.exists():
            self.write(tuple(json.loads(self._current.read_text())), Outcome("ended the process"), 0, -1)
            self.end()

    def read(self) -> list[tuple[Row, Outcome]]:
        """The rows whose settings are still in SETTINGS, each with its last outcome."""
        lines = self.path.read_text().splitlines() if self.path and self.path.exists() else ()
        rows = {}
        for line in map(json.loads, lines):
            if {*line["row"]} <= {*SETTINGS}:
                rows[tuple(line["row"])] = Outcome(line["failure"], line["refusal"])
        return list(rows.items())

    def write(self, row: Row, result: Outcome, seconds: float, left: int) -> None:
        if self.path:
            with self.path.open("a") as file:
                entry = {"row": row, "seconds": round(seconds, 1), "left": left, **dataclasses.asdict(result)}
                file.write(json.dumps(entry) + "\n")


def try_row(row: Row, cover: Cover, results: Results, *, reduce: bool = False) -> Outcome:
    """Trains a row, and tells `cover` and `results` what became of it."""
    results.begin(row)
    start = time.monotonic()
    try:
        result = outcome(row)
    finally:
        results.end()
    seconds = time.monotonic() - start
    if result.refusal:
        row = reduced(row, result.kind, refused_at_run)
        cover.refuse(row, result.refusal)
    else:
        cover.add(row)
    results.write(row, result, seconds, len(cover.left))
    print(f"{len(row)} settings, {len(cover.left)} pairs left, {seconds:.0f} s", flush=True)
    if result != Outcome():
        print(f"  {result.failure or result.refusal}\n  {' '.join(overrides(row))}", flush=True)
    if result.failure and reduce:
        fewest = reduced(row, result.kind, outcome)
        print(f"  reduced to: {' '.join(overrides(fewest))}\n  {outcome(fewest).failure}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE", help="write a line per row; continue its run")
    parser.add_argument("--rows", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failed", action="store_true", help="first the rows that failed, again")
    parser.add_argument("--reduce", action="store_true", help="a row that fails to the fewest settings that still fail")
    parser.add_argument("--try", nargs="+", dest="row", metavar="KEY=VALUE", help="this row only")
    args = parser.parse_args()
    results = Results(args.results)
    results.record_ended()
    tried = results.read()
    # Another order at each start: a row that failed would come again first.
    cover = Cover(args.seed + len(tried), [row for row, result in tried if result == Outcome()])
    for row, result in tried:
        if result.refusal:
            cover.refuse(row, result.refusal)
    rows = [tuple(args.row)] if args.row else [row for row, result in tried if result.failure] if args.failed else []
    failed = 0
    for count in itertools.count():
        row = rows.pop(0) if rows else None if args.row else cover.next_row()
        if row is None or count == args.rows:
            break
        if count % FRESH == FRESH - 1:
            jax.clear_caches()
            gc.collect()
        failed += try_row(row, cover, results, reduce=args.reduce).failure is not None
    for pair, message in cover.refused.items():
        print(f"refused: {' with '.join(sorted(pair))}: {message}")
    print(f"{failed} rows failed; {len(cover.left)} pairs left, {len(cover.refused)} refused")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
