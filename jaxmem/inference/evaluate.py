"""The loss of a model on held-out data: the means of its objective, without terms that only training adds."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Unpack

import jax

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.metrics import MAX_METRIC
from jaxmem.config import Data
from jaxmem.config.combinations import SOURCES_OF
from jaxmem.config.user import ModelParts, UserData, user_objects
from jaxmem.data.corpus import BATCHES_OF_SCRIPT, Corpus, Split, source_of
from jaxmem.data.user import open_loader
from jaxmem.distributed.agree import any_process, gather_objects, serialized
from jaxmem.errors import UserError, as_yaml
from jaxmem.inference.load import is_run, model_config, open_model, open_run, read_checkpoint
from jaxmem.inference.reference import Reference, reference_of
from jaxmem.machine.terminal import say
from jaxmem.step.objective import means
from jaxmem.step.programs import Program
from jaxmem.typing import Tree

Means = dict[str, float]
# Settings of the training that the batches of a script may not support.
WITHOUT_TRAINING = ("data.epochs=null", "train.evaluate_every=null", "checkpoint.keep_best=false")

DATA_KEYS = ("data.source=", "data.path=", "data.mixture=")  # overrides that name other data than that of a run


class Evaluator(AbstractContextManager["Evaluator"]):
    """Evaluates weights on the held-out part of a corpus, or on the complete corpus, in the same order at each call."""

    def __init__(self, program: Program, corpus: Corpus | None = None, *, split: Split = "held_out") -> None:
        self._program = program
        self._loader = open_loader(program.cfg, split, program.rows, corpus=corpus, agree=any_process)
        self._sums = program.compiled_evaluate

    def __call__(self, params: Tree, batches: int | None = None) -> Means:
        """Means over `batches` batches, by default all."""
        self._loader.rewind()
        sums = [serialized(self._sums(params, self._program.place(batch))) for batch in islice(self._loader, batches)]
        # In float64: a count of tokens in float32 is rounded above 2^24.
        total = {name: math.fsum(float(of_batch[name]) for of_batch in sums) for name in (sums[0] if sums else ())}
        if not total.get("count"):
            reason = "; ".join(self._loader.corpus.summary()) or "data.held_out selects no document; increase it"
            raise UserError(f"the held-out data has no token to evaluate on: {reason}")
        result = {name: float(value) for name, value in means(total).items()}
        if self._program.cfg.objective.name == "next_token":
            result["perplexity"] = math.exp(min(result["loss"], math.log(MAX_METRIC) - 1))
        return result

    def set_reference(self, reference: Reference) -> None:
        """Sets the reference log-probabilities of preference pairs."""
        self._loader.corpus.references = reference.values

    def summary(self) -> list[str]:
        """Lines about records that were cut, dropped or skipped, in all processes."""
        return self._loader.corpus.summary(self._program.rows, gather_objects)

    def __exit__(self, *_: object) -> None:
        self._loader.close()


def evaluate(
    run: str | Path, data: str | UserData | None = None, overrides: Sequence[str] = (), **parts: Unpack[ModelParts]
) -> Means:
    """The loss and other metrics of a run or a Hugging Face directory on all of `data`: files of texts or of records
    (JSONL, Parquet) in a form that training reads, or an iterable of batches. Without `data`, a run is evaluated on its
    held-out data; `overrides` may name other data. `parts`: model and loss of the script that trained the run."""
    if data is None and is_run(run) and not any(word.startswith(DATA_KEYS) for word in overrides):
        _check_has_data(run, overrides)
    if parts or not (data is None or isinstance(data, str)):
        objects = user_objects({**parts, "data": data})
        objects = dataclasses.replace(objects, held_out=objects.data)  # not two: an iterator is read once
        program, params = open_run(run, [*WITHOUT_TRAINING, *overrides], objects)
        with Evaluator(program) as evaluator:
            return evaluator(params)
    if data is None and not is_run(run) and not model_config(run, overrides).data.held_out:
        raise UserError(f"{run}: a Hugging Face model has no held-out data; use --data FILE")
    settings = [] if data is None else _settings_of(data)
    program, params = open_model(run, [*settings, *overrides])
    with Evaluator(program, split="held_out" if data is None else "all") as evaluator:
        if program.cfg.objective.name == "dpo":
            evaluator.set_reference(reference_of(program.cfg))
        result = evaluator(params)
        lines = evaluator.summary()
        if jax.process_index() == 0:
            say(*lines, file=sys.stderr)
        return result


def _check_has_data(run: str | Path, overrides: Sequence[str]) -> None:
    """Refuses a run that was trained on batches of a script: its config names other data, by default the standard
    library of Python."""
    position, _ = read_checkpoint(run, model_config(run, overrides), Checkpoints.read)
    if position.get("fingerprint") == BATCHES_OF_SCRIPT:
        raise UserError(
            f"{run}: was trained on batches of a script, so its held-out data is unknown; use --data FILE, or in a"
            " script jaxmem.evaluate(run, batches)"
        )


def _settings_of(data: str) -> list[str]:
    """Settings that replace the data of a run by these files. Settings that their source does not have are reset."""
    source = source_of(data)
    unused = [field for field, sources in SOURCES_OF.items() if source not in sources]
    reset = [f"data.{field}={as_yaml(getattr(Data(), field))}" for field in unused]
    given = [f"data.source={source}", f"data.path={json.dumps(data)}"]
    return [*reset, *given, "data.mixture=[]", "data.streaming=false"]
