"""State in codes: its bytes, its error, and that no more of it than a part is ever decoded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxmem import optim
from jaxmem.machine.gpus import GIB
from jaxmem.optim import in_place
from jaxmem.optim.layers import ParameterSpec
from jaxmem.optim.rules import quantized
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.quant import quantize
from jaxmem.sharding.table import Axis, path_name
from jaxmem.step.programs import program
from tests.optim.conftest import gradients, normal, updates
from tests.step.conftest import config

EIGHT = {"adamw8bit": 2.04, "adamw4bit": 1.07, "lion8bit": 1.02, "momentum8bit": 1.02}


@pytest.mark.parametrize(("name", "most"), EIGHT.items())
def test_bytes_per_parameter_of_real_arrays(name, most):
    params = {"w": normal(2, 2048, 2048), "norm": normal(2, 2048)}
    state = getattr(optim, name)(0.1, axes={"w": ("layer", "embed", "mlp"), "norm": ("layer", "norm")}).init(params)
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert held < most * sum(x.size for x in params.values())


@pytest.mark.parametrize("name", EIGHT)
def test_nearly_every_number_is_a_code(name):
    built = program(config(model={"preset": "tiny"}, optimizer={"name": name}), jax.devices()[:1])
    sizes = {path_name(path): x.size for path, x in jax.tree_util.tree_leaves_with_path(built.spec.state.opt_state)}
    quantized = sum(size for name, size in sizes.items() if "_codes." in name or "_scale." in name)
    assert quantized >= 0.95 * sum(sizes.values())


def updates_in_float64(grads):
    """Adam's update of w for each gradient."""
    m = v = 0.0
    for count, g in enumerate(grads, 1):
        g = np.asarray(g["w"], np.float64)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        yield m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.95**count)) + 1e-8)


def test_quantized_adam_follows_adam():
    """Against float64: the error of an update is that of its codes."""
    params = {"w": normal(32, 2048)}
    grads = gradients(params, 5)
    said, _ = updates(optim.scale_by_adam8bit(), params, grads)
    for count, (exact, u) in enumerate(zip(updates_in_float64(grads), said, strict=True), 1):
        assert np.abs(u["w"] - exact).mean() < (1e-5 if count == 1 else 0.02) * np.abs(exact).mean()


@pytest.mark.parametrize("axes", [("vocab", "embed"), ("embed", "vocab")])
def test_rare_tokens_are_updated_as_exactly_as_frequent_ones(axes):
    """Gradients of tokens differ by four orders of magnitude. In blocks of neighbouring tokens, rare ones had half of
    their update."""
    vocab = 1024
    size = 10.0 ** np.random.default_rng(1).uniform(-4, 0, (vocab, 1))
    shape = (vocab, 576)
    if axes[0] == "embed":
        size = size.T
        shape = shape[::-1]
    grads = [{"w": g["w"] * jnp.asarray(size, jnp.float32)} for g in gradients({"w": jnp.zeros(shape)}, 4)]
    said, _ = updates(optim.scale_by_adam8bit(axes={"w": axes}), {"w": jnp.zeros(shape)}, grads)
    exact = list(updates_in_float64(grads))[-1]
    error = np.abs(said[-1]["w"] - exact).mean(axes.index("embed")) / np.abs(exact).mean()
    assert error.max() < 0.03


@pytest.mark.parametrize(("shape", "axes"), [((2048, 64), ("embed", "mlp")), ((2048, 64), ("mlp", "embed"))])
def test_part_by_part_is_the_same(shape, axes, monkeypatch):
    params = {"w": normal(*shape)}
    grads = gradients(params, 2)
    tx = optim.scale_by_adam8bit(axes={"w": axes})
    whole, state = updates(tx, params, grads)
    monkeypatch.setattr(in_place, "PART_SIZE", 2048)
    parts, other = updates(tx, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.mean(), b.mean(), rtol=1e-3), state, other)


def test_blocks_of_an_odd_number_of_codes_are_updated_in_parts(monkeypatch):
    """Two codes of 4 bits are a byte: two blocks of 43 codes are whole bytes, one is not."""
    w = quantize(normal(8 * 43, 64), "int4", 43, -2)
    u = normal(8 * 43, 64)
    sizes = []

    def add(w, u, *_):
        sizes.append(u.size)
        return quantize(w.dequantize(jnp.float32) + u, "int4", 43, -2)

    complete = in_place.update_rows(add, w, u, ("embed", "mlp"))
    monkeypatch.setattr(in_place, "PART_SIZE", 2 * 43 * 64)
    in_parts = in_place.update_rows(add, w, u, ("embed", "mlp"))
    assert sizes == [8 * 43 * 64, 2 * 43 * 64]
    np.testing.assert_array_equal(in_parts.dequantize(jnp.float32), complete.dequantize(jnp.float32))


def test_codes_whose_last_bytes_have_unused_bits_are_updated_together(monkeypatch):
    """14 codes of 3 bits are in 6 bytes, of which the last is incomplete: half of the bytes has 8 codes."""
    monkeypatch.setattr(in_place, "PART_SIZE", 64)
    w = quantize(normal(14, 64), "int3", 7, -2)
    again = in_place.update_rows(lambda w, *_: w, w, normal(14, 64), ("embed", "mlp"))
    sizes = []
    in_place.update_rows(lambda w, u, *_: sizes.append(u.size) or w, w, normal(14, 64), ("embed", "mlp"))
    assert sizes == [14 * 64]
    np.testing.assert_array_equal(again.dequantize(jnp.float32), w.dequantize(jnp.float32))


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((4096, 14336), ("embed", "mlp"), (-1, 256)),
        ((14336, 4096), ("mlp", "embed"), (-2, 256)),
        ((32000, 4096), ("vocab", "embed"), (-1, 256)),
        ((4096, 32000), ("embed", "vocab"), (-2, 256)),
        ((151936, 896), ("vocab", "embed"), (-1, 112)),
        ((49152, 16), ("vocab", "rank"), (-1, 16)),  # an adapter: the values of a token
        ((16, 49152), ("rank", "vocab"), (-2, 16)),
        ((49152, 16), (Axis("vocab", like_storage=True), "rank"), (-1, 16)),
        ((2048, 5461), ("embed", "mlp"), (-2, 256)),  # 5461 = 43 x 127
        ((1009, 1013), (None, None), (-1, 256)),  # primes: the last block is shorter
    ],
)
def test_blocks_are_not_divided_where_the_shape_allows(shape, axes, expected):
    assert quantized.blocks(ParameterSpec(shape, jnp.float32, axes, (0, 1)), 256) == expected


@pytest.mark.exhaustive
def test_a_second_moment_is_never_zero():
    """Where the gradient was a millionth of its block's largest, and then is nothing: Adam's update, not 1/epsilon."""
    first = jnp.full((2, 2048), 1e-6).at[:, ::256].set(1.0)
    params, grads = {"w": first}, [{"w": first}, {"w": 0 * first}]
    for tx in (optim.scale_by_adam8bit(), optim.scale_by_adam4bit()):
        said, _ = updates(tx, params, grads)
        assert float(jnp.abs(said[1]["w"]).max()) < 2


def test_blocks_that_do_not_divide_work():
    params = {"w": normal(67, 71)}
    (g,) = gradients(params, 1)
    (said,), state = updates(optim.scale_by_adam8bit(), params, [g])
    assert state.arrays["m_codes"]["w"].shape == (67, 71)
    np.testing.assert_allclose(said["w"], np.sign(g["w"]), atol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [("layer", "embed", "mlp"), ("vocab", "embed")])
def test_no_whole_leaf_is_decoded(axes):
    """Compiled for a GPU: beside weights, gradients and state no more than a layer, or a part, in float32."""
    target = parse_target("h100-80gb:1")
    place = SingleDeviceSharding(target_devices(target, 80 * GIB)[0])
    shape = (8, 2048, 4096) if len(axes) == 3 else (65536, 4096)
    numbers, layer = np.prod(shape), np.prod(shape[-2:]) if len(axes) == 3 else in_place.PART_SIZE
    tx = optim.adamw8bit(1e-3, axes={"w": axes})

    def put(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)

    def step(params, x, state):
        grads = jax.tree.map(lambda w: w * x, params)  # which nothing else holds
        said, state = tx.update(grads, state, params)
        return optim.apply_updates(params, said), state

    x = jax.ShapeDtypeStruct((), jnp.bfloat16)
    compiled = jax.jit(step, donate_argnums=(0, 2)).lower(put(params), put(x), put(state)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * numbers + 4 * 4 * layer
    assert 4 * 4 * layer < 4 * numbers
