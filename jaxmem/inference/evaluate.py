"""How good a model is on documents it never saw: the objective's means, without what only training adds to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxmem.data import Corpus, Loader, Split
from jaxmem.distributed.agree import any_process, serialized
from jaxmem.errors import UserError
from jaxmem.inference.load import config_of, is_run, open_model
from jaxmem.inference.reference import Reference, file_for, read
from jaxmem.step import Program
from jaxmem.step.objective import Sums, means

Means = dict[str, float]


class HeldOut:
    """A corpus's held-out part, or all of it. Each call sees the same documents in the same order."""

    def __init__(self, program: Program, corpus: Corpus | None = None, *, split: Split = "held_out") -> None:
        self._program = program
        self._loader = Loader(program.cfg, split, program.rows, corpus=corpus, agree=any_process)
        self._sums = {length: at.compiled_evaluate for length, at in program.buckets.items()}

    def __call__(self, params: Any, batches: int | None = None) -> Means:
        """Means over so many batches, by default all there are."""
        self._loader.rewind()
        total = self._total(params, islice(self._loader, batches))
        if not total or not total["count"]:
            raise UserError("data.held_out: no document is held out; raise it, or leave train.evaluate_every out")
        result = {name: float(value) for name, value in means(total).items()}
        if self._program.cfg.objective.name == "next_token":
            result["perplexity"] = math.exp(min(result["loss"], 700.0))  # beyond, a float overflows
        return result

    def compared_with(self, reference: Reference) -> None:
        """Of preferences, what each answer is held against."""
        self._loader.corpus.references = reference.values

    def _total(self, params: Any, batches: Iterable[dict[str, np.ndarray]]) -> Sums:
        total: Sums = {}
        for batch in batches:
            of_rows = self._sums[self._program.bucket(batch)]
            sums = serialized(of_rows(params, self._program.place(batch)))
            total = jax.tree.map(lambda a, b: a + b, total, sums) if total else sums
        return total

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()


def evaluate(run: str | Path, data: str | None = None, overrides: Sequence[str] = ()) -> Means:
    """A trained run on its held-out documents; a run or a Hugging Face directory on the whole of a text file, or on
    what overrides hold out of other data."""
    if data is None and not is_run(run) and not config_of(run, overrides).data.held_out:
        raise UserError(f"{run}: nothing of it is held out; give --data FILE, a text to evaluate on")
    text = [] if data is None else ["data.source=text", f"data.path={json.dumps(data)}", "data.mixture=[]"]
    program, params = open_model(run, [*text, *overrides])
    with HeldOut(program, split="held_out" if data is None else "all") as documents:
        if program.cfg.objective.name == "dpo":
            documents.compared_with(read(file_for(program.cfg)))
        return documents(params)
