"""Lists of blocks in the models that a script passes to `train`: computed layer by layer, with adapters, statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.config.methods import config_with
from jaxmem.planning.result import plan_program
from jaxmem.step.programs import program
from tests.training.user_models import (
    DATA,
    LM,
    ROWS,
    TOKENS,
    Statistics,
    Transformer,
    hand_written,
    loss,
    next_token,
    settings,
    without_dropout,
)


@pytest.mark.exhaustive
def test_a_transformer_of_flax_equals_a_loop_of_flax(tmp_path):
    losses, _ = hand_written(Transformer, next_token, TOKENS, optax.adamw(1e-2), 3)
    run = jaxmem.train(settings(tmp_path), **LM | {"model": Transformer}, optimizer=optax.adamw(1e-2))
    assert run.metrics["loss"] == pytest.approx(losses[-1], rel=1e-4)


@pytest.fixture(scope="module")
def as_list(tmp_path_factory):
    return jaxmem.train(settings(tmp_path_factory.mktemp("list")), **LM)


AXES = {
    "*.attention.out.kernel": ("heads", None, "embed"),
    "*.attention.*.kernel": ("embed", "heads", None),
    "*.gate.kernel": ("embed", "mlp"),
    "*.up.kernel": ("embed", "mlp"),
    "*.down.kernel": ("mlp", "embed"),
    "embed.embedding": ("vocab", "embed"),
}


@pytest.mark.exhaustive
def test_axes_shard_a_transformer_of_flax_over_tensor_and_change_no_loss(tmp_path, as_list):
    raw = settings(tmp_path, mesh={"fsdp": 4, "tensor": 2})
    found = jaxmem.train(raw, **LM, axes=AXES, layers="blocks")
    assert found.metrics["loss"] == pytest.approx(as_list.metrics["loss"], rel=1e-5)
    up = [x for path, x in jax.tree_util.tree_leaves_with_path(found.state.params) if "'up'" in str(path)]
    assert {x.addressable_shards[0].data.shape[-2:] for x in up if x.shape[-1] == 32 and x.ndim > 1} == {(4, 16)}


@pytest.mark.exhaustive
def test_a_list_of_blocks_is_computed_layer_by_layer(tmp_path, as_list):
    expected = as_list.metrics["loss"]
    changes = {"memory": {"remat": "full", "update": "during"}}
    run = jaxmem.train(settings(tmp_path / "during", **changes), **LM, layers="blocks")
    assert run.metrics["loss"] == pytest.approx(expected, rel=1e-6)
    kernel = run.state.params["blocks"]["attention"]["query"]["kernel"]
    assert kernel.shape == (2, 16, 2, 8)
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 2, 2, 8)
    assert run.program.model.parameter_count == as_list.program.model.parameter_count
    deep = {**LM, "model": lambda rngs: Transformer(rngs, 4), "layers": "blocks"}
    sizes = {}
    for remat in ("none", "full"):
        cfg = config_with(settings(tmp_path, memory={"remat": remat}, mesh={}), **deep)
        sizes[remat] = plan_program(program(cfg, jax.devices()[:1])).bytes_per_device["activations"]
    assert sizes["full"] < 0.6 * sizes["none"]


class Renamed(Transformer):
    """Its list of blocks has another name, within another module."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.decoder = nnx.Dict(layers=self.blocks)
        del self.blocks

    def all_blocks(self, x, mask):
        for block in self.decoder.layers:
            x = block(x, mask)
        return x


@pytest.mark.exhaustive
def test_a_list_may_have_any_name(tmp_path):
    renamed = {**LM, "model": Renamed, "layers": "decoder.layers"}
    raw = settings(tmp_path, mesh={}, memory={"remat": "full", "update": "during"})
    built = program(config_with(raw, **renamed), jax.devices()[:1])
    names = built.spec.gradient_names
    assert sum("decoder.layers" in name for name in names) == 2 * 16  # two blocks of 16 weights
    built.lower_step()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"kind": "lora", "rank": 4, "targets": {"blocks[1:].*": 4}}},
        {"adapter": {"kind": "qlora", "rank": 4}, "memory": {"remat": "full", "update": "during"}, "mesh": {"fsdp": 2}},
    ],
    ids=["some layers", "qlora"],
)
def test_low_rank_adapters_of_flax_layers(tmp_path, changes):
    raw = settings(tmp_path, optimizer={"learning_rate": 0.02, "schedule": "constant"}, train={"steps": 8}, **changes)
    run = jaxmem.train(raw, jax.devices()[: raw["mesh"]["fsdp"]], **LM, layers="blocks")
    assert run.metrics["loss"] < 3.4  # log 32 = 3.47
    block = run.state.params["blocks"]
    query = block["attention"]["query"]
    lora = query["lora"]
    assert lora["a"].shape[-2:] == (16, 4)
    assert lora["b"].shape[-2:] == (4, 16)
    if changes["adapter"]["kind"] == "qlora":
        assert block["gate"]["kernel"].format == "nf4"
        assert query["bias"].dtype == jnp.float32
        return
    # Merged into the kernels, the adapters give the same loss.
    found = jaxmem.evaluate(run.directory, TOKENS[:1], model=without_dropout, loss=next_token, layers="blocks")["loss"]
    module = nnx.jit(lambda: without_dropout(nnx.Rngs(0)))()
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable.set_value(merged(run.state.params, [str(key) for key in path]))
    with jax.numpy_dtype_promotion("standard"):
        assert float(nnx.jit(next_token)(module, TOKENS[0])[0]) == pytest.approx(found, rel=1e-5)


def merged(params, path):
    """The weight at a path, with its adapter merged into it."""
    layer = int(path.pop(1)) if path[0] == "blocks" else ...
    for key in path[:-1]:
        params = params[key]
    w, lora = params[path[-1]][layer], params.get("lora")
    if lora is None or path[-1] != "kernel":
        return w
    scale = lora["layer_scale"][layer] if "layer_scale" in lora else 16 / 4
    return w + scale * (lora["a"][layer] @ lora["b"][layer]).reshape(w.shape)


@pytest.mark.exhaustive
def test_blocks_with_statistics(tmp_path):
    parts = {"model": Statistics, "loss": loss, "data": DATA, "optimizer": optax.sgd(0.1)}
    as_list = jaxmem.train(settings(tmp_path / "list"), **parts).state.params["blocks"]
    stacked = jaxmem.train(settings(tmp_path, memory={"remat": "full"}), **parts, layers="blocks").state.params[
        "blocks"
    ]
    for name in ("mean", "var", "scale"):
        expected = np.stack([as_list[key][name] for key in "01"])
        np.testing.assert_allclose(stacked[name], expected, rtol=1e-5, atol=1e-6)


def applied_twice(model, batch):
    """The stack of blocks in two calls of the model."""
    first, second = (next_token(model, {"tokens": tokens})[0] for tokens in (batch["tokens"], batch["tokens"][:, ::-1]))
    return (first + second) / 2


def applied_in_a_loop(model, batch):
    """The stack of blocks in the body of a loop."""
    x, mask = model.embed(batch["tokens"][:, :-1]), nnx.make_causal_mask(batch["tokens"][:, :-1])
    x, _ = jax.lax.scan(lambda x, _: (model.all_blocks(x, mask), None), x, length=2)
    logits = model.embed.attend(model.norm(x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("calls", "devices"), [(applied_twice, 2), (applied_in_a_loop, 1)])
def test_a_stack_that_is_applied_twice_has_the_sum_of_both_gradients(tmp_path, calls, devices):
    """Also where each device accumulates the gradients of its own rows."""
    with jax.numpy_dtype_promotion("standard"):
        module = nnx.jit(lambda: without_dropout(nnx.Rngs(jax.random.key(0))))()
        grads = nnx.jit(nnx.grad(lambda module: calls(module, TOKENS[0])))(module)
    batch, mesh = {"global_size": ROWS, "accumulate": 2}, {"fsdp": devices}
    cfg = settings(tmp_path, batch=batch, mesh=mesh, zero=1, train={"steps": 1})
    run = jaxmem.train(cfg, jax.devices()[:devices], **LM | {"loss": calls}, layers="blocks")
    assert run.metrics["gradient_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
