"""The stop of adapters beside quantized weights: their bytes by leaf, and the note."""

from __future__ import annotations

from typing import Any

import pytest

from jaxmem.lab.tour import common
from jaxmem.lab.tour.qlora import BASE, BASES, measure
from jaxmem.planning.state import DeviceBytes, state_of
from tests.planning.conftest import SMALL

STATE = {"parameters": "params", "quantization": "scales", "optimizer": "optimizer"}
TINY = {**BASE, "name": "tiny", "model": {**SMALL, "embed": 64}, "data": {"sequence_length": 16}}


def by_arithmetic(_: str, cfgs: Any) -> dict[str, Any]:
    """What a step holds of state, and some activations, without compiling it."""
    found = {}
    for name, cfg in cfgs.items():
        held, state = DeviceBytes(cfg), state_of(cfg, "cuda")
        parts = {"activations": 1000, "gradients": held("gradients", state.trainable)}
        parts |= {part: held("weights", getattr(state, of)) for part, of in STATE.items()}
        known = {"flops_per_device": 6e9, "ideal_flops_per_device": 4e9, "estimated_step_seconds": 1.0}
        all_of = {"bytes_per_device": {**parts, "total": sum(parts.values())}}
        found[name] = {"model": {"trainable": 10_000}, **known, **all_of}
    return found


def test_quantized_frozen_weights_take_less_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "plans", by_arithmetic)
    found = measure(None, TINY, {name: BASES[name] for name in ("bfloat16", "nf4", "nf4, double quantization")})
    whole, codes, double = found.panels[0].rows
    assert whole["bits per weight"] == 16
    assert 1.5 < whole["layers"] / codes["layers"] < 4  # blocks are short where the matrices are
    assert (
        whole["embedding and output"]
        == whole["embedding and output in bfloat16"]
        == codes["embedding and output in bfloat16"]
        > 1.5 * codes["embedding and output"]
    )
    assert whole["bits per weight"] > codes["bits per weight"] > double["bits per weight"] > 4
    assert (
        whole["trainable"] == codes["trainable"] == double["trainable"] > 0
    )  # weights, gradients and state of adapters alone
    assert whole["total"] > codes["total"] > double["total"]
    assert whole["one dequantization"] is None
    assert 0 < codes["one dequantization"] < double["one dequantization"]
    assert "From bfloat16 to nf4, double quantization the frozen weights shrink" in found.note
