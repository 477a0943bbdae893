"""A random subset of the weights learns, and why nobody does it: beside low-rank adapters of as many numbers.

    python scripts/random_subset.py

A residual network learns the digits; then their pixels change places, and it learns again with so many numbers: a
random few of each matrix, or an adapter beside it. Printed are the bytes that the compiled step allocates beside
weights and state, and accuracy on digits it never saw. A random subset saves the optimizer's state, and nothing else:
to find the gradients of a few numbers the whole matrix's is made, and to use the numbers a copy of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters, config, losses, models, optim
from jaxmem.data.digits import BRIGHTEST, Digits

STEPS, ROWS, RANK, RATES = 300, 64, 4, (1e-3, 1e-2, 1e-1)
MODEL = config.Mlp(layers=4, embed=256, mlp=512)
Params = dict[Any, jax.Array]
Apply = Callable[[Params], Any]  # what learns -> a network


def trained(apply: Apply, own: Params, data: tuple[Any, ...], rate: float) -> tuple[Params, Any]:
    """What has learnt, and the compiled step."""
    images, labels = data
    tx = optim.adam(rate)

    def step(own: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any]:
        grads = jax.grad(lambda own: jnp.mean(losses.cross_entropy(apply(own)(x), y)))(own)
        updates, state = tx.update(grads, state, own)
        return optax.apply_updates(own, updates), state

    state, draws = tx.init(own), np.random.default_rng(0)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(own, state, images[:ROWS], labels[:ROWS]).compile()
    for _ in range(STEPS):
        rows = draws.integers(0, len(images), ROWS)
        own, state = compiled(own, state, images[rows], labels[rows])
    return own, compiled


def accuracy(network: Any, data: tuple[Any, ...]) -> float:
    return float(jnp.mean((jnp.argmax(jax.jit(network)(data[0]), -1) == data[1]).astype(jnp.float32)))


def main() -> None:
    digits = Digits()
    images, labels = digits.images[..., None] / np.float32(BRIGHTEST), digits.labels
    part = slice(0, -300), slice(-300, None)
    seen, unseen = ((jnp.asarray(images[p]), jnp.asarray(labels[p], jnp.int32)) for p in part)
    order = np.random.default_rng(1).permutation(64)
    moved = [(x.reshape(-1, 64)[:, order].reshape(x.shape), y) for x, y in (seen, unseen)]

    graphdef, state = nnx.split(models.build(MODEL, nnx.Rngs(0)))
    params = flatten_dict(nnx.to_pure_dict(state))
    whole = lambda own: nnx.merge(graphdef, unflatten_dict(own))  # noqa: E731
    base, _ = trained(whole, jax.tree.map(jnp.copy, params), seen, 1e-3)
    print(f"base: {accuracy(whole(base), unseen):.3f}; pixels moved: {accuracy(whole(base), moved[1]):.3f}")

    network = whole(base)
    adapters.lora(network, rank=RANK, targets=["*"])
    with_lora, every = nnx.split(network)
    every = flatten_dict(nnx.to_pure_dict(every))
    lora = {path: x for path, x in every.items() if "lora" in path}
    count = sum(x.size for x in lora.values())
    matrices = {path: x for path, x in base.items() if x.ndim > 1}
    share = count / sum(x.size for x in matrices.values())
    draws = np.random.default_rng(2)
    places = {path: draws.choice(x.size, round(share * x.size), replace=False) for path, x in matrices.items()}

    def subset(own: Params) -> Any:
        learnt = {path: x.reshape(-1).at[places[path]].add(own[path]).reshape(x.shape) for path, x in matrices.items()}
        return whole({**base, **learnt})

    kinds: dict[str, tuple[Apply, Callable[[], Params]]] = {
        "all weights": (whole, lambda: jax.tree.map(jnp.copy, base)),
        "low-rank": (
            lambda own: nnx.merge(with_lora, unflatten_dict({**every, **own})),
            lambda: jax.tree.map(jnp.copy, lora),
        ),
        "random subset": (subset, lambda: {path: jnp.zeros(len(at)) for path, at in places.items()}),
    }
    for name, (apply, begin) in kinds.items():
        found = []
        for rate in RATES:
            own, compiled = trained(apply, begin(), moved[0], rate)
            found.append(accuracy(apply(own), moved[1]))
        learns = sum(x.size for x in own.values())
        memory = compiled.memory_analysis()
        print(
            f"{name}: {learns:,} numbers learn, state {8 * learns / 1024:.0f} KiB, temporaries "
            f"{memory.temp_size_in_bytes / 1024:.0f} KiB, accuracy {max(found):.3f} (rates {RATES}: "
            f"{', '.join(f'{x:.3f}' for x in found)})"
        )


if __name__ == "__main__":
    main()
