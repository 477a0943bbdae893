"""Every two settings together, a sample: python -m tests.support.pairs tries all pairs."""

import itertools
import random

import pytest

from jaxmem.config import Config
from jaxmem.config.base import Section
from jaxmem.config.networks import Decoder
from tests.support.pairs import SETTINGS, UNTRIED, covering_rows, failure, field, is_refused, recorded

ROWS = (
    ("memory.remat=sqrt", "precision.parameters=int8", "mesh.fsdp=2"),
    ("rules.optimizer=[replica]", "mesh.replica=2", "mesh.context=2"),
    ("memory.offload=[activations,optimizer] memory.remat=full", "mesh.replica=2", "batch.accumulate=2"),
)
WHOLE = ("memory.remat", "data.mixture", "model.latent")  # sections that a setting gives as a mapping


def keys(section, prefix=""):
    """The keys of a section and of the sections in it."""
    for name, info in section.model_fields.items():
        kinds = [info.annotation, *getattr(info.annotation, "__args__", ())]
        kinds = [Decoder] if f"{prefix}{name}" == "model" else kinds
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if nested and f"{prefix}{name}" not in {*UNTRIED, *WHOLE}:
            yield from keys(nested[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_key_of_a_config_has_a_setting():
    tried = {field(text) for setting in SETTINGS for text in setting.split(" ")} - {"architecture"}
    usual = {f"model.{name}" for name in ("vocab", "layers", "embed", "mlp", "heads", "head_dim", "family")}
    assert set(keys(Config)) - {*UNTRIED, *usual, "train.steps"} <= tried


def test_pairs_are_supported_or_refused_in_a_line():
    pairs = [pair for pair in itertools.combinations(SETTINGS, 2) if field(pair[0]) != field(pair[1])]
    refused = [is_refused(pair) for pair in random.Random(0).sample(pairs, 400)]
    assert 0 < sum(refused) < len(refused) / 3


def test_rows_that_are_done_are_not_drawn_again(tmp_path):
    settings = ("mesh.fsdp=2", "zero=1", "memory.remat=full", "batch.accumulate=2", "optimizer.clip=null")
    rows = list(covering_rows(0, settings=settings))
    file = tmp_path / "results.jsonl"
    file.write_text("".join(f'{{"row": {list(row)}, "failure": null}}\n'.replace("'", '"') for row in rows))
    assert rows
    assert list(recorded(file)) == rows
    assert not list(covering_rows(1, recorded(file), settings=settings))


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=("quantized", "context", "groups"))
def test_the_loss_is_that_of_the_plain_config(row):
    assert failure(row) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_many_settings_train_to_the_loss_of_the_plain_config(seed):
    assert failure(next(covering_rows(seed))) is None
