"""The FLOPs of an update, counted by hand."""

import jax
import pytest

from jaxmem.planning.result import ideal_flops
from jaxmem.step.programs import program
from tests.planning.conftest import SMALL, config


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_embeddings_are_looked_up_only(tied: bool) -> None:
    """Of a frozen output matrix, forward and input gradient are computed, of a frozen embedding neither."""
    length = 24
    sections = {
        "batch": {"global_size": 1},
        "data": {"sequence_length": length},
        "adapter": {"kind": "lora", "rank": 1},
    }
    built = program(config(model={**SMALL, "tie_embeddings": tied}, **sections), jax.devices()[:1])
    model = built.model
    used = model.parameter_count - (0 if tied else SMALL["vocab"] * SMALL["embed"])
    attention = 4 * SMALL["heads"] * SMALL["head_dim"] * SMALL["layers"] * length * (length + 1) / 2
    expected = 2 * (2 * used * length) + 2 * model.trainable_count * length + 3 * attention
    assert ideal_flops(built) == pytest.approx(expected)
