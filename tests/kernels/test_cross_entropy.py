"""Every implementation of the loss against float64, loss and both gradients; what they hold; what they refuse."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmem.kernels import cross_entropy
from jaxmem.kernels.cross_entropy import IMPLEMENTATIONS, sliced

TERMS = {"label_smoothing": 0.1, "z_loss": 1e-2}
SCALES = (1.0, 30.0)  # 30: logits in the thousands
RAN: set[tuple[str, float]] = set()


def drawn(tokens=70, embed=40, vocab=200, scale=1.0):
    """Several tiles of tokens, embedding and vocabulary, and ends that fill none."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(scale * rng.standard_normal(shape), jnp.float32) for shape in ((tokens, embed), (embed, vocab)))
    return x, w, jnp.asarray(rng.integers(0, vocab, tokens)), jnp.asarray(rng.standard_normal(tokens), jnp.float32)


def exact(x, w, labels, wanted, label_smoothing, z_loss):
    """Loss, gradient of x and of the weight in float64, by hand."""
    x, w, wanted = (np.asarray(a, np.float64) for a in (x, w, wanted))
    logits = x @ w
    top = logits.max(1, keepdims=True)
    partition = (top + np.log(np.exp(logits - top).sum(1, keepdims=True)))[:, 0]
    aim = np.full(logits.shape, label_smoothing / logits.shape[1])
    aim[np.arange(len(x)), labels] += 1 - label_smoothing
    loss = partition - (aim * logits).sum(1) + z_loss * partition**2
    g = np.exp(logits - partition[:, None]) * (1 + 2 * z_loss * partition[:, None]) - aim
    g *= wanted[:, None]
    return loss, g @ w.T, x.T @ g


@pytest.mark.parametrize("scale", SCALES)
def test_loss_and_gradients_equal_float64(scale, monkeypatch):
    monkeypatch.setattr(sliced, "SLICE", 4000)
    monkeypatch.setattr(sliced, "LEAST", 64)
    monkeypatch.setattr(sliced, "MULTIPLE", 8)
    x, w, labels, wanted = drawn(scale=scale)

    @jax.jit
    def every(x, w, labels, wanted):
        found = {}
        for way in IMPLEMENTATIONS:
            loss, pull = jax.vjp(lambda x, w, way=way: cross_entropy(x, w, labels, implementation=way, **TERMS), x, w)
            found[way] = (loss, *pull(wanted))
        return found

    expected = exact(x, w, labels, wanted, **TERMS)
    for way, got in every(x, w, labels, wanted).items():
        for one, other in zip(got, expected, strict=True):
            assert np.abs(np.asarray(one, np.float64) - other).max() < 2e-5 * scale * np.abs(other).max(), way
        RAN.add((way, scale))


def test_every_implementation_ran():
    """A gradient test that was skipped does not count as passed."""
    assert {(way, scale) for way in IMPLEMENTATIONS for scale in SCALES} == RAN


def test_each_device_its_own_tokens():
    x, w, labels, _ = drawn()
    mesh, split, same = Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d"), PartitionSpec()
    _, _, _, wanted = drawn()

    def both(x, w, labels, wanted):
        loss, pull = jax.vjp(lambda x, w: cross_entropy(x, w, labels, implementation="pallas"), x, w)
        of_x, of_w = pull(wanted)
        return loss, of_x, of_w[None]

    cut = jax.shard_map(both, mesh=mesh, in_specs=(split, same, split, split), out_specs=split, check_vma=False)
    compiled = jax.jit(cut).lower(x, w, labels, wanted).compile()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    loss, of_x, of_w = compiled(x, w, labels, wanted)
    for one, other in zip((loss, of_x, of_w.sum(0)), exact(x, w, labels, wanted, 0, 0), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("way", "dtype"), [*((way, "int32") for way in IMPLEMENTATIONS), ("sliced", "int8"), ("sliced", "uint32")]
)
def test_a_label_of_no_entry_gives_nan_and_no_gradient(way, dtype):
    """And changes nothing of the others; `jnp.where` leaves it out."""
    x, w, labels, wanted = drawn(tokens=6, vocab=50)
    none = jnp.asarray([0, 50, 1, 0, 100, 0] if dtype == "uint32" else [0, 50, 1, -1, -100, 0])
    labels = jnp.where((none > 1) | (none < 0), none, labels).astype(dtype)
    there = np.array([True, False, True, dtype == "uint32", False, True])

    @jax.jit
    def both(x, w, labels, wanted):
        loss, pull = jax.vjp(lambda x, w: cross_entropy(x, w, labels, implementation=way), x, w)
        return loss, *pull(wanted)

    loss, of_x, of_w = both(x, w, labels, wanted)
    kept = exact(x[there], w, np.asarray(labels)[there].astype(int), wanted[there], 0, 0)
    assert np.isnan(np.asarray(loss)[~there]).all()
    assert not np.asarray(of_x)[~there].any()
    for one, other in zip((loss[there], of_x[there], of_w), kept, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_logits_are_never_whole():
    tokens, embed, vocab = 4096, 64, 32000
    shapes = ((tokens, embed), jnp.bfloat16), ((embed, vocab), jnp.bfloat16), ((tokens,), jnp.int32)

    def held(way):
        loss = lambda x, w, labels: jnp.sum(cross_entropy(x, w, labels, implementation=way))  # noqa: E731
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*one) for one in shapes))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert held("reference") > 4 * tokens * vocab
    assert held("sliced") < 0.6 * 4 * tokens * vocab  # a slice is an eighth; a CPU has it in several forms
