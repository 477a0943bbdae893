"""Messages of compiled steps against theory: kinds and bytes, loops executed, on GPUs that are not here."""

from __future__ import annotations

import pytest

from jaxmem.planning.compile import compile_all, listening
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.planning.timeline import timeline
from jaxmem.planning.volume import volume
from jaxmem.program import program
from tests.planning.conftest import SMALL, config

MODEL = {**SMALL, "layers": 4, "embed": 256, "mlp": 1024, "heads": 8, "kv_heads": 8, "head_dim": 32}
LAYOUTS = {
    "data": ({"fsdp": 8}, 0, {"all-reduce"}),
    "zero-1": ({"replica": 2, "fsdp": 4}, 1, {"reduce-scatter", "all-gather", "all-reduce"}),
    "zero-2": ({"fsdp": 8}, 2, {"reduce-scatter", "all-gather", "all-to-all"}),
    "hybrid": ({"replica": 2, "fsdp": 4}, 3, {"reduce-scatter", "all-gather", "all-to-all", "all-reduce"}),
    "tensor": ({"tensor": 8}, 3, {"reduce-scatter", "all-gather"}),
    "context": ({"context": 8}, 3, {"reduce-scatter", "all-gather", "collective-permute"}),
}
SMALLEST = 0.01  # of all bytes: norms' gradients, ids, sums


@pytest.mark.parametrize("name", LAYOUTS)
def test_messages_are_those_of_theory(name):
    mesh, zero, kinds = LAYOUTS[name]
    cfg = config(
        model=MODEL, mesh=mesh, zero=zero, data={"sequence_length": 128}, batch={"global_size": 128, "accumulate": 4},
        memory={"remat": "full"},
    )  # fmt: skip
    target = parse_target("h100-80gb:8")
    built = program(cfg, target_devices(target, target.memory))
    with listening() as remarks:
        step, _ = compile_all(built.lower_step(), {}, here=False)
    traffic = timeline(step.module, target.gpu, target.count, target.per_host).traffic
    sent = sum(one.wire_bytes for one in traffic.values())
    assert sent == pytest.approx(volume(built).total, rel=0.05)
    assert {kind for kind, one in traffic.items() if one.wire_bytes > SMALLEST * sent} == kinds
    assert "replicated" not in remarks.found
