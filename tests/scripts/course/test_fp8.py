"""The stop of FP8: an outlier costs an integer format first, a float format only at the end of its range."""

import pytest

from scripts.course.fp8 import INT8, arrays, error_beside, errors, measure


@pytest.mark.exhaustive
def test_an_outlier_costs_its_neighbours():
    for name, factor, limits in (
        (INT8, 100.0, (0.3, 1.0)),
        ("FP8, a scale per tensor", 100.0, (0.03, 0.045)),
        ("FP8, a scale per tensor", 1e6, (0.9, 1.1)),
        ("FP8, a scale per row", 1e6, (0.03, 0.045)),
    ):
        assert limits[0] < error_beside(factor, name) < limits[1]


@pytest.mark.exhaustive
def test_gradients_are_rounded_to_fewer_bits_than_results():
    row = errors(*arrays(), "tensor")
    assert row["gradient of x"] == pytest.approx(row["gradient of w"], rel=0.1)
    assert row["gradient of x"] > 1.4 * row["result"] > 10 * errors(*arrays(), None)["result"]


@pytest.mark.exhaustive
def test_more_gradients_are_zero_in_the_narrower_format():
    facts = measure().facts
    assert facts["below"] > 2 * facts["wide"]
