"""Small programs, and batches for them that need no files."""

import jax
import numpy as np
import pytest

from jaxmem.config import load_config
from jaxmem.estimate.state import bytes_on_device
from jaxmem.step.programs import program

SMALL = {"vocab": 64, "layers": 2, "embed": 32, "mlp": 64, "heads": 8, "kv_heads": 4, "head_dim": 8}


def config(**sections):
    base = {
        "name": "x",
        "model": {"preset": "tiny", **SMALL, "vocab": 264},
        "data": {"sequence_length": 24},
        "batch": {"global_size": 8},
        "train": {"steps": 10},
        # With the usual 1e-8 an Adam update of a gradient near zero is its sign, which rounding decides.
        "optimizer": {"epsilon": 1e-3},
    }
    return load_config({**base, **sections})


def batch_for(built, seed=0):
    """Random values of a batch's form, with padding and with two documents in each row of tokens."""
    draw = np.random.default_rng(seed)
    batch = {}
    for name, spec in built.spec.batch.items():
        if name == "mask":
            batch[name] = (draw.random(spec.shape) < 0.8).astype(np.float32)
        elif name == "positions":
            half = spec.shape[-1] // 2
            batch[name] = np.broadcast_to(np.arange(spec.shape[-1]) % half, spec.shape).astype(np.int32)
        elif name == "segment_ids":
            half = spec.shape[-1] // 2
            batch[name] = np.broadcast_to(1 + np.arange(spec.shape[-1]) // half, spec.shape).astype(np.int32)
        elif spec.dtype == np.int32:
            batch[name] = draw.integers(0, 10, spec.shape).astype(np.int32)
        else:
            batch[name] = draw.random(spec.shape).astype(np.float32)
    return batch


class Trained:
    """Losses, gradient norms and final weights of a few updates, from new weights or from where another began."""

    def __init__(self, cfg, devices=1, updates=3, batches=None, begin=None):
        self.built = program(cfg, jax.devices()[:devices])
        places = jax.tree.map(lambda x: x.sharding, self.built.spec.state)
        self.state = jax.device_put(begin.begun, places) if begin else self.built.initialise()
        # Copies: a view of the state would keep it from being donated.
        self.begun = jax.tree.map(np.array, self.state)
        self.first = self.begun.params
        self.compiled = self.built.lower_step().compile()
        # Every leaf of the state is updated where it lies, whatever the config.
        assert self.compiled.memory_analysis().alias_size_in_bytes == bytes_on_device(self.built.spec.state)
        self.metrics, self.after = [], []
        for update in range(updates):
            batch = batches[update] if batches else batch_for(self.built, update)
            self.state, metrics = self.compiled(self.state, self.built.place(batch))
            self.metrics.append({name: float(value) for name, value in metrics.items()})
            self.after.append(jax.tree.map(np.array, self.state.params))
        self.params = self.after[-1]

    def agrees_with(self, other, rtol=2e-5, atol=2e-5):
        """After each update of this run; the other may have made more."""
        for mine, theirs in zip(self.metrics, other.metrics[: len(self.metrics)], strict=True):
            assert mine == pytest.approx(theirs, rel=rtol, abs=1e-6)
        for mine, theirs in zip(self.after, other.after[: len(self.after)], strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), mine, theirs)
