"""Cross entropy in slices of the vocabulary: values and gradients of the whole one, without its logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config import Decoder
from jaxmem.models import build, cross_entropy, losses
from jaxmem.models.cross_entropy import SlicedLoss, slice_width, vocab_cross_entropy
from jaxmem.models.losses import Terms
from jaxmem.models.network import Execution
from jaxmem.models.vocab_slices import VocabSlices
from jaxmem.sharding.arrays import sum_gradients
from jaxmem.sharding.layout import layout_for
from tests.planning.conftest import config, module_of

VOCAB, EMBED = 24, 8
UNTIED, TIED = ("embed", "vocab"), ("vocab", "embed")


def inputs(dtype=jnp.float32):
    draw = np.random.default_rng(0)
    x, weight = (jnp.asarray(draw.normal(size=shape), dtype) for shape in ((2, 6, EMBED), (EMBED, VOCAB)))
    labels = jnp.asarray(draw.integers(0, VOCAB, (2, 6)), jnp.int32)
    counts = jnp.asarray(draw.random((2, 6)) < 0.7, jnp.float32)
    return x, 3 * weight, labels, counts


def sliced(x, weight, labels, counts, slices, axes, **terms):
    return jnp.sum(counts * SlicedLoss(axes, slices, Terms(**terms))(x, weight, labels))


def whole(x, weight, labels, counts, soft_cap=None, **terms):
    logits = x @ weight if soft_cap is None else soft_cap * jnp.tanh(x @ weight / soft_cap)
    return jnp.sum(counts * losses.cross_entropy(logits, labels, **terms))


@pytest.mark.parametrize(
    ("slices", "axes", "terms"),
    [
        (VocabSlices(VOCAB, 6), UNTIED, {}),
        (
            VocabSlices(VOCAB, 7),
            UNTIED,
            {"label_smoothing": 0.1, "z_loss": 1e-2},
        ),  # the last two overlap
        (VocabSlices(VOCAB, 5), TIED, {"label_smoothing": 0.1}),
        (VocabSlices(VOCAB, 23), UNTIED, {"z_loss": 1e-2, "soft_cap": 4.0}),
        (
            VocabSlices(VOCAB, 5, stored_parts=2, parts=2),
            UNTIED,
            {"label_smoothing": 0.1},
        ),  # as over `tensor`
        (
            VocabSlices(VOCAB, 10, stored_parts=1, parts=2),
            TIED,
            {"z_loss": 1e-2},
        ),  # not divisible
    ],
)
def test_values_and_gradients_equal_those_of_the_whole(slices, axes, terms):
    x, weight, labels, counts = inputs()
    turned = weight if axes == UNTIED else weight.T
    expected = jax.jit(jax.value_and_grad(whole, (0, 1)), static_argnames=tuple(terms))(
        x, weight, labels, counts, **terms
    )
    by_slices = lambda x, weight: sliced(x, weight, labels, counts, slices, axes, **terms)  # noqa: E731
    loss, (of_x, of_weight) = jax.jit(jax.value_and_grad(by_slices, (0, 1)))(x, turned)
    found = loss, (of_x, of_weight if axes == UNTIED else of_weight.T)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("slices", [None, VocabSlices(VOCAB // 4, 4)])
def test_devices_compute_the_loss_together_each_in_its_part_of_the_vocabulary(slices):
    """As pipeline stages do. A value is equal on all devices; the gradient of x is the sum of theirs. Labels are among
    the last entries of a device, which is -1 on the next one."""
    x, weight, labels, counts = inputs()
    labels = labels.at[0].set(jnp.asarray([5, 11, 17, 23, 0, 6]))
    counts = counts.at[0].set(1)
    terms = {"label_smoothing": 0.1, "z_loss": 1e-2}
    over, parts = ("stage",), jax.P(None, "stage")

    def loss(x, weight, labels):
        x, labels = sum_gradients(x, over), labels - jax.lax.axis_index(over) * (VOCAB // 4)
        if slices is None:
            return jnp.sum(counts * losses.cross_entropy(x @ weight, labels, **terms, over=over))
        return jnp.sum(counts * SlicedLoss(UNTIED, slices, Terms(**terms), over)(x, weight, labels))

    mesh = jax.make_mesh((4,), over, devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    found = jax.jit(
        jax.shard_map(
            jax.value_and_grad(loss, (0, 1)), mesh=mesh, in_specs=(jax.P(), parts, jax.P()),
            out_specs=(jax.P(), (jax.P(), parts)), check_vma=False,
        )
    )(x, weight, labels)  # fmt: skip
    expected = jax.value_and_grad(whole, (0, 1))(x, weight, labels, counts, **terms)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected)


def test_bfloat16_errors_are_those_of_the_whole():
    """Against float64, no further off than the whole."""
    x, weight, labels, counts = inputs(jnp.bfloat16)
    by_slices = lambda x, weight: sliced(x, weight, labels, counts, VocabSlices(VOCAB, 5), UNTIED)  # noqa: E731
    all_at_once = lambda x, weight: whole(x, weight, labels, counts)  # noqa: E731
    exact = _exact_gradients(*(np.asarray(a, np.float64) for a in (x, weight)), np.asarray(labels), np.asarray(counts))
    for found, other, truth in zip(
        jax.jit(jax.grad(by_slices, (0, 1)))(x, weight),
        jax.jit(jax.grad(all_at_once, (0, 1)))(x, weight),
        exact,
        strict=True,
    ):
        assert found.dtype == jnp.bfloat16
        off, usual = (np.abs(np.asarray(a, np.float64) - truth).max() for a in (found, other))
        assert off <= 1.5 * usual + 1e-3


def test_a_soft_cap_of_bfloat16_logits_is_computed_in_float32_with_and_without_slices():
    model = Decoder(vocab=VOCAB, layers=1, embed=EMBED, mlp=8, heads=1, kv_heads=1, head_dim=8, logit_soft_cap=4.0)
    network = build(model, nnx.Rngs(0), Execution(dtype=np.dtype(jnp.bfloat16)))
    x, _, labels, _ = inputs(jnp.bfloat16)
    loss = nnx.jit(vocab_cross_entropy, static_argnums=3)
    at_once, in_slices = (loss(network, 8 * x, labels, chunk) for chunk in (VOCAB, 6))
    np.testing.assert_allclose(at_once, in_slices, rtol=1e-5)


def _exact_gradients(x, weight, labels, counts):
    logits = x @ weight
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    likely /= likely.sum(-1, keepdims=True)
    g = counts[..., None] * (likely - np.eye(VOCAB)[labels])
    return g @ weight.T, np.einsum("bte,btv->ev", x, g)


@pytest.mark.exhaustive
def test_logits_whose_exponentials_overflow():
    x, weight = jnp.full((1, 1, 1), 1e4), jnp.asarray([[1.0, -1.0, 0.5, 1.0]])
    by_slices = lambda x: sliced(x, weight, jnp.array([[3]], jnp.int32), 1.0, VocabSlices(4, 2), UNTIED)  # noqa: E731
    loss, gradient = jax.value_and_grad(by_slices)(x)
    assert float(loss) == pytest.approx(np.log(2.0), abs=1e-3)  # float32 near 1e4
    assert float(gradient[0, 0, 0]) == pytest.approx(0.0, abs=1e-3)


def test_auto_keeps_small_logits_whole():
    assert slice_width("auto", tokens=64, entries=264, itemsize=4) is None
    for tokens, held in ((8192, 128256), (2**20, 128256), (1024, 2**20)):
        wide = slice_width("auto", tokens, held, 2)
        assert wide % cross_entropy.WIDTH_MULTIPLE == 0
        assert 2 * tokens * wide <= max(cross_entropy.SLICE_BYTES, 2 * tokens * cross_entropy.MIN_WIDTH)
    assert slice_width(300, 64, entries=264, itemsize=4) is None
    assert slice_width(100, tokens=64, entries=264, itemsize=4) == 100


def test_no_device_holds_the_logits_the_matrix_or_its_gradient():
    """In a loop over slices, each slice of the weight is gathered and its gradient summed where it belongs."""
    cfg = config(mesh={"fsdp": 4, "tensor": 2}, data={"sequence_length": 16}, batch={"global_size": 8})
    rows, time, embed, vocab, wide = 8, 16, 64, 1024, 128
    layout = layout_for(cfg, jax.devices())

    def placed(role, axes, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(role, axes, shape))

    def gradients(x, weight, labels, counts):
        slices = cross_entropy.slices_for(wide, x, vocab)
        loss = lambda x, weight: sliced(x, weight, labels, counts, slices, UNTIED)  # noqa: E731
        return jax.grad(loss, (0, 1))(x, weight)

    tokens = ("batch", "time")
    with layout:
        module = module_of(
            gradients,
            placed("activations", (*tokens, "embed"), (rows, time, embed)),
            placed("weights", UNTIED, (embed, vocab)),
            placed("activations", tokens, (rows, time), jnp.int32),
            placed("activations", tokens, (rows, time)),
        )
    held = embed // 4 * vocab // 2  # a device's share of the weight; its logits would be twice as many
    sizes = [one.shape.elements for one in module.walk() if one.opcode != "parameter" and not one.shape.parts]
    assert max(sizes) == held == embed * wide
    for one in module.walk():
        if one.opcode in ("all-gather", "all-reduce", "reduce-scatter"):
            shapes = one.shape.parts or [one.shape]
            assert max(shape.elements for shape in shapes) <= embed * wide, one.name
