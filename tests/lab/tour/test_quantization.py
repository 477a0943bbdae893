"""The stop of few bits: bytes and errors of each form, and a trained network that gets worse by bits."""

from __future__ import annotations

from typing import Any

import pytest

from jaxmem.errors import UserError
from jaxmem.lab.tour import quantization
from jaxmem.lab.tour.quantization import BITS, FORMS, by_bits


def test_bytes_and_errors_of_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(_: Any) -> Any:
        """As if a bit less lost a hundredth of what is right."""
        for bits in (32, *BITS):
            found = {"accuracy": 1 - 2.0**-bits, "loss": 2.0**-bits}
            yield {"name": str(bits), "bits": bits, "scale": found, "affine": None if bits == 32 else found}

    monkeypatch.setattr(quantization, "_trained", trained)
    monkeypatch.setattr(quantization, "SIZE", 128)
    found = by_bits(model="tiny", forms=[form for form in FORMS if form.name not in ("int6", "int5")])
    rows = {row["name"]: row for row in found.tables[0].rows}
    count = rows["float32"]["parameters"]
    assert rows["float32"]["bytes"] == 4 * count
    assert rows["float32"]["error"] == 0
    errors = [rows[name]["error"] for name in ("bfloat16", "int8", "nf4, blocks of 64", "int4, blocks of 64", "int3")]
    assert errors == sorted(errors)
    for fewer, more in (("int4, one scale", "int4, blocks of 64"), ("int4, blocks of 64", "uint4, affine blocks")):
        assert rows[fewer]["bytes"] < rows[more]["bytes"]
        assert rows[fewer]["error"] > rows[more]["error"]
    saved = rows["nf4, blocks of 64"]["bits"] - rows["nf4, double"]["bits"]
    assert 0.1 < saved < 32 / 64 - 8 / 64  # few blocks share a constant where matrices are small
    assert "within a point of that down to 8 bits" in found.note


def test_it_has_no_target() -> None:
    with pytest.raises(UserError, match="tour quantization counts and trains on this machine; leave it out"):
        by_bits("h100-80gb")
