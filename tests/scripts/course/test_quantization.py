"""The stop of few bits: bytes and errors of each form, and a trained network that gets worse by bits."""

from typing import Any

import pytest

from jaxmem.errors import UserError
from scripts.course import STOPS, quantization
from scripts.course.quantization import BITS, SCHEMES, measure


@pytest.mark.exhaustive
def test_bytes_and_errors_of_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Any:
        """As if a bit less lost a hundredth of what is right."""
        for bits in (32, *BITS):
            right, loss = 1 - 2.0**-bits, 2.0**-bits
            affine = (None, None) if bits == 32 else (right, loss)
            own = {"symmetric": right, "loss": loss, "affine": affine[0], "affine loss": affine[1]}
            yield {"weights": f"{bits} bits", "bits": bits, **own}

    monkeypatch.setattr(quantization, "quantized_networks", trained)
    monkeypatch.setattr(quantization, "SIZE", 128)
    monkeypatch.setattr(quantization, "MODEL", "tiny")
    for name in ("int6", "int5"):
        monkeypatch.delitem(SCHEMES, name)
    found = measure()
    rows = {row["stored as"]: row for row in found.tables[0].rows}
    count = rows["float32"]["parameters"]
    assert rows["float32"]["all weights, GB"] == pytest.approx(4e-9 * count)
    assert rows["float32"]["mean error"] == 0
    errors = [
        rows[name]["mean error"] for name in ("bfloat16", "int8", "nf4, blocks of 64", "int4, blocks of 64", "int3")
    ]
    assert errors == sorted(errors)
    for fewer, more in (("int4, one scale", "int4, blocks of 64"), ("int4, blocks of 64", "uint4, affine blocks")):
        assert rows[fewer]["all weights, GB"] < rows[more]["all weights, GB"]
        assert rows[fewer]["mean error"] > rows[more]["mean error"]
    saved = rows["nf4, blocks of 64"]["bits per weight"] - rows["nf4, double quantization"]["bits per weight"]
    assert 0.1 < saved < 32 / 64 - 8 / 64  # few blocks share a constant where matrices are small
    assert "of its accuracy of 100.0% down to 8 bits" in STOPS["quantization"].note.format(**found.facts)


def test_it_has_no_target() -> None:
    with pytest.raises(UserError, match="quantization does not support --target h100-80gb"):
        STOPS["quantization"].visit("h100-80gb")
