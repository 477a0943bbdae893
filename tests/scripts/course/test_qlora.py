"""The stop of adapters on quantized weights: their bytes by leaf, and the note."""

from typing import Any

import pytest

from jaxmem.config import load_config
from jaxmem.estimate.state import DeviceBytes, state_of
from scripts.course import STOPS, common
from scripts.course.qlora import BASE, BASES, measure
from tests.planning.conftest import SMALL

TINY = {**BASE, "name": "tiny", "model": {**SMALL, "embed": 64}, "data": {"sequence_length": 16}}


def by_arithmetic(_: str, base: Any, rows: Any) -> dict[str, Any]:
    """What a step holds of state, and some activations, without compiling it."""
    found = {}
    for name, overrides in rows.items():
        cfg = load_config(base, overrides)
        held, state = DeviceBytes(cfg), state_of(cfg, "cuda")
        parts = {"activations": 1000, "gradients": held("gradients", state.trainable)}
        parts |= {part: held("weights", state.categories[part]) for part in ("parameters", "quantization", "optimizer")}
        known = {"flops_per_device": 6e9, "ideal_flops_per_device": 4e9}
        all_of = {"bytes_per_device": {**parts, "total": sum(parts.values())}}
        found[name] = {"model": {"trainable": 10_000}, **known, **all_of}
    return found


@pytest.mark.exhaustive
def test_quantized_frozen_weights_take_less_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "plans", by_arithmetic)
    found = measure(
        "rtx4090-24gb", TINY, {name: BASES[name] for name in ("bfloat16", "nf4", "nf4, double quantization")}
    )
    bfloat16, nf4, double = found.tables[0].rows
    assert 16 <= bfloat16["bits per weight"] < 16.1  # vectors are stored in float32
    for part in ("frozen layers, GiB", "embedding and output, GiB"):
        assert 1.5 < bfloat16[part] / nf4[part] < 4  # blocks are short where the matrices are
    assert bfloat16["bits per weight"] > nf4["bits per weight"] > double["bits per weight"] > 4
    # Weights, gradients and state of the adapters alone.
    assert bfloat16["trainable, GiB"] == nf4["trainable, GiB"] == double["trainable, GiB"] > 0
    assert bfloat16["total, GiB"] > nf4["total, GiB"] > double["total, GiB"]
    assert "From 'bfloat16' to 'nf4, double quantization'" in STOPS["qlora"].note.format(**found.facts)
