"""`memory.save_dtype: fp8`: exact losses, gradients close to exact ones, and half of the saved bytes."""

import pytest

import jaxmem
from jaxmem.errors import UserError
from jaxmem.estimate.passes import passes_of
from tests.planning.conftest import config as planned
from tests.step.conftest import SMALL, Trained, config
from tests.support.tiers import exhaustive

EXPERTS = {"preset": "tiny", **SMALL, "vocab": 264, "experts": {"count": 4, "top_k": 2}}
TWO = {"global_size": 8, "accumulate": 2}
WIDE = {"family": "decoder", "vocab": 264, "layers": 8, "embed": 1024, "mlp": 2048, "heads": 8, "kv_heads": 8,
        "head_dim": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "memory", "sections"),
    [
        (1, {"remat": "dots"}, {}),
        (1, {"remat": "full", "update": "during"}, {"optimizer": {"clip": None, "epsilon": 1e-3}}),
        exhaustive(1, {"remat": "full"}, {}),
        exhaustive(1, {"remat": "sqrt"}, {}),
        exhaustive(1, {"remat": {"save": ["mlp_hidden", "attention_q"]}}, {}),
        exhaustive(1, {"remat": "full", "mlp_chunk": 6, "head_groups": 2}, {}),
        exhaustive(1, {"remat": "dots"}, {"adapter": {"kind": "qlora"}}),
        exhaustive(1, {"remat": "dots"}, {"precision": {"compute": "fp8"}}),
        exhaustive(4, {"remat": "dots"}, {"mesh": {"fsdp": 2, "tensor": 2}}),
        exhaustive(4, {"remat": "full"}, {"mesh": {"context": 2, "tensor": 2}}),
        exhaustive(4, {"remat": "dots"}, {"model": EXPERTS, "mesh": {"expert": 2, "tensor": 2}}),
        exhaustive(2, {"remat": "dots"}, {"mesh": {"stage": 2}, "batch": TWO}),
        exhaustive(2, {"remat": "sqrt"}, {"mesh": {"stage": 2}, "batch": TWO}),
        exhaustive(1, {"remat": "full", "offload": "activations"}, {}),
        exhaustive(1, {"remat": "dots", "offload": "activations"}, {}),
        exhaustive(1, {"remat": "dots", "update": "during"}, {"optimizer": {"clip": None, "epsilon": 1e-3}}),
    ],
)
def test_losses_are_exact_and_gradients_close(devices, memory, sections):
    in_fp8, plain = (
        Trained(config(memory=memory | {"save_dtype": dtype}, **sections), devices, updates=2)
        for dtype in ("fp8", "compute")
    )
    first, exact = in_fp8.metrics[0], plain.metrics[0]
    assert first["loss"] == pytest.approx(exact["loss"], rel=2e-4 if "precision" in sections else 1e-6)
    assert first["gradient_norm"] == pytest.approx(exact["gradient_norm"], rel=0.05)
    assert first["gradient_norm"] != exact["gradient_norm"]
    assert in_fp8.metrics[1]["loss"] == pytest.approx(plain.metrics[1]["loss"], rel=5e-3)


@pytest.mark.parametrize("remat", ["none", "auto"])
def test_what_has_no_names_is_refused(remat):
    with pytest.raises(UserError, match=f"memory.save_dtype=fp8 does not support memory.remat={remat}; use"):
        config(memory={"remat": remat, "save_dtype": "fp8"})


def wide(save_dtype, remat, offload="none"):
    sections = {"model": WIDE, "data": {"sequence_length": 1024}, "precision": {"compute": "bfloat16"}}
    return planned(
        **sections, batch={"global_size": 4}, memory={"save_dtype": save_dtype, "remat": remat, "offload": offload}
    )


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("kind", ["saved", "offloaded"])
def test_saved_and_offloaded_bytes_halve(remat, kind):
    offload = "activations" if kind == "offloaded" else "none"
    in_fp8, plain = (getattr(passes_of(wide(dtype, remat, offload), "gpu"), kind) for dtype in ("fp8", "compute"))
    # 1 byte per value, and 4 per block of 128, in place of 2.
    assert in_fp8 == (1 + 4 / 128) / 2 * plain


@pytest.mark.exhaustive
def test_compiled_bytes_halve():
    in_fp8, plain, none = (
        jaxmem.plan(wide(*settings), "h100-80gb").bytes_per_device["activations"]
        for settings in (("fp8", "dots"), ("compute", "dots"), ("compute", "full"))
    )
    assert in_fp8 - none < 0.5 * (plain - none)
