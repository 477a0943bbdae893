"""Every implementation of the norm against float64, forward and gradients; what it refuses."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxmem.kernels import rms_norm
from jaxmem.kernels.rms_norm import IMPLEMENTATIONS, pallas

EPSILON = 1e-3
RAN: set[str] = set()


def exact(x, scale, g, own):
    x, scale, g, own = (np.asarray(a, np.float64) for a in (x, scale, g, own))
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    normal, scaled = x * inverse, g * scale
    of_x = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdims=True)) + own
    return normal * scale, of_x, (g * normal).sum((0, 1))


def test_forward_and_gradients_equal_float64(monkeypatch):
    """Rows that fill no tile, tiles that fill no program; with a residual and without."""
    monkeypatch.setattr(pallas, "USUAL", pallas.Share(512, 8, 3))
    rng = np.random.default_rng(0)
    x, residual, g, own = (jnp.asarray(rng.standard_normal((3, 7, 100)), jnp.float32) for _ in range(4))
    scale = jnp.asarray(rng.standard_normal(100), jnp.float32)

    @jax.jit
    def every(x, residual, scale, g, own):
        found = {}
        for way in IMPLEMENTATIONS:
            options = {"epsilon": EPSILON, "implementation": way}
            run = lambda x, residual, scale, o=options: rms_norm(x, scale, residual=residual, **o)  # noqa: E731
            (normal, summed), pull = jax.vjp(run, x, residual, scale)
            alone, pull_alone = jax.vjp(lambda x, scale, o=options: rms_norm(x, scale, **o), x, scale)
            found[way] = (normal, summed, *pull((g, own))), (alone, *pull_alone(g))
        return found

    found = every(x, residual, scale, g, own)
    summed = np.asarray(x, np.float64) + np.asarray(residual)
    normal, of_x, of_scale = exact(summed, scale, g, own)
    wanted = (normal, summed, of_x, of_x, of_scale), exact(x, scale, g, np.zeros(()))
    for way, got in found.items():
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=way)
        RAN.add(way)


def test_each_device_its_own_rows():
    """Both ways; the scale's gradient is the sum of what each found."""
    x, g = (jax.random.normal(jax.random.key(i), (6, 40)) for i in range(2))
    scale = jnp.linspace(0.5, 2.0, 40)
    mesh, split = Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d")

    def both(way):
        def run(x, scale, g):
            normal, pull = jax.vjp(lambda x, scale: rms_norm(x, scale, implementation=way), x, scale)
            of_x, of_scale = pull(g)
            return normal, of_x, of_scale[None]

        return run

    cut = jax.shard_map(
        both("pallas"), mesh=mesh, in_specs=(split, PartitionSpec(), split), out_specs=split, check_vma=False
    )
    compiled = jax.jit(cut).lower(x, scale, g).compile()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    for one, other in zip(compiled(x, scale, g), jax.jit(both("reference"))(x, scale, g), strict=True):
        one = one if one.shape == other.shape else one.sum(0, keepdims=True)
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_every_implementation_ran():
    """A gradient test that was skipped does not count as passed."""
    assert set(IMPLEMENTATIONS) == RAN
