"""The stop of weights: recorded numbers are those that the code computes; the model is needed only to record."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmem.errors import UserError
from jaxmem.quant.formats import FORMATS
from scripts.course import weights
from scripts.course.weights import BLOCK, BLOCKS, FORMS, code_values, compute, measure, relative_error


def test_recording_needs_the_model_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights, "MODEL", tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"weights --record 1 needs .*model.gguf; run python scripts/chat.py"):
        measure(1)


@pytest.mark.parametrize("name", FORMS)
def test_codes_are_those_of_the_format(name: str) -> None:
    values = code_values(name)
    assert max(map(abs, values)) == pytest.approx(1)
    assert len(values) <= 2 ** FORMATS[name].bits
    assert min(abs(value) for value in values) == 0


def test_errors_of_random_numbers_are_the_published_ones() -> None:
    """nf4 in blocks of 64: a mean square of 0.00846 (Dettmers et al., arXiv:2305.14314, by bitsandbytes)."""
    draws = np.random.default_rng(0).standard_normal((256, 4 * max(BLOCKS))).astype(np.float32)
    assert relative_error(draws, "nf4", 64) ** 2 == pytest.approx(0.00846, rel=0.02)
    assert relative_error(draws, "nf4", 64, double=True) == pytest.approx(relative_error(draws, "nf4", 64), rel=0.01)


@pytest.mark.exhaustive
def test_all_numbers_are_computed_and_an_outlier_costs_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BLOCKS", (32, BLOCK, 512))
    draws = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32)
    draws[3, 100] = 40
    found = compute(draws)
    assert json.loads(json.dumps(found)) == found
    assert found["outlier"]["ratio"] > 20
    typical, spoiled, mended = (row["relative error"] for row in found["outlier"]["rows"])
    assert spoiled > 2 * typical
    assert mended < 1.5 * typical
    for name in ("int4", "nf4", "fp4"):
        assert found["errors"][name] == sorted(found["errors"][name])
