"""`precision.compute: fp8`: selected layers, refused settings, and the same updates in every layout."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxmem.errors import UserError
from jaxmem.models.linear import Linear, matmul
from jaxmem.sharding.arrays import map_devices
from jaxmem.step import execution
from jaxmem.step.execution import ExecutionSpec
from jaxmem.step.model import ModelSpec
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, Trained, config

QWEN = {"attention_bias": True, "experts": {"count": 4, "top_k": 2, "shared": 32, "renormalize": False}}
EXPERTS = {"preset": "tiny", **SMALL, "vocab": 264, **QWEN}
TWO = {"global_size": 8, "accumulate": 2}
MATRICES = ("gate", "up", "down")


def fp8(scaling="tensor", **precision):
    return {"compute": "fp8", "fp8_scaling": scaling, **precision}


def selected(cfg):
    """The scaling of each linear layer in FP8."""
    network = nnx.eval_shape(lambda: program(cfg, jax.devices()[:1]).model.build(jax.random.key(0)))
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(network)}
    return {name: x.scaling for name, x in modules.items() if isinstance(x, Linear) and x.scaling is not None}


@pytest.mark.exhaustive
def test_the_layers_of_blocks_are_selected():
    names = [f"attention.{name}" for name in "qkvo"]
    names += [f"mlp.{part}{name}" for part in ("", "shared.") for name in MATRICES]
    cfg = config(precision=fp8("row"), model=EXPERTS)
    assert selected(cfg) == {f"blocks.{name}": "row" for name in names}


@pytest.mark.exhaustive
def test_patterns_select_layers():
    cfg = config(precision=fp8(fp8_layers=["blocks.mlp.*"]))
    assert selected(cfg).keys() == {f"blocks.mlp.{name}" for name in MATRICES}
    of_blocks = selected(config(precision=fp8()))
    assert selected(config(precision=fp8(fp8_layers=["*"]))) == of_blocks  # not the output layer
    with pytest.raises(UserError, match=r"precision.fp8_layers: blocks.mpl.\* matches no linear layer; did you mean"):
        selected(config(precision=fp8(fp8_layers=["blocks.mpl.*"])))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"precision": fp8(loss_scale="dynamic")}, "precision.loss_scale=dynamic requires precision.compute=float16"),
        ({"precision": {"fp8_scaling": "row"}}, "precision.fp8_scaling=row requires precision.compute=fp8"),
        (
            {"precision": fp8(), "model": EXPERTS, "memory": {"experts": "triton"}},
            "memory.experts=triton does not support experts in precision.fp8_layers; use memory.experts=auto",
        ),
        (
            {"precision": fp8(fp8_layers=["head"])},
            r"precision.fp8_layers: head matches only the output layer, which FP8 does not support; use .*\*blocks.\*",
        ),
    ],
)
def test_what_is_refused(sections, message):
    with pytest.raises(UserError, match=message):
        selected(config(**sections))


def test_gpus_without_the_matmuls_are_refused():
    cfg = config(precision=fp8())
    assert ModelSpec(cfg, ExecutionSpec(cfg, "gpu", 89)).graphdef
    with pytest.raises(UserError, match=r"requires compute capability 8.9, not 8.0; use precision.compute=bfloat16"):
        ModelSpec(cfg, ExecutionSpec(cfg, "gpu", 80)).graphdef  # noqa: B018
    cfg = config(precision=fp8("mxfp8"))
    assert ModelSpec(cfg, ExecutionSpec(cfg, "gpu", 100)).graphdef
    for capability, number in ((90, "9.0"), (120, "12.0")):
        with pytest.raises(UserError, match=rf"10.x, not {number}; use precision.fp8_scaling=tensor or row"):
            ModelSpec(cfg, ExecutionSpec(cfg, "gpu", capability)).graphdef  # noqa: B018


@pytest.mark.exhaustive
@pytest.mark.parametrize("scaling", ["row", "mxfp8"])
def test_partial_sums_of_devices_inside_of_a_pipeline_stage(scaling):
    """In bfloat16, whose sums XLA's compiler for CPUs does not support there."""
    layout = program(config(mesh={"stage": 2, "tensor": 2}, batch=TWO), jax.devices()[:4]).layout
    shapes = (2, 16, 64), (64, 32)
    x, w = (jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) for shape in shapes)

    def of_stage(x, w):
        with layout.inside_shard_map(("stage",)):
            return matmul(x, w, scaling, None, ("mlp", "embed"))

    with layout:
        y = jax.jit(map_devices(of_stage, (PartitionSpec(),) * 2, PartitionSpec(), over=("stage",)))(x, w)
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (y, matmul(x, w, scaling))), rtol=0.02, atol=0.1)


def exact(**sections):
    """A config in which everything but matmuls in FP8 is computed in float32: without its roundings, layouts agree."""
    return config(**{"precision": fp8(), "optimizer": {"name": "sgd", "learning_rate": 1e-2}, **sections})


@pytest.fixture(scope="module", autouse=True)
def computed_in_float32():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "compute_dtype", lambda *_: np.dtype(np.float32))
        yield


@pytest.fixture(scope="module")
def plain():
    return Trained(exact(), updates=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        (4, {"mesh": {"fsdp": 4}}),
        (4, {"mesh": {"tensor": 2, "context": 2}, "precision": fp8("row")}),
        (4, {"mesh": {"replica": 2, "fsdp": 2}, "zero": 1, "batch": TWO}),
        (4, {"mesh": {"stage": 2, "fsdp": 2}, "zero": 2, "batch": TWO}),
        (1, {"memory": {"remat": "sqrt", "mlp_chunk": 6, "head_groups": 2}}),
    ],
)
def test_updates_are_those_of_one_device(devices, sections, plain):
    """Scales are powers of two, so it does not matter which values share one, in this range of values."""
    Trained(exact(**sections), devices, updates=2, begin=plain).agrees_with(plain, rtol=1e-3, atol=1e-5)


MXFP8 = {"precision": fp8("mxfp8")}


@pytest.fixture(scope="module")
def plain_in_blocks():
    return Trained(exact(**MXFP8), updates=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        (8, {"mesh": {"fsdp": 2, "tensor": 2, "context": 2}}),
        (4, {"mesh": {"replica": 2, "fsdp": 2}, "zero": 1, "batch": TWO}),
        (4, {"mesh": {"stage": 2, "fsdp": 2}, "zero": 2, "batch": TWO}),
        (2, {"mesh": {"stage": 2}, "batch": TWO, "memory": {"remat": "dots", "update": "during"}}),
        (4, {"memory": {"remat": "sqrt", "mlp_chunk": 6, "head_groups": 2}, "mesh": {"fsdp": 2, "tensor": 2}}),
    ],
)
def test_updates_with_block_scales_are_those_of_one_device(devices, sections, plain_in_blocks):
    """Here blocks of shards are not those of one device; scales that are powers of two round them alike."""
    run = Trained(exact(**MXFP8, **sections), devices, updates=2, begin=plain_in_blocks)
    run.agrees_with(plain_in_blocks, rtol=1e-3, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": {"kind": "qlora"}},
        {"model": EXPERTS, "mesh": {"expert": 2, "tensor": 2}},
        {"model": EXPERTS, "adapter": {"kind": "qlora"}},
        {**MXFP8, "model": EXPERTS, "mesh": {"expert": 2, "tensor": 2}},
        {**MXFP8, "adapter": {"kind": "qlora"}, "mesh": {"replica": 4}, "zero": 1, "batch": TWO},
    ],
)
def test_losses_are_close_to_those_without_fp8(sections):
    devices = 4 if "mesh" in sections else 1
    precision = sections.get("precision", fp8())
    mine = Trained(config(**{**sections, "precision": precision}), devices, updates=2)
    theirs = Trained(config(**{**sections, "precision": {"compute": "float32"}}), devices, updates=2, begin=mine)
    text = mine.compiled.as_text()
    assert "f8e4m3fn" in text
    assert ("f8e5m2" in text) == (precision["fp8_scaling"] != "mxfp8")
    for update, plain_update in zip(mine.metrics, theirs.metrics, strict=True):
        assert update["loss"] == pytest.approx(plain_update["loss"], rel=5e-3)
        assert update["gradient_norm"] == pytest.approx(plain_update["gradient_norm"], rel=0.15)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        # The gradient of the loss is divided by the number of tokens before the backward pass.
        (1, {"memory": {"remat": "full", "update": "during"}}),
        # Each of 8 groups of heads has a copy of its KV head, whose gradients are rounded before they are summed.
        (4, {"memory": {"remat": "full", "head_groups": 2}, "mesh": {"tensor": 2, "context": 2}}),
    ],
)
def test_gradients_that_are_rounded_elsewhere_are_as_close_to_those_without_fp8(devices, sections):
    """These settings change how e5m2 rounds a gradient, not how far. Everything else is computed in float32."""

    def first_update(precision, devices=1, **sections):
        plain = {"name": "sgd", "learning_rate": 1e-2, "clip": None, "weight_decay": 0}
        run = Trained(config(precision=precision, optimizer=plain, **sections), devices, updates=1)
        weights = map(jax.tree.leaves, (run.params, run.first))
        return np.concatenate([np.ravel(w - begin) for w, begin in zip(*weights, strict=True)])

    exact_update = first_update({"compute": "float32"})
    one_device = first_update(fp8("row")) - exact_update
    rounded_elsewhere = first_update(fp8("row"), devices, **sections) - exact_update
    size = np.linalg.norm(exact_update)
    assert 0.02 * size < np.linalg.norm(one_device) < 0.2 * size
    assert np.linalg.norm(rounded_elsewhere) == pytest.approx(np.linalg.norm(one_device), rel=0.1)


@pytest.mark.exhaustive
def test_weights_are_gathered_as_they_are_rounded():
    """Both passes gather the seven matrices of a layer in 8 bits, with one scale; with a scale per row, as they are."""

    def gathered(scaling):
        cfg = config(precision=fp8(scaling), mesh={"fsdp": 4}, memory={"remat": "full"})
        module = program(cfg, jax.devices()[:4]).lower_step().compile().as_text()
        return Counter(re.findall(r"= (\w+)\[\S* all-gather\(", module))

    assert gathered("tensor")["u8"] == 14
    assert gathered("row")["u8"] == 0
