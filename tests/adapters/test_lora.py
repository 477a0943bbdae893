"""LoRA and DoRA compared with the merged weight in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxmem.adapters import Lora, lora, merge
from jaxmem.config import Decoder
from jaxmem.config.adapter import Adapter, LowRank
from jaxmem.errors import UserError
from jaxmem.models import build
from jaxmem.models.embedding import Embedding
from jaxmem.models.linear import Linear
from jaxmem.optim.selection import Selection
from jaxmem.quant import quantize
from jaxmem.sharding.table import path_name
from jaxmem.stack.apply import stacked


class Network(nnx.Module):
    def __init__(self):
        self.first = Linear(nnx.Rngs(0), 24, 40, ("embed", "mlp"))
        self.second = Linear(nnx.Rngs(1), 40, 24, ("mlp", "embed"))


def layer(magnitude):
    linear = Linear(nnx.Rngs(0), 24, 40, ("embed", "mlp"), bias=True)
    linear.lora = Lora(nnx.Rngs(1), linear, [LowRank(3, 2.1, 0.7)], Adapter(kind="dora" if magnitude else "lora"))
    linear.lora.b = nnx.Param(jax.random.normal(jax.random.key(2), (3, 40)), axes=("rank", "mlp+"))
    return linear


@pytest.mark.parametrize("magnitude", [False, True])
def test_a_layer_with_an_adapter_equals_the_merged_layer(magnitude):
    linear, x = layer(magnitude), jax.random.normal(jax.random.key(3), (5, 24))
    w, a, b, bias = (np.float64(one.get_value()) for one in (linear.weight, linear.lora.a, linear.lora.b, linear.bias))
    summed = w + 0.7 * a @ b
    if magnitude:
        summed = summed * np.linalg.norm(w, axis=0) / np.linalg.norm(summed, axis=0)
    np.testing.assert_allclose(linear(x), np.float64(x) @ summed + bias, rtol=2e-5, atol=2e-6)


def test_gradients_of_biases_are_summed_over_tokens_in_float32():
    linear = Linear(nnx.Rngs(0), 24, 40, ("embed", "mlp"), bias=True)
    linear.lora = Lora(nnx.Rngs(1), linear, [LowRank(3, 2.1, 0.5)], Adapter(kind="lora", lora_bias=True))
    graphdef, state = nnx.split(linear)
    x = jnp.ones((64, 128, 24), jnp.bfloat16)
    g = jnp.full((64, 128, 40), 0.1, jnp.bfloat16).astype(jnp.float32)
    loss = lambda state: jnp.vdot(g, nnx.merge(graphdef, state)(x).astype(jnp.float32))  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(state)
    np.testing.assert_allclose(gradient["bias"].get_value(), 8192 * g[0, 0], rtol=1e-3)
    np.testing.assert_allclose(gradient["lora"]["bias"].get_value(), 4096 * g[0, 0], rtol=1e-3)


def test_scale_of_lora_and_rslora():
    model = Network()
    lora(model, targets={"first": 4, "second": 16}, alpha=32)
    assert (model.first.lora.scale, model.second.lora.scale) == (8, 2)
    lora(model, targets=["*"], rank=16, alpha=32, rslora=True)
    assert (model.first.lora.scale, model.second.lora.scale) == (8, 8)


def test_gradients_do_not_pass_through_the_norms():
    """The gradient of A is that of m / c (x W + s x A B) with c held."""
    linear, x = layer(True), jax.random.normal(jax.random.key(3), (5, 24))
    graphdef, state = nnx.split(linear)
    of = jax.grad(lambda state: jnp.sum(jnp.square(nnx.merge(graphdef, state)(x))))(state)
    w, a, b = (np.float64(one.get_value()) for one in (linear.weight, linear.lora.a, linear.lora.b))
    ratio = np.linalg.norm(w, axis=0) / np.linalg.norm(w + 0.7 * a @ b, axis=0)
    g = 2 * np.float64(linear(x)) * ratio
    np.testing.assert_allclose(of["lora"]["a"].get_value(), 0.7 * np.float64(x).T @ (g @ b.T), rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_an_adapter_of_an_embedding():
    embedding = Embedding(nnx.Rngs(0), 30, 8)
    embedding.lora = Lora(nnx.Rngs(1), embedding, [LowRank(2, 1.0, 0.5)], Adapter())
    ids = jnp.array([[3, 29, 0]])
    before = embedding(ids, jnp.float32)
    np.testing.assert_array_equal(before[0], embedding.weight.get_value()[ids[0]])
    embedding.lora.a = nnx.Param(jax.random.normal(jax.random.key(2), (30, 2)), axes=("vocab+", "rank"))
    a, b = embedding.lora.a.get_value(), embedding.lora.b.get_value()
    np.testing.assert_allclose(embedding(ids, jnp.float32) - before, 0.5 * (a @ b)[ids], rtol=1e-5, atol=1e-6)


def test_dropout_of_the_adapter_input():
    linear, x = layer(False), jnp.ones((4, 24))
    linear.lora.dropout = 0.5
    keys = jax.random.split(jax.random.key(0), 4)
    dropped = linear(x, keys)
    np.testing.assert_array_equal(linear(x), layer(False)(x))
    assert len(np.unique(np.asarray(dropped)[:, 0])) == 4  # each row by its own key
    linear.lora.b = nnx.Param(jnp.zeros((3, 40)), axes=("rank", "mlp+"))
    np.testing.assert_array_equal(linear(x, keys), linear(x))


def outputs(blocks):
    """Of each layer."""
    graphdef, state = nnx.split(blocks)
    x = jax.random.normal(jax.random.key(4), (5, 24))
    return jax.vmap(lambda weights: nnx.merge(graphdef, weights)(x))(state)


def test_layers_of_several_ranks_and_scales_equal_the_merged_stack():
    """One of them without an adapter; with DoRA its norms are not changed either."""
    network = nnx.Module()
    network.cfg = None
    network.blocks = stacked(lambda rngs: Linear(rngs, 24, 40, ("embed", "mlp"), bias=True), 3, nnx.Rngs(0))
    targets = {"blocks[:1]": 2, "blocks[-1:]": 4}
    for options in ({"lora_bias": True}, {"dora": True}):
        lora(network, targets=targets, alpha=8, alpha_pattern={"blocks[2:]": 2.0}, **options)
        own = network.blocks.lora
        np.testing.assert_array_equal(own.layer_scale.get_value(), [4, 0, 0.5])
        mask = np.arange(4) < np.array([2, 0, 4])[:, None]
        own.b.set_value(jax.random.normal(jax.random.key(2), (3, 4, 40)) * np.float32(mask[..., None]))
        extra = own.bias or own.magnitude
        extra.set_value(extra.get_value() + jax.random.normal(jax.random.key(3), (3, 40)))
        before = outputs(network.blocks)
        merge(network)
        assert network.blocks.lora is None
        after = outputs(network.blocks)
        np.testing.assert_allclose(before, after, rtol=2e-4, atol=2e-5)
    with pytest.raises(UserError, match=r"alpha_pattern: blocks\[3:\] matches no layer"):
        lora(network, targets=targets, alpha_pattern={"blocks[3:]": 2.0})


def test_targets_count_the_layers_of_all_stacks():
    """Layers 0, 2 and 4 have no experts: the stacks are layer 0, layers 1 and 3, and layers 2 and 4."""
    experts = {"count": 2, "top_k": 1, "every": 2, "dense_mlp": 8}
    shape = {"vocab": 8, "layers": 5, "embed": 8, "mlp": 4, "heads": 1, "kv_heads": 1, "head_dim": 8}
    model = nnx.eval_shape(lambda: build(Decoder(**shape, experts=experts), nnx.Rngs(0)))
    lora(model, targets={"blocks[1:3].mlp.up": 2, "blocks[-1:].attention.q": 4})
    found = {".".join(map(str, path)): x.shape for path, x in flatten_dict(nnx.to_pure_dict(nnx.state(model))).items()}
    assert {name.removesuffix(".lora.a"): shape for name, shape in found.items() if name.endswith("lora.a")} == {
        "blocks[1:5].[1:5:2].mlp.up": (2, 2, 8, 2),
        "blocks[1:5].[2:5:2].mlp.up": (2, 8, 2),
        "blocks[1:5].[2:5:2].attention.q": (2, 8, 4),
    }
    with pytest.raises(UserError, match=r"blocks\[5:\].\* matches no layer"):
        lora(model, targets=["blocks[5:].*"])
    chosen = Selection.of(nnx.to_pure_dict(nnx.state(model)), ["blocks[:3].mlp.down.weight"])
    assert sorted((path_name(path), layers) for path, layers in chosen.layers.items()) == [
        ("blocks[0:1].mlp.down.weight", None),
        ("blocks[1:5].[1:5:2].mlp.down.weight", (0,)),
        ("blocks[1:5].[2:5:2].mlp.down.weight", (0,)),
    ]


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda rngs: nnx.Linear(4, 6, rngs=rngs), (3, 4)),
        (lambda rngs: nnx.LinearGeneral((2, 4), (3, 2), axis=(-2, -1), rngs=rngs), (3, 2, 4)),
        (lambda rngs: nnx.Einsum("bte,hed->bthd", (3, 4, 2), rngs=rngs), (3, 5, 4)),
    ],
    ids=["Linear", "LinearGeneral", "Einsum"],
)
def test_adapters_of_flax_layers_are_merged(make, x):
    """Also if another adapter has been replaced."""
    model = nnx.Dict(layer=make(nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), x)
    kind = type(model.layer)
    for seed in range(2):
        lora(model, rank=2, targets=["*"], key=jax.random.key(seed))
        b = model.layer.lora.b
        b.set_value(jax.random.normal(jax.random.key(2), b.get_value().shape))
    adapted = model.layer(x)
    merge(model)
    assert type(model.layer) is kind
    assert not hasattr(model.layer, "lora")
    np.testing.assert_allclose(model.layer(x), adapted, rtol=1e-4, atol=1e-5)
    assert not np.allclose(make(nnx.Rngs(0))(x), adapted, rtol=1e-2)


def test_a_flax_embedding_with_an_adapter_is_also_the_output_layer():
    """Rows of A are looked up, so A is zero at the start, as in PEFT."""
    model = nnx.Dict(table=nnx.Embed(8, 4, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(2), (3, 4))
    plain = model.table.attend(x)
    lora(model, rank=2, targets=["*"])
    a = model.table.lora.a
    assert not a.get_value().any()
    assert model.table.lora.b.get_value().all()
    a.set_value(jax.random.normal(jax.random.key(1), a.get_value().shape))
    ids = jnp.arange(8)
    adapted = model.table(ids), model.table.attend(x)
    assert not np.allclose(adapted[1], plain, rtol=1e-2)
    merge(model)
    for before, after in zip(adapted, (model.table(ids), model.table.attend(x)), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [Linear, nnx.Linear])
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_an_adapter_is_not_lost_if_its_weight_is_quantized(make, form):
    """An update of a hundredth of the weight: rounded to values of the format, none of it would be left."""
    size = 256
    if make is nnx.Linear:
        layer = nnx.Linear(size, size, rngs=nnx.Rngs(0))
    else:
        layer = Linear(nnx.Rngs(0), size, size, ("embed", "mlp"))
    weight = layer.kernel if make is nnx.Linear else layer.weight
    weight.set_value(dataclasses.replace(quantize(weight.get_value(), form, 64, -2), dtype="bfloat16"))
    before = weight.get_value().dequantize(jnp.float32)
    model = nnx.Dict(layer=layer)
    lora(model, rank=4, targets=["*"])
    b = model.layer.lora.b
    b.set_value(jax.random.normal(jax.random.key(1), b.get_value().shape))
    delta = model.layer.lora.scale * model.layer.lora.a.get_value() @ b.get_value()
    share = 0.01 * jnp.linalg.norm(before) / jnp.linalg.norm(delta)
    b.set_value(b.get_value() * share)
    merge(model)
    merged = (model.layer.kernel if make is nnx.Linear else model.layer.weight).get_value()
    assert merged.dtype == jnp.bfloat16
    error = merged.astype(jnp.float32) - (before + delta * share)
    assert jnp.linalg.norm(error) < 0.3 * jnp.linalg.norm(delta * share)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"lora_bias": True}, {"dora": True}], ids=str)
def test_adapters_of_flax_layers_refuse_what_they_do_not_compute(options):
    with pytest.raises(UserError, match="layer: adapters of Flax's layers do not support dora, dropout and lora_bias"):
        lora(nnx.Dict(layer=nnx.Linear(4, 6, rngs=nnx.Rngs(0))), rank=2, targets=["*"], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dora": True, "targets": ["*.mlp.up"]},
            r"blocks\.mlp\.up: adapters of experts do not support dora and dropout",
        ),
        ({"dropout": 0.5, "targets": ["*.mlp.up"]}, r"blocks\.mlp\.up: adapters of experts do not support dora and"),
        ({"targets": ["*"]}, "embedding: an adapter of a tied embedding is not supported"),
        ({"dora": True, "lora_bias": True, "targets": ["*.q"]}, r"attention\.q: dora does not support lora_bias"),
    ],
)
def test_adapters_of_a_decoder_refuse_what_they_do_not_compute(options, message):
    shape = {"vocab": 8, "layers": 2, "embed": 8, "mlp": 4, "heads": 1, "kv_heads": 1, "head_dim": 8}
    cfg = Decoder(**shape, tie_embeddings=True, experts={"count": 2, "top_k": 1})
    model = nnx.eval_shape(lambda: build(cfg, nnx.Rngs(0)))
    with pytest.raises(UserError, match=message):
        lora(model, rank=2, **options)
    assert model.blocks.attention.q.lora is None  # nothing was added


def test_a_column_of_zeros_is_merged():
    """As in pruned models; dora divides by the norms of columns."""
    model = Network()
    model.first.weight.set_value(model.first.weight.get_value().at[:, 3].set(0))
    lora(model, dora=True, rank=2, targets=["first"])
    x = jax.random.normal(jax.random.key(0), (5, 24))
    before = model.first(x)
    merge(model)
    np.testing.assert_allclose(model.first(x), before, rtol=1e-5, atol=1e-6)


def test_a_merge_that_is_refused_changes_nothing():
    model = Network()
    lora(model, lora_bias=True, rank=2, targets=["*"])
    model.first.lora.b.set_value(jax.random.normal(jax.random.key(1), (2, 40)))
    x = jax.random.normal(jax.random.key(0), (5, 24))
    before = model.first(x)
    with pytest.raises(UserError, match=r"merge does not support adapter\.lora_bias=true for layers without a bias"):
        merge(model)
    np.testing.assert_array_equal(model.first(x), before)
