"""Image networks: shapes, symmetries, and what their options may change."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict

from jaxmem.config import Convnet, Mlp, Vit
from jaxmem.models import build, image_networks
from jaxmem.models.network import Execution
from jaxmem.sharding.table import make_tables
from jaxmem.stack.call import StackOptions
from tests.support.tiers import exhaustive

VIT = Vit(layers=2, embed=16, mlp=24, heads=2)
CONVNET = Convnet(stages=(8, 16), blocks=2)
MLP = Mlp(layers=2, embed=16, mlp=24)
EVERY = pytest.mark.parametrize("cfg", [VIT, CONVNET, MLP], ids=["vit", "convnet", "mlp"])


def changed(cfg, **fields):
    return type(cfg)(**{**cfg.model_dump(), **fields})


@cache
class Compiled:
    """A network that runs compiled, with weights that can be replaced. numpy draws them as `layers.py` does: compiling
    an initializer takes longer than a test."""

    def __init__(self, cfg, execution=Execution()):
        self.graphdef, self.variables = nnx.split(nnx.eval_shape(lambda: build(cfg, nnx.Rngs(0), execution)))
        draw = np.random.default_rng(0)

        def drawn(path, variable):
            axes, shape = variable.get_metadata()["axes"], variable.shape
            inputs = shape[axes[:1] == ("layer",) : -1]
            if not inputs:
                return jnp.full(shape, float(path[-1] == "scale"))
            return jnp.asarray(draw.normal(size=shape) * np.prod(inputs) ** -0.5, jnp.float32)

        self.params = unflatten_dict({path: drawn(path, v) for path, v in nnx.to_flat_state(self.variables)})
        self.call = jax.jit(lambda p, *args, **kw: nnx.merge(self.graphdef, p)(*args, **kw))

    def __call__(self, *args, **kw):
        return self.call(self.params, *args, **kw)


def images(count=3, size=8, channels=1, seed=0):
    return jax.random.uniform(jax.random.key(seed), (count, size, size, channels))


def categories(count=3, size=8, channels=1, seed=0):
    return jax.random.randint(jax.random.key(seed), (count, size, size, channels), 0, 17, jnp.int32)


def differs(a, b, by=1e-3):
    return float(jnp.abs(a - b).max()) > by


# ------------------------------------------------------------------ all families


@pytest.mark.parametrize(
    "cfg",
    [
        VIT,
        exhaustive(changed(VIT, image_size=12, channels=3, patch=3, outputs=7)),
        CONVNET,
        exhaustive(changed(CONVNET, image_size=12, channels=3, stages=(8,), outputs=7)),
        changed(CONVNET, image_size=9, stages=(8, 16, 4), blocks=1, outputs=1),  # 9, 4, 2 pixels
        MLP,
        exhaustive(changed(MLP, image_size=5, channels=3, outputs=7)),
        exhaustive(changed(MLP, inputs="one_hot")),
        changed(MLP, inputs="embedding", categories=20, channels=2, outputs=1),
    ],
    ids=lambda cfg: cfg.family,
)
def test_outputs_are_per_image(cfg):
    network = Compiled(cfg)
    draw = images if getattr(cfg, "inputs", "numbers") == "numbers" else categories
    pictures = draw(3, cfg.image_size, cfg.channels)
    outputs = network(pictures)
    assert outputs.shape == (3, cfg.outputs)
    others = network(jnp.roll(pictures, 1, axis=0).at[1].set(pictures[1]))
    np.testing.assert_allclose(others[1], outputs[1], atol=1e-6)  # no image sees another
    np.testing.assert_allclose(others[0], outputs[2], atol=1e-6)
    assert differs(outputs[0], outputs[1], 3e-5)


@pytest.mark.parametrize("cfg", [VIT, CONVNET, MLP, changed(MLP, inputs="embedding")], ids=lambda cfg: cfg.family)
def test_every_weight_has_logical_axes_with_a_rule(cfg):
    known = set(make_tables(3).weights)
    variables = nnx.to_flat_state(Compiled(cfg).variables)
    assert len(variables) > 8
    for path, variable in variables:
        axes = variable.get_metadata()["axes"]
        assert len(axes) == len(variable.shape), path
        assert {axis for axis in axes if axis} <= known, path
        if "blocks" in path:
            assert axes[0] == "layer", path
            if len(axes) > 2:  # what grows with the model is split both ways
                assert {"embed"} < set(axes) & {"embed", "mlp", "heads", "kv_heads"}, path


@EVERY
def test_dropout_needs_a_key_and_follows_it(cfg):
    network = Compiled(changed(cfg, dropout=0.5))
    still = network(images())
    one, same, other = (network(images(), keys=jax.random.split(jax.random.key(k), 3)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert differs(one, other)
    assert differs(one, still)
    np.testing.assert_array_equal(Compiled(cfg)(images(), keys=jax.random.split(jax.random.key(1), 3)), still)


@cache
def gradient(cfg, remat):
    """The compiled gradient of something, and its value."""
    network = Compiled(cfg, Execution(stack=StackOptions(remat)))

    def loss(params):
        return jnp.sum(jnp.square(network.call(params, images(64), keys=jax.random.split(jax.random.key(3), 64))))

    compiled = jax.jit(jax.grad(loss)).lower(network.params).compile()
    return compiled, compiled(network.params)


DEEP = [changed(VIT, layers=5), Convnet(stages=(8,), blocks=5), changed(MLP, layers=5, dropout=0.3)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cfg", "remat", "share"),
    [(DEEP[0], "dots", 1.0), (DEEP[1], "full", 0.7), (DEEP[2], "full", 0.7)],
)
def test_recompute_saves_memory_and_does_not_change_gradients(cfg, remat, share):
    (plain, expected), (frugal, found) = gradient(cfg, "none"), gradient(cfg, remat)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(expected))
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * largest), found, expected)
    kept = [compiled.memory_analysis().temp_size_in_bytes for compiled in (frugal, plain)]
    assert kept[0] < share * kept[1]


@EVERY
def test_matmuls_in_bfloat16_norms_and_weights_in_float32(cfg):
    network = Compiled(cfg, Execution(dtype=np.dtype(jnp.bfloat16)))
    jaxpr = str(jax.make_jaxpr(network)(images()))
    # Within attention, whose products have more dimensions, the kernel chooses.
    products = re.findall(r"(\w+)\[(?:\d+,){1,2}\d+\] = dot_general", jaxpr)
    products += re.findall(r"(\w+)\[[\d,]+\] = conv_general_dilated", jaxpr)
    assert len(products) >= 4
    assert set(products) == {"bf16"}
    assert set(re.findall(r"(\w+)\[[\d,]*\] = rsqrt", jaxpr)) == {"f32"}
    outputs = network(images())
    assert outputs.dtype == jnp.bfloat16
    np.testing.assert_allclose(outputs.astype(jnp.float32), Compiled(cfg)(images()), atol=0.1)
    assert {x.dtype for x in jax.tree.leaves(network.params)} == {jnp.dtype(jnp.float32)}


# ------------------------------------------------------------------ vit


def patches(pictures, patch):
    """The patches of each image, cut by loops, rows first."""
    side = pictures.shape[1] // patch
    return [
        [pictures[:, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch] for j in range(side)]
        for i in range(side)
    ]


def test_gradients_of_categories_are_summed_in_float32():
    images = jnp.zeros((256, 8, 8, 1), jnp.int32)  # 16,384 pixels of one category

    def gradient(dtype):
        cfg = changed(MLP, inputs="embedding")
        graphdef, state = nnx.split(build(cfg, nnx.Rngs(0), Execution(dtype=np.dtype(dtype))))
        loss = lambda weights: jnp.sum(nnx.merge(graphdef, weights).embed(images).astype(jnp.float32))  # noqa: E731
        return jax.jit(jax.grad(loss))(nnx.to_pure_dict(state))["categories"][0]

    expected = gradient(jnp.float32)
    assert jnp.linalg.norm(gradient(jnp.bfloat16) - expected) < 0.05 * jnp.linalg.norm(expected)


def test_a_vit_depends_on_patch_positions():
    network, order = Compiled(VIT), np.random.default_rng(0).permutation(16)
    cut = [patch for row in patches(images(), 2) for patch in row]
    rows = [jnp.concatenate([cut[order[4 * i + j]] for j in range(4)], axis=2) for i in range(4)]
    shuffled = jnp.concatenate(rows, axis=1)
    plain = network(images())
    assert differs(network(shuffled), plain)
    moved = {**network.params, "position": network.params["position"][order]}  # patches take their places along
    np.testing.assert_allclose(network.call(moved, shuffled), plain, atol=1e-5)
    nowhere = {**network.params, "position": jnp.zeros_like(network.params["position"])}
    np.testing.assert_allclose(network.call(nowhere, shuffled), network.call(nowhere, images()), atol=1e-5)


def test_a_vit_reads_all_pixels_of_a_patch():
    """Swapping two pixels of one patch, with the rows of the first weight that read them, is seen by no one."""
    network = Compiled(VIT)
    turned = jnp.concatenate([jnp.flip(jnp.concatenate(row, axis=2), axis=1) for row in patches(images(), 2)], axis=1)
    weight = network.params["patches"]["weight"]
    params = {**network.params, "patches": {**network.params["patches"], "weight": weight[jnp.asarray([2, 3, 0, 1])]}}
    np.testing.assert_allclose(network.call(params, turned), network(images()), atol=1e-5)
    assert differs(network(turned), network(images()))


# ------------------------------------------------------------------ convnet


def one_square(size, at, seed=0):
    """An image that is dark but for 3 x 3 pixels."""
    square = images(1, 3, seed=seed)
    return jnp.zeros((1, size, size, 1)).at[:, at[0] : at[0] + 3, at[1] : at[1] + 3].set(square)


def test_a_convnet_is_translation_invariant():
    """Before the pooling a step moves what is found by a step. After it the image moves by the pooling's two pixels."""
    one_stage = Compiled(Convnet(image_size=24, stages=(8,), blocks=2))
    here = one_stage(one_square(24, (9, 9)))
    np.testing.assert_allclose(one_stage(one_square(24, (10, 12))), here, atol=1e-5)
    assert differs(one_stage(one_square(24, (9, 9), seed=1)), here)  # something else
    assert differs(one_stage(one_square(24, (0, 9))), here)  # the border is seen
    two_stages = Compiled(Convnet(image_size=40, stages=(8, 8), blocks=1))
    here = two_stages(one_square(40, (16, 16)))
    np.testing.assert_allclose(two_stages(one_square(40, (18, 20))), here, atol=1e-5)
    assert differs(two_stages(one_square(40, (17, 16))), here)


def neighbours(x, w):
    """Convolution by loops, in float64."""
    padded = np.pad(np.float64(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = x.shape[1:3]
    return sum(
        padded[:, i : i + height, j : j + width] @ np.float64(w)[i, j]
        for i in range(w.shape[0])
        for j in range(w.shape[1])
    )


def convolution_inputs():
    draw = np.random.default_rng(0)
    return [draw.normal(size=shape).astype(np.float32) for shape in ((2, 5, 7, 3), (3, 3, 3, 4), (2, 5, 7, 4))]


def test_convolution_and_its_gradients():
    x, w, g = convolution_inputs()
    y, back = jax.vjp(jax.jit(image_networks.convolve), x, w)
    np.testing.assert_allclose(y, neighbours(x, w), atol=1e-5)
    dx, dw = back(jnp.asarray(g))
    # The product of a gradient and a direction is the change along it, and a convolution is linear in both.
    for seed in range(3):
        way_x, way_w = (np.random.default_rng(seed).normal(size=part.shape) for part in (x, w))
        assert np.sum(dx * way_x) == pytest.approx(np.sum(g * neighbours(way_x, w)), rel=1e-5)
        assert np.sum(dw * way_w) == pytest.approx(np.sum(g * neighbours(x, way_w)), rel=1e-5)


WAYS = {"cpu": image_networks._gradients_on_cpu, "cuda": image_networks._gradients}


def test_gradients_on_cpu_equal_those_of_jax():
    for ours, jaxs in zip(*(jax.jit(way)(*convolution_inputs()) for way in WAYS.values()), strict=True):
        np.testing.assert_allclose(ours, jaxs, atol=1e-5)


def test_each_platform_has_its_own_gradients():
    """The fast way on a CPU; elsewhere jax's own, in the orders that a GPU's compiler knows as gradients."""

    def orders(platform, function):
        lowered = jax.jit(function).trace(*convolution_inputs()).lower(lowering_platforms=(platform,)).as_text()
        return set(re.findall(r"dim_numbers = (\[.*?->\[.*?\])", lowered))

    def through(x, w, g):
        return jax.vjp(image_networks.convolve, x, w)[1](g)

    for platform, way in WAYS.items():
        assert orders(platform, through) == orders(platform, way)
        assert (len(orders(platform, way)) == 1) == (platform == "cpu")


def test_convolutions_have_the_orders_that_are_fast_on_a_cpu():
    """Within a loop XLA's CPU compiler leaves convolutions of other orders to a naive loop, 50 times slower."""
    text = gradient(DEEP[1], "none")[0].as_text()
    orders = re.findall(r"convolution\(.*dim_labels=([\w>-]+)", text)
    assert len(orders) >= 6
    assert set(orders) == {"b01f_01io->b01f"}


# ------------------------------------------------------------------ mlp


@pytest.mark.parametrize(("inputs", "width"), [("numbers", 1), ("one_hot", 17), ("embedding", 8)])
def test_an_mlp_does_not_depend_on_pixel_order(inputs, width):
    """Shuffled pixels, with the rows of the first weight that read them, change nothing."""
    network, order = Compiled(changed(MLP, inputs=inputs)), np.random.default_rng(0).permutation(64)
    pictures = (images if inputs == "numbers" else categories)()
    shuffled = pictures.reshape(-1, 64)[:, order].reshape(pictures.shape)
    stem = network.params["stem"]
    rows = stem["weight"].reshape(64, width, -1)[order].reshape(64 * width, -1)
    params = {**network.params, "stem": {**stem, "weight": rows}}
    np.testing.assert_allclose(network.call(params, shuffled), network(pictures), atol=1e-5)
    assert differs(network(shuffled), network(pictures))


def test_one_hot_equals_an_embedding_merged_into_the_first_weight():
    embedded, one_hot = (Compiled(changed(MLP, inputs=inputs)) for inputs in ("embedding", "one_hot"))
    table, stem = embedded.params["categories"], embedded.params["stem"]
    rows = jnp.einsum("cw,pwe->pce", table, stem["weight"].reshape(64, 8, -1)).reshape(64 * 17, -1)
    params = {name: part for name, part in embedded.params.items() if name != "categories"}
    params["stem"] = {**stem, "weight": rows}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, one_hot.params)
    np.testing.assert_allclose(one_hot.call(params, categories()), embedded(categories()), atol=1e-5)


@pytest.mark.parametrize("inputs", ["one_hot", "embedding"])
def test_an_mlp_does_not_depend_on_category_order(inputs):
    """Renaming them, with the rows that stand for them, changes nothing; a picture of other categories differs."""
    network, order = Compiled(changed(MLP, inputs=inputs)), np.random.default_rng(0).permutation(17)
    params = dict(network.params)
    if inputs == "embedding":
        params["categories"] = params["categories"][np.argsort(order)]
    else:
        rows = params["stem"]["weight"].reshape(64, 17, -1)[:, np.argsort(order)].reshape(64 * 17, -1)
        params["stem"] = {**params["stem"], "weight": rows}
    renamed = jnp.asarray(order, jnp.int32)[categories()]
    np.testing.assert_allclose(network.call(params, renamed), network(categories()), atol=1e-5)
    assert differs(network(renamed), network(categories()))
