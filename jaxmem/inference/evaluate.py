"""The loss of a model on held-out data: the means of its objective, without terms that only training adds; and multiple
choice, the accuracy with which the most likely of several continuations of a text is the correct one.

A line of JSONL is {"prompt": "...", "choices": ["...", ...], "answer": 0}; the answer is an index from 0, a letter, or
the choice itself. The score of a choice is the sum of its tokens' log-likelihoods after the prompt; `normalised`
accuracy divides the score by the bytes of the choice.
"""

import json
import math
import string
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.config.methods import user_objects
from jaxmem.config.user import ModelParts, UserData
from jaxmem.data import Corpus, Split
from jaxmem.data.corpus import source_of
from jaxmem.data.jsonl import read_objects
from jaxmem.data.tokenizer import Tokenizer
from jaxmem.data.user import open_loader
from jaxmem.distributed.agree import any_process, serialized
from jaxmem.errors import UserError
from jaxmem.inference.generate import length_for
from jaxmem.inference.load import is_run, model_config, open_model, open_run, tokenizer_of
from jaxmem.inference.reference import Reference, file_for, read
from jaxmem.models.losses import cross_entropy
from jaxmem.step import Program
from jaxmem.step.objective import Sums, means
from jaxmem.typing import JsonDict, Tree

Means = dict[str, float]


class Evaluator(AbstractContextManager["Evaluator"]):
    """Evaluates weights on the held-out part of a corpus, or on the complete corpus, in the same order at each call."""

    def __init__(self, program: Program, corpus: Corpus | None = None, *, split: Split = "held_out") -> None:
        self._program = program
        self._loader = open_loader(program.cfg, split, program.rows, corpus=corpus, agree=any_process)
        self._sums = program.compiled_evaluate

    def __call__(self, params: Tree, batches: int | None = None) -> Means:
        """Means over `batches` batches, by default all."""
        self._loader.rewind()
        total: Sums = {}
        for batch in islice(self._loader, batches):
            sums = serialized(self._sums(params, self._program.place(batch)))
            total = jax.tree.map(lambda a, b: a + b, total, sums) if total else sums
        if not total or not total["count"]:
            reason = "; ".join(self._loader.corpus.summary()) or "data.held_out selects no document; increase it"
            raise UserError(f"the held-out data has no token to evaluate on: {reason}")
        result = {name: float(value) for name, value in means(total).items()}
        if self._program.cfg.objective.name == "next_token":
            result["perplexity"] = math.exp(min(result["loss"], 700.0))  # exp overflows above
        return result

    def set_reference(self, reference: Reference) -> None:
        """Sets the reference log-probabilities of preference pairs."""
        self._loader.corpus.references = reference.values

    def __exit__(self, *_: object) -> None:
        self._loader.close()


def evaluate(
    run: str | Path, data: str | UserData | None = None, overrides: Sequence[str] = (), **parts: Unpack[ModelParts]
) -> Means:
    """The loss and other metrics of a run or a Hugging Face directory on all of `data`: files of texts or of records
    (JSONL, Parquet) in a form that training reads, or an iterable of batches. Without `data`, a run is evaluated on its
    held-out data; `overrides` may name other data. `parts`: model and loss of the script that trained the run."""
    if parts or not (data is None or isinstance(data, str)):
        objects = user_objects({**parts, "data": data, "held_out": data})  # type: ignore[typeddict-item]
        program, params = open_run(run, overrides, objects)
        with Evaluator(program) as evaluator:
            return evaluator(params)
    if data is None and not is_run(run) and not model_config(run, overrides).data.held_out:
        raise UserError(f"{run}: a Hugging Face model has no held-out data; use --data FILE")
    settings = (
        []
        if data is None
        else [
            f"data.source={source_of(data)}",
            f"data.path={json.dumps(data)}",
            "data.mixture=[]",
            "data.streaming=false",
        ]
    )
    program, params = open_model(run, [*settings, *overrides])
    with Evaluator(program, split="held_out" if data is None else "all") as evaluator:
        if program.cfg.objective.name == "dpo":
            evaluator.set_reference(read(file_for(program.cfg.data)))
        return evaluator(params)


# ---------------------------------------------------------------- multiple choice

EXAMPLE = '{"prompt": "...", "choices": ["...", "..."], "answer": 0}'


@dataclass(frozen=True)
class Question:
    """A question. `answer`: the index of the correct choice."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


def evaluate_choices(directory: str | Path, file: str | Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Accuracy of a run or a Hugging Face directory on the questions of a file."""
    questions = read_questions(file)
    program, params = open_model(directory, overrides)
    tokenizer = tokenizer_of(program)
    correct = np.zeros(2)
    for question, score in zip(questions, scores(program, params, tokenizer, questions), strict=True):
        lengths = np.array([len(choice.encode()) for choice in question.choices])
        correct += [int(np.argmax(by)) == question.answer for by in (score, score / lengths)]
    share = correct / len(questions)
    return {"questions": len(questions), "accuracy": float(share[0]), "normalised": float(share[1])}


def scores(program: Program, params: Tree, tokenizer: Tokenizer, questions: Sequence[Question]) -> list[np.ndarray]:
    """Log-likelihoods [choices] for each question. Only the logits of one choice exist at a time."""
    if program.cfg.model.family != "decoder":
        raise UserError(f"model.family={program.cfg.model.family} does not support --choices; use a decoder")

    def likelihood(params: Tree, tokens: jax.Array, scored: jax.Array) -> jax.Array:
        network = nnx.merge(program.model.graphdef, params)

        def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            tokens, scored = (x[None] for x in row)
            logits = network.logits(network.features(tokens[:, :-1]))
            return -jnp.sum(cross_entropy(logits, tokens[:, 1:]) * scored)

        return jax.lax.map(of_row, (tokens, scored))

    compiled = jax.jit(likelihood)
    results = []
    with program.layout.for_generation(1):
        for question in questions:
            rows = [_encode(tokenizer, question.prompt, choice) for choice in question.choices]
            width = length_for(max(len(ids) for ids, _ in rows)) + 1
            tokens = np.zeros((len(rows), width), np.int32)  # padding after a choice changes nothing before it
            scored = np.zeros((len(rows), width - 1), np.float32)
            for row, (ids, start) in enumerate(rows):
                tokens[row, : len(ids)] = ids
                scored[row, start - 1 : len(ids) - 1] = 1
            results.append(np.asarray(compiled(params, jnp.asarray(tokens), jnp.asarray(scored))))
    return results


def _encode(tokenizer: Tokenizer, prompt: str, choice: str) -> tuple[np.ndarray, int]:
    """Tokens of prompt and choice as one text, and the first position that differs from the prompt alone."""
    head = np.array(tokenizer.begin, np.int32)
    before, both = (np.concatenate([head, tokenizer.encode(text)]) for text in (prompt, prompt + choice))
    shared = min(len(before), len(both))
    different = np.flatnonzero(before[:shared] != both[:shared])
    start = int(different[0]) if len(different) else shared
    if not head.size:  # there are no logits for the first token
        start = max(start, 1)
    return both, start


def read_questions(file: str | Path) -> list[Question]:
    questions = []
    for number, record in read_objects(file, "question"):
        try:
            questions.append(_question(record))
        except ValueError as error:
            raise UserError(f"{file}, line {number}: {error}; write {EXAMPLE}") from error
    return questions


def _question(record: JsonDict) -> Question:
    prompt, choices, answer = (record.get(key) for key in ("prompt", "choices", "answer"))
    if type(prompt) is not str:
        raise ValueError("prompt is missing or not a string")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise ValueError("choices is not a list of at least two texts")
    if isinstance(answer, str):
        letters = string.ascii_uppercase[: len(choices)]
        answer = choices.index(answer) if answer in choices else letters.find(answer.upper() or "-")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"answer is {json.dumps(record.get('answer'))}, not one of the {len(choices)} choices")
    return Question(prompt, tuple(choices), answer)
