"""DPO's reference log-probabilities: computed once with the initial weights, then read from a file.

The file has 8 bytes per preference pair, and replaces a second model in memory. It also has fingerprints of the model
(its settings and weights), the tokens and the sequence length; a file with other fingerprints is refused.
"""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxmem.checkpoint.record import checksum
from jaxmem.config import Config, Data, Model
from jaxmem.config.hub import is_dataset
from jaxmem.data.corpus import Corpus
from jaxmem.data.corpus import fingerprint as corpus_fingerprint
from jaxmem.data.loader import Loader
from jaxmem.distributed.agree import any_process, gather_objects, serialized
from jaxmem.errors import UserError
from jaxmem.machine.files import atomic_file
from jaxmem.step.programs import Program
from jaxmem.typing import Tree

SUFFIX = ".reference.npz"
WITHOUT_EFFECT = {"preset", "hf", "quantization", "dropout"}  # settings of a model that change no result


@dataclass(frozen=True)
class Reference:
    """Log-probabilities [pairs, 2], the preferred answer first; fingerprints of the data and of the model."""

    values: np.ndarray
    data: str
    weights: str


def reference_logprobs(program: Program, corpus: Corpus, params: Tree, identity: str, weights: str | None) -> Reference:
    """Reads the log-probabilities of the reference model from their file, or computes them.

    Args:
        program: Computes them.
        corpus: The data.
        params: The weights of the reference model, if the file is missing.
        identity: The data's fingerprint.
        weights: In a resumed run the fingerprint of its initial model, since `params` have changed.
    """
    cfg = program.cfg
    file = file_for(cfg.data)
    data = _identity(cfg.data, identity)
    expected = weights or fingerprint(cfg.model, params)
    stored = read(file) if file.is_file() else None
    if stored is not None:
        problem = "other data" if stored.data != data else "another model" if stored.weights != expected else None
        if problem or len(stored.values) != len(corpus.sources[0]):
            raise UserError(
                f"{file}: was computed with {problem or 'another number of pairs'}; remove it, or set"
                " data.reference_logprobs to another file"
            )
    without = [process for process, has_file in enumerate(gather_objects(stored is not None)) if not has_file]
    if stored is not None and not without:
        return stored
    if weights is not None:
        where = f" on the host of process {without[0]}" if jax.process_count() > 1 else ""
        raise UserError(
            f"{file} is missing{where}; it was computed from the weights before training, which are no longer"
            " available; copy it from a backup, or start a new run"
        )
    computed = Reference(_compute(program, corpus, params), data, expected)
    if jax.process_index() == 0 and stored is None:
        _write(file, computed)
    gather_objects(None)  # waits for process 0, since hosts may share the file
    if not file.is_file():
        _write(file, computed)
    return computed


def reference_of(cfg: Config) -> Reference:
    """The log-probabilities that a run computed, to evaluate it on the same data."""
    file = file_for(cfg.data)
    stored = read(file) if file.is_file() else None
    if stored is None or stored.data != _identity(cfg.data, corpus_fingerprint(cfg)):
        problem = "is missing" if stored is None else "was computed with other data"
        raise UserError(
            f"data.path={cfg.data.path}: {file} {problem}; evaluate a DPO run on the data that it was trained on, with"
            " the same settings"
        )
    return stored


def _identity(data: Data, fingerprint: str) -> str:
    return f"{fingerprint} {data.sequence_length} {data.on_overlong} {data.on_invalid}"


def file_for(data: Data) -> Path:
    if data.reference_logprobs is not None:
        return Path(data.reference_logprobs).expanduser()
    path = Path(data.path or "").expanduser()
    if is_dataset(str(data.path)) or any(letter in path.name for letter in "*?["):
        raise UserError(f"data.path={data.path} names several files; set data.reference_logprobs to a file")
    return path.with_name(path.name + SUFFIX)


def read(file: Path) -> Reference:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            values = arrays["values"]
            if values.ndim != 2 or values.shape[1] != 2 or values.dtype != np.float32:
                raise ValueError("values: the shape is not [pairs, 2], or the dtype is not float32")
            return Reference(values, str(arrays["data"]), str(arrays["weights"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{file}: not a file of reference log-probabilities; remove it, and `jaxmem train` writes it again"
        ) from error


def fingerprint(model: Model, params: Tree) -> str:
    """A hash of a model's settings and weights, the same on any mesh."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(model.model_dump_json(exclude=WITHOUT_EFFECT).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {checksum(leaf)}\0".encode())
    return digest.hexdigest()


def _compute(program: Program, corpus: Corpus, params: Tree) -> np.ndarray:
    pairs = len(corpus.sources[0])
    corpus.references = np.zeros((pairs, 2), np.float32)
    results = []
    with (
        corpus.without_counting(),
        Loader(program.cfg, "all", program.rows, corpus=corpus, agree=any_process) as loader,
    ):
        for batch in loader:
            rows = serialized(program.compiled_likelihoods(params, program.place(batch)))
            results.append(np.asarray(rows).ravel())
    corpus.references = None
    return np.concatenate(results)[: 2 * pairs].reshape(pairs, 2)


def _write(file: Path, reference: Reference) -> None:
    try:
        with atomic_file(file) as unfinished, unfinished.open("wb") as opened:
            np.savez(opened, values=reference.values, data=reference.data, weights=reference.weights)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be written: {error.strerror}; set data.reference_logprobs to another file"
        ) from error
