"""The stop of adapters beside a base in codes: what the base takes by its leaves, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from jaxmem.lab.tour import compiled
from jaxmem.lab.tour.qlora import BASE, BASES, by_base
from jaxmem.planning.state import Held, state_of
from tests.planning.conftest import SMALL

STATE = {"parameters": "params", "quantization": "constants", "optimizer": "optimizer"}
TINY = {**BASE, "name": "tiny", "model": {**SMALL, "embed": 64}, "data": {"sequence_length": 16}}


def by_arithmetic(_: str, cfgs: Any) -> dict[str, Any]:
    """What a step holds of state, and some activations, without compiling it."""
    found = {}
    for name, cfg in cfgs.items():
        held, state = Held(cfg), state_of(cfg, "cuda")
        parts = {"activations": 1000, "gradients": held("gradients", state.trained)}
        parts |= {part: held("weights", getattr(state, of)) for part, of in STATE.items()}
        known = {"flops_per_device": 6e9, "ideal_flops_per_device": 4e9, "estimated_step_seconds": 1.0}
        all_of = {"bytes_per_device": {**parts, "total": sum(parts.values())}}
        found[name] = {"model": {"trainable": 10_000}, **known, **all_of}
    return found


def test_a_base_in_codes_takes_less_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "plans", by_arithmetic)
    found = by_base(None, TINY, {name: BASES[name] for name in ("bfloat16", "nf4", "nf4, constants in 8 bits")})
    whole, codes, double = found.tables[0].rows
    assert whole["bits"] == 16
    assert 1.5 < whole["layers"] / codes["layers"] < 4  # blocks are short where the matrices are
    assert whole["tables"] == whole["tables_in_bfloat16"] == codes["tables_in_bfloat16"] > 1.5 * codes["tables"]
    assert whole["bits"] > codes["bits"] > double["bits"] > 4
    assert whole["learns"] == codes["learns"] == double["learns"] > 0  # weights, gradients and state of adapters alone
    assert whole["total"] > codes["total"] > double["total"]
    assert whole["decoding"] == 0 < codes["decoding"] < double["decoding"]
    assert "From bfloat16 to nf4, constants in 8 bits the base shrinks" in found.note
