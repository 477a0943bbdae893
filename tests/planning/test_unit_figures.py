"""Figures that others published, from the shapes and places of a run's state: nothing is compiled or allocated."""

import math
from functools import partial
from typing import Any

import jax
import pytest

from jaxmem.config import Config, load_config
from jaxmem.estimate.state import bytes_on_device
from jaxmem.planning.compile import compile_program
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.quant import QTensor, quantize
from jaxmem.sharding.table import is_axes
from jaxmem.step.programs import Program, program
from tests.planning.conftest import plan_here

GB = 1e9
# 7.5 B parameters, as in the ZeRO paper: 36 layers of 4096 and a vocabulary that makes it round.
WIDE = {"family": "decoder", "vocab": 26112, "layers": 36, "embed": 4096, "mlp": 11008, "heads": 32, "kv_heads": 32,
        "head_dim": 128}  # fmt: skip
MIXED = {"parameters": "bfloat16", "master": "float32"}


def run(model: dict[str, Any], **sections: Any) -> Config:
    base = {"name": "x", "model": model, "data": {"source": "tokens", "path": "x"}, "train": {"steps": 10}}
    return load_config({**base, **sections})


def on(target: str, cfg: Config) -> Program:
    aim = parse_target(target)
    return program(cfg, target_devices(aim, aim.memory))


def gradients(built: Program) -> int:
    """Bytes of one device, where the layout puts them."""

    def size(axes: Any, x: Any) -> int:
        split = built.layout.sharding("gradients", axes, x.shape).shard_shape(x.shape)
        return math.prod(split) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, built.model.axes, built.spec.state.params, is_leaf=is_axes)))


def states(built: Program) -> int:
    return bytes_on_device(built.spec.state.params) + bytes_on_device(built.spec.state.opt_state) + gradients(built)


@pytest.mark.parametrize(("zero", "published"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_s_table(zero: int, published: float) -> None:
    """Mixed-precision Adam on 64 GPUs: 2 + 2 + 12 bytes a parameter (arXiv:1910.02054, figure 1)."""
    cfg = run(WIDE, zero=zero, mesh={"fsdp": 64}, batch={"global_size": 64}, precision=MIXED)
    built = on("h100-80gb:8x8", cfg)
    assert built.model.parameter_count == pytest.approx(7.5 * GB, rel=0.002)
    # The paper prints two or three digits.
    assert states(built) / GB == pytest.approx(published, rel=0.01, abs=0.05)


@pytest.mark.parametrize(
    ("precision", "each"),
    [({}, 16), ({"parameters": "bfloat16"}, 8), (MIXED, 16)],
    ids=["float32", "bfloat16", "mixed"],
)
def test_bytes_per_parameter_at_8_billion(precision: dict[str, str], each: int) -> None:
    """The lectures' 128 GB, and half of it."""
    built = on("h100-80gb", run({"preset": "llama3-8b"}, precision=precision))
    assert states(built) / built.model.parameter_count == pytest.approx(each, rel=0.01)
    if each == 16:
        assert states(built) / GB == pytest.approx(128, rel=0.01)


def test_sharding_over_64_takes_a_fiftieth() -> None:
    cfg = run(WIDE, mesh={"fsdp": -1}, batch={"global_size": 64}, precision=MIXED)
    assert states(on("h100-80gb", cfg)) / states(on("h100-80gb:64", cfg)) > 50


@pytest.mark.exhaustive
def test_a_compiled_step_takes_so_much_and_no_more() -> None:
    """Weights, their float32 copy and both moments; gradients come and go within the step."""
    plan = plan_here(1, precision=MIXED, data={"sequence_length": 8})
    state = plan.compiled_step.sizes["arguments"] - plan.bytes_per_device["batch"]
    assert state == pytest.approx(14 * plan.program.model.parameter_count, rel=0.01)


def test_70_billion_weights_in_4_bits_take_35_gb() -> None:
    """The lectures' figure: half a byte each. Constants of blocks of 64, themselves in 8 bits, make it 4.13 bits."""
    built = on("h100-80gb", run({"preset": "llama3-70b"}))
    stored = jax.tree.map(four_bits, built.model.axes, built.spec.state.params, is_leaf=is_axes)
    quantized = [x for x in jax.tree.leaves(stored, is_leaf=lambda x: isinstance(x, QTensor)) if isinstance(x, QTensor)]
    assert sum(x.codes.size for x in quantized) / GB == pytest.approx(35, rel=0.01)
    assert 8 * sum(x.nbytes for x in quantized) / built.model.parameter_count == pytest.approx(4.127, rel=0.001)


def four_bits(axes: Any, x: Any) -> Any:
    """Matrices, along the dimension that a product sums over."""
    if len(axes) - (axes[0] == "layer") < 2:
        return x
    return jax.eval_shape(partial(quantize, format="nf4", axis=-2, double_quant=True), x)


@pytest.mark.exhaustive
def test_70_billion_weights_in_4_bits_are_evaluated_on_one_gpu() -> None:
    """Compiled: codes, a constant for each 256, and less than one layer's values beside them."""
    precision = {"parameters": "nf4", "block_size": 256}
    built = on("h100-80gb", run({"preset": "llama3-70b"}, precision=precision, batch={"global_size": 1}))
    weights, total = bytes_on_device(built.spec.state.params), compile_program(built.lower_evaluate(), here=False).total
    assert 8 * weights / built.model.parameter_count == pytest.approx(4.125, rel=0.001)
    assert 35 < weights / GB < total / GB < 38
    assert total - weights < 2 * built.model.parameter_count / 80
