"""What few bytes cost in quality, in short: one small network learns the standard library's bytes under each.

Paired: the same first weights, the same batches, the same held-out bytes. Longer runs of a real model are recorded by
`scripts/bench/quality.py`.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.config.sections import Precision
from jaxmem.sharding import weights
from jaxmem.sharding.weights import Storage, store

SEEN, WIDE, STEPS, BATCH, RATE = 8, 128, 200, 256, 3e-3
AXES = {"rows": ("vocab", "embed"), "in": ("embed", "mlp"), "out": ("mlp", "embed")}
TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)

# optimizer, its learning rate beside AdamW's, its own fields, precision, and what its loss may be above AdamW's
METHODS = {
    "8-bit Adam": ("adamw8bit", 1, {}, {}, 0.01),
    "remainder8": ("adamw", 1, {}, {"parameters": "bfloat16", "master": "remainder8"}, 0.01),
    "stochastic": ("adamw", 1, {}, {"parameters": "bfloat16", "rounding": "stochastic"}, 0.02),
    "GaLore with residual": ("galore_adamw", 6, {"rank": 32, "refresh_every": 50, "residual": True}, {}, 0.03),
    "APOLLO-Mini in int8": ("apollo_mini", 3, {}, {"parameters": "int8"}, 0.1),
}


def drawn():
    draw = np.random.default_rng(0)
    shapes = {"rows": (256, 16), "in": (SEEN * 16, WIDE), "out": (WIDE, 256)}
    return {name: jnp.asarray(draw.normal(size=s) * s[0] ** -0.5, jnp.float32) for name, s in shapes.items()}


def batches(count, seed, *, held_out):
    """The last tenth of the text is held out."""
    first, last = (0.9, 1.0) if held_out else (0.0, 0.9)
    at = np.random.default_rng(seed).integers(int(first * len(TEXT)) + SEEN, int(last * len(TEXT)), (count, BATCH))
    return TEXT[at[..., None] - np.arange(1, SEEN + 1)].astype(np.int32), TEXT[at].astype(np.int32)


def loss(params, batch):
    seen, targets = batch
    hidden = jnp.tanh(params["rows"][seen].reshape(len(seen), -1) @ params["in"])
    logits = jax.nn.log_softmax(hidden @ params["out"])
    return -jnp.mean(jnp.take_along_axis(logits, targets[:, None], axis=1))


def values(params):
    decoded = lambda w: w.dequantize(jnp.float32) if weights.is_encoded(w) else w.astype(jnp.float32)  # noqa: E731
    return jax.tree.map(decoded, params, is_leaf=weights.is_encoded)


def learnt(name, times=1, own=None, precision=None):
    """The loss on what was held out."""
    precision = Precision(**(precision or {}))
    tx = getattr(optim, name)(times * RATE, axes=AXES, **(own or {}))
    if precision.master == "remainder8":
        tx = optim.with_remainder(tx, 8, AXES)
    params = jax.tree.map(lambda w, axes: store(w, axes, Storage(precision)), drawn(), AXES)

    def step(carried, batch):
        params, state, key = carried
        grads = jax.grad(loss)(values(params), batch)
        updates, state = tx.update(grads, state, params)
        key, mine = jax.random.split(key)
        rounding = mine if precision.stochastic_rounding else None
        return (optim.apply_updates(params, updates, rounding, AXES), state, key), None

    @jax.jit
    def run(params, train, held_out):
        (params, *_), _ = jax.lax.scan(step, (params, tx.init(params), jax.random.key(0)), train)
        return jnp.mean(jax.lax.map(lambda batch: loss(values(params), batch), held_out))

    return float(run(params, batches(STEPS, 1, held_out=False), batches(20, 2, held_out=True)))


@pytest.fixture(scope="module")
def exact():
    return learnt("adamw")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("method", "most"), [(name, most) for name, (*_, most) in METHODS.items()])
def test_memory_efficient_optimizers_reach_nearly_the_loss_of_adamw(exact, method, most):
    *how, _ = METHODS[method]
    assert exact < 2.4  # past the steep part: the bytes' entropy is above 3
    assert learnt(*how) < exact + most
