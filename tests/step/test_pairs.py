"""Every two settings together, a sample: python -m tests.support.pairs tries all pairs."""

import itertools
import random

import pytest

from jaxmem.config import Config
from jaxmem.config.base import Section
from jaxmem.config.networks import Decoder
from tests.support.pair_settings import PICTURES, SETTINGS, UNTRIED, field, refusal
from tests.support.pairs import Cover, Outcome, Results, outcome

ROW = (
    "rules.optimizer=[replica]", "mesh.replica=2", "mesh.context=2", "batch.accumulate=2",
    "memory.offload=[activations,optimizer] memory.remat=full",
)  # fmt: skip
# Beyond the tolerance, unless what is between the matmuls in FP8 is computed in float32.
ROW_IN_FP8 = (f"objective.name=binary {PICTURES}", "mesh.fsdp=2", "mesh.tensor=2", "precision.compute=fp8")
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
    refused = [pair for pair in random.Random(0).sample(pairs, 400) if refusal(pair)]
    assert 0 < len(refused) < 400 / 3


FIVE = ("mesh.fsdp=2", "zero=1", "memory.remat=full", "batch.accumulate=2", "optimizer.clip=null")


def test_rows_that_have_trained_are_not_drawn_again(tmp_path):
    cover, results, row = Cover(0, settings=FIVE), Results(tmp_path / "results.jsonl"), ()
    while row is not None:
        cover.add(row)
        results.write(row, Outcome(), 1, len(cover.left))
        row = cover.next_row()
    trained = [row for row, result in results.read() if result == Outcome()]
    assert FIVE in [tuple(sorted(row, key=FIVE.index)) for row in trained]
    assert Cover(1, trained, FIVE).next_row() is None


def test_a_pair_counts_only_when_a_row_with_it_has_trained():
    cover = Cover(0, settings=FIVE)
    row = cover.next_row()
    assert set(row) == set(FIVE)
    cover.refuse(("mesh.fsdp=2", "zero=1", "memory.remat=full"), "three of them")
    assert len(cover.left) == 10
    row = cover.next_row()
    assert not {"mesh.fsdp=2", "zero=1", "memory.remat=full"} <= {*row}
    cover.refuse(("zero=1", "batch.accumulate=2"), "two of them")
    while (row := cover.next_row()) is not None:
        cover.add(row)
    assert cover.refused == {frozenset(("zero=1", "batch.accumulate=2")): "two of them"}
    assert not cover.left


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", [ROW, ROW_IN_FP8], ids=["offloaded", "fp8"])
def test_the_loss_is_that_of_the_plain_config(row):
    assert outcome(row) == Outcome()
