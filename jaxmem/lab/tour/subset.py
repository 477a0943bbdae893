"""A random subset of the weights learns, and why nobody does it: beside low-rank adapters of as many numbers.

A residual network learns the digits; then their pixels change places, and it learns again with so many numbers: a
random few of each matrix, or an adapter beside it. A random subset saves the optimizer's state, and nothing else: to
find the gradients of a few numbers the whole matrix's is made, and to use the numbers a copy of the matrix.
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
Apply = Callable[[Params], Any]  # what learns -> a network
Data = tuple[jax.Array, jax.Array]


def learnt(steps: int = STEPS, rates: Sequence[float] = RATES, width: int = 256) -> Iterator[dict[str, Any]]:
    """Each way's numbers, bytes of the compiled step, and accuracy on digits it never saw at the best of the rates."""
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

    def whole(own: Params) -> Any:
        return nnx.merge(graphdef, unflatten_dict(own))

    base, _ = _trained(whole, jax.tree.map(jnp.copy, params), seen, 1e-3, steps)
    yield {"name": "before", "learns": 0, "state": 0, "temporaries": 0, "accuracy": _right(whole(base), moved[1])}

    network = whole(base)
    adapters.lora(network, rank=RANK, targets=["*"])
    with_lora, all_of_it = nnx.split(network)
    every = flatten_dict(nnx.to_pure_dict(all_of_it))
    lora = {path: x for path, x in every.items() if "lora" in path}
    matrices = {path: x for path, x in base.items() if x.ndim > 1}
    share = sum(x.size for x in lora.values()) / sum(x.size for x in matrices.values())
    draws = np.random.default_rng(2)
    places = {path: draws.choice(x.size, round(share * x.size), replace=False) for path, x in matrices.items()}

    def beside(own: Params) -> Any:
        return nnx.merge(with_lora, unflatten_dict({**every, **own}))

    def subset(own: Params) -> Any:
        learnt = {path: x.reshape(-1).at[places[path]].add(own[path]).reshape(x.shape) for path, x in matrices.items()}
        return whole({**base, **learnt})

    ways: dict[str, tuple[Apply, Callable[[], Params]]] = {
        "all weights": (whole, lambda: jax.tree.map(jnp.copy, base)),
        "low-rank": (beside, lambda: jax.tree.map(jnp.copy, lora)),
        "random subset": (subset, lambda: {path: jnp.zeros(len(at)) for path, at in places.items()}),
    }
    for name, (apply, begin) in ways.items():
        learns = sum(x.size for x in begin().values())
        runs = [_trained(apply, begin(), moved[0], rate, steps) for rate in rates]
        yield {
            "name": name,
            "learns": learns,
            "state": 8 * learns,
            "temporaries": runs[0][1].memory_analysis().temp_size_in_bytes,
            "accuracy": max(_right(apply(own), moved[1]) for own, _ in runs),
        }


def _trained(apply: Apply, own: Params, data: Data, rate: float, steps: int) -> tuple[Params, Any]:
    """What has learnt, and the compiled step."""
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


def _right(network: Any, data: Data) -> float:
    return float(jnp.mean((jnp.argmax(jax.jit(network)(data[0]), -1) == data[1]).astype(jnp.float32)))
