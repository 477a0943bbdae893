"""`memory.save_dtype: fp8`: exact losses, gradients close to exact ones, and half of the saved bytes."""

import pytest

import jaxmem
from jaxmem.errors import UserError
from jaxmem.estimate.passes import passes_of
from tests.planning.conftest import config as planned
from tests.step.conftest import SMALL, Trained, config

TWO = {"global_size": 8, "accumulate": 2}
PLAIN = {"optimizer": {"clip": None, "epsilon": 1e-3}}
WIDE = {"family": "decoder", "vocab": 264, "layers": 8, "embed": 1024, "mlp": 2048, "heads": 8, "kv_heads": 8,
        "head_dim": 128}  # fmt: skip


def two_updates(memory, devices=1, sections=None, begin=None):
    return Trained(config(memory=memory, **PLAIN | (sections or {})), devices, updates=2, begin=begin)


@pytest.fixture(scope="module")
def alone():
    return two_updates({})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "memory",
    [
        {"remat": "dots"},
        {"remat": "full", "update": "during"},
        {"remat": "sqrt", "mlp_chunk": 6, "head_groups": 2},
        {"remat": {"save": ["mlp_hidden", "attention_q"]}},
        {"remat": "dots", "head_groups": 2},
        {"remat": "full", "offload": "activations"},
        {"remat": "dots", "offload": "activations", "update": "during"},
    ],
)
def test_losses_are_exact_and_gradients_close(memory, alone):
    in_fp8 = two_updates(memory | {"save_dtype": "fp8"}, begin=alone)
    assert_close(in_fp8, alone, loss_tolerance=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("devices", "memory", "sections"),
    [
        (1, {"remat": "dots"}, {"adapter": {"kind": "qlora"}, "precision": {"compute": "fp8"}}),
        (4, {"remat": "full"}, {"mesh": {"context": 2, "tensor": 2}}),
        (4, {"remat": "dots"}, {"mesh": {"tensor": 2, "fsdp": 2}}),
        (2, {"remat": "sqrt"}, {"mesh": {"stage": 2}, "batch": TWO}),
    ],
)
def test_losses_are_exact_in_every_layout(devices, memory, sections):
    plain = two_updates(memory, devices, sections)
    in_fp8 = two_updates(memory | {"save_dtype": "fp8"}, devices, sections, begin=plain)
    assert_close(in_fp8, plain, loss_tolerance=2e-4 if "precision" in sections else 1e-6)


def assert_close(in_fp8, plain, loss_tolerance):
    first, second = in_fp8.metrics
    exact_first, exact_second = plain.metrics
    assert first["loss"] == pytest.approx(exact_first["loss"], rel=loss_tolerance)
    assert first["gradient_norm"] == pytest.approx(exact_first["gradient_norm"], rel=0.05)
    assert first["gradient_norm"] != exact_first["gradient_norm"]
    assert second["loss"] == pytest.approx(exact_second["loss"], rel=5e-3)


@pytest.mark.parametrize("remat", ["none", "auto"])
def test_what_has_no_names_is_refused(remat):
    with pytest.raises(UserError, match=f"memory.save_dtype=fp8 does not support memory.remat={remat}; use"):
        config(memory={"remat": remat, "save_dtype": "fp8"})


def test_experts_that_would_be_chosen_again_are_refused():
    with pytest.raises(UserError, match=r"memory.save_dtype=fp8 does not support model.experts"):
        config(memory={"remat": "dots", "save_dtype": "fp8"}, model={"preset": "tiny", "experts": {"count": 4, "top_k": 2}})


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
