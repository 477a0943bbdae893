"""Every two settings together, a sample: python -m tests.support.pairs tries all pairs."""

import itertools
import random

import pytest

from jaxmem.config import Config
from tests.support.pairs import SETTINGS, UNTRIED, covering_rows, failure, field, is_refused

SECTIONS = ("memory", "precision", "optimizer", "adapter", "mesh", "objective")
ROWS = (
    ("memory.remat=sqrt", "precision.parameters=int8", "mesh.fsdp=2"),
    ("memory.offload=[activations,optimizer] memory.remat=full", "mesh.replica=2", "batch.accumulate=2"),
    ("memory.remat=sqrt", "mesh.replica=2", "mesh.context=2", "batch.accumulate=2"),
    next(covering_rows(0))[:10],
)


def test_every_field_has_a_setting():
    fields = {f"{name}.{key}" for name in SECTIONS for key in Config.model_fields[name].annotation.model_fields}
    assert fields | {"zero", "batch.accumulate", "pipeline.rounds", "pipeline.schedule"} == {
        *map(field, SETTINGS),
        *UNTRIED,
    }


def test_pairs_are_supported_or_refused_in_a_line():
    pairs = [pair for pair in itertools.combinations(SETTINGS, 2) if field(pair[0]) != field(pair[1])]
    refused = [is_refused(pair) for pair in random.Random(0).sample(pairs, 400)]
    assert 0 < sum(refused) < len(refused) / 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=("quantized", "groups", "context", "many"))
def test_the_loss_is_that_of_the_plain_config(row):
    assert failure(row) is None
