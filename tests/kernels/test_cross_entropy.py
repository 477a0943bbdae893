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
    run = lambda x, w, labels: cross_entropy(x, w, labels, implementation="pallas")  # noqa: E731
    cut = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(split, same, split), out_specs=split, check_vma=False))
    compiled = cut.lower(x, w, labels).compile()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    np.testing.assert_allclose(compiled(x, w, labels), exact(x, w, labels, labels, 0, 0)[0], rtol=1e-5)


def test_logits_are_never_whole():
    tokens, embed, vocab = 4096, 64, 32000
    shapes = ((tokens, embed), jnp.bfloat16), ((embed, vocab), jnp.bfloat16), ((tokens,), jnp.int32)

    def held(way):
        loss = lambda x, w, labels: jnp.sum(cross_entropy(x, w, labels, implementation=way))  # noqa: E731
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*one) for one in shapes))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert held("reference") > 4 * tokens * vocab
    assert held("sliced") < 0.6 * 4 * tokens * vocab  # a slice is an eighth; a CPU has it in several forms
