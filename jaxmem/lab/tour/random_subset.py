"""Training a random subset of the weights, beside a low-rank adapter of as many parameters.

A residual network learns the digits; then their pixels are permuted, and it learns again with few parameters. A random
subset saves optimizer state and nothing else: the gradient of the whole matrix is computed to find the gradients of a
few of its entries, and a copy of the matrix is made to use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters, models, optim
from jaxmem.config import Mlp
from jaxmem.data.digits import BRIGHTEST, Digits
from jaxmem.models.cross_entropy import cross_entropy

STEPS, ROWS, RANK, RATES = 300, 64, 4, (1e-3, 1e-2, 1e-1)
HELD_OUT = 300
Params = dict[Any, jax.Array]
Apply = Callable[[Params], Any]  # trainable parameters -> a network
Data = tuple[jax.Array, jax.Array]


def compare(steps: int = STEPS, rates: Sequence[float] = RATES, width: int = 256) -> Iterator[dict[str, Any]]:
    """For each method: its trainable parameters, bytes of the compiled step, held-out accuracy at the best rate."""
    digits = Digits()
    images, labels = digits.images[..., None] / np.float32(BRIGHTEST), digits.labels
    seen, unseen = (
        (jnp.asarray(images[part]), jnp.asarray(labels[part], jnp.int32))
        for part in (slice(0, -HELD_OUT), slice(-HELD_OUT, None))
    )
    order = np.random.default_rng(1).permutation(64)
    moved = [(x.reshape(-1, 64)[:, order].reshape(x.shape), y) for x, y in (seen, unseen)]

    graphdef, state = nnx.split(models.build(Mlp(layers=4, embed=width, mlp=2 * width), nnx.Rngs(0)))
    params = flatten_dict(nnx.to_pure_dict(state))

    def full(own: Params) -> Any:
        return nnx.merge(graphdef, unflatten_dict(own))

    base, _ = _train(full, jax.tree.map(jnp.copy, params), seen, 1e-3, steps)
    empty = dict.fromkeys(("parameters", "state", "temporary buffers"))
    yield {"trainable": "none", **empty, "accuracy": _accuracy(full(base), moved[1])}

    network = full(base)
    adapters.lora(network, rank=RANK, targets=["*"])
    with_lora, everything = nnx.split(network)
    every = flatten_dict(nnx.to_pure_dict(everything))
    lora = {path: x for path, x in every.items() if "lora" in path}
    matrices = {path: x for path, x in base.items() if x.ndim > 1}
    share = sum(x.size for x in lora.values()) / sum(x.size for x in matrices.values())
    draws = np.random.default_rng(2)
    places = {path: draws.choice(x.size, round(share * x.size), replace=False) for path, x in matrices.items()}

    def adapted(own: Params) -> Any:
        return nnx.merge(with_lora, unflatten_dict({**every, **own}))

    def subset(own: Params) -> Any:
        changed = {path: x.reshape(-1).at[places[path]].add(own[path]).reshape(x.shape) for path, x in matrices.items()}
        return full({**base, **changed})

    methods: dict[str, tuple[Apply, Callable[[], Params]]] = {
        "all weights": (full, lambda: jax.tree.map(jnp.copy, base)),
        "low-rank adapter": (adapted, lambda: jax.tree.map(jnp.copy, lora)),
        "random subset": (subset, lambda: {path: jnp.zeros(len(at)) for path, at in places.items()}),
    }
    for name, (apply, initial) in methods.items():
        count = sum(x.size for x in initial().values())
        runs = [_train(apply, initial(), moved[0], rate, steps) for rate in rates]
        yield {
            "trainable": name,
            "parameters": count,
            "state": 8 * count,
            "temporary buffers": runs[0][1].memory_analysis().temp_size_in_bytes,
            "accuracy": max(_accuracy(apply(own), moved[1]) for own, _ in runs),
        }


def _train(apply: Apply, own: Params, data: Data, rate: float, steps: int) -> tuple[Params, Any]:
    """The trained parameters, and the compiled step."""
    images, labels = data
    tx = optim.adam(rate)

    def step(own: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any]:
        grads = jax.grad(lambda own: jnp.mean(cross_entropy(apply(own)(x), y)))(own)
        updates, state = tx.update(grads, state, own)
        return optax.apply_updates(own, updates), state

    state, draws = tx.init(own), np.random.default_rng(0)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(own, state, images[:ROWS], labels[:ROWS]).compile()
    for _ in range(steps):
        rows = draws.integers(0, len(images), ROWS)
        own, state = compiled(own, state, images[rows], labels[rows])
    return own, compiled


def _accuracy(network: Any, data: Data) -> float:
    return float(jnp.mean((jnp.argmax(jax.jit(network)(data[0]), -1) == data[1]).astype(jnp.float32)))
