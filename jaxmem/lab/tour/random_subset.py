"""Training a random subset of the weights, compared with a low-rank adapter with as many parameters.

A residual network is trained on digits, then fine-tuned on digits with permuted pixels. A random subset only saves
optimizer state: the gradients of complete matrices are computed to select those of a few entries, and the forward pass
needs a copy of each matrix.
"""

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
from jaxmem.lab.tour.table import Row
from jaxmem.models.cross_entropy import cross_entropy

STEPS, ROWS, RANK, WIDTH = 300, 64, 4, 256
RATES = (1e-2,)  # learning rates
HELD_OUT = 300
Params = dict[Any, jax.Array]
Apply = Callable[[Params], Any]  # trainable parameters -> a network
Data = tuple[jax.Array, jax.Array]


def compare(rates: Sequence[float] = RATES) -> Iterator[Row]:
    """For each method: trainable parameters, memory of the compiled step, held-out accuracy with the best rate."""
    digits = Digits()
    images = jnp.asarray(digits.images[..., None] / np.float32(BRIGHTEST))
    order = np.random.default_rng(1).permutation(64)
    permuted = images.reshape(-1, 64)[:, order].reshape(images.shape)
    labels = jnp.asarray(digits.labels, jnp.int32)
    seen, unseen = slice(0, -HELD_OUT), slice(-HELD_OUT, None)

    graphdef, state = nnx.split(models.build(Mlp(layers=4, embed=WIDTH, mlp=2 * WIDTH), nnx.Rngs(0)))

    def full(own: Params) -> Any:
        return nnx.merge(graphdef, unflatten_dict(own))

    initial = flatten_dict(nnx.to_pure_dict(state))
    base, _ = _train(full, initial, (images[seen], labels[seen]), 1e-3)
    network = full(base)
    adapters.lora(network, rank=RANK, targets=["*"])
    with_lora, everything = nnx.split(network)
    adapted = flatten_dict(nnx.to_pure_dict(everything))
    lora = {path: x for path, x in adapted.items() if "lora" in path}
    matrices = {path: x for path, x in base.items() if x.ndim > 1}
    share = sum(x.size for x in lora.values()) / sum(x.size for x in matrices.values())
    draws = np.random.default_rng(2)
    places = {path: draws.choice(x.size, round(share * x.size), replace=False) for path, x in matrices.items()}

    def subset(own: Params) -> Any:
        changed = {path: x.reshape(-1).at[places[path]].add(own[path]).reshape(x.shape) for path, x in matrices.items()}
        return full({**base, **changed})

    methods: dict[str, tuple[Apply, Params]] = {
        "all weights": (full, base),
        "low-rank adapter": (lambda own: nnx.merge(with_lora, unflatten_dict({**adapted, **own})), lora),
        "random subset": (subset, {path: jnp.zeros(len(at)) for path, at in places.items()}),
    }
    for name, (apply, own) in methods.items():
        count = sum(x.size for x in own.values())
        runs = [_train(apply, own, (permuted[seen], labels[seen]), rate) for rate in rates]
        yield {
            "trainable": name,
            "parameters": count,
            "state, MiB": 8 * count / 2**20,
            "temporary buffers, MiB": runs[0][1].memory_analysis().temp_size_in_bytes / 2**20,
            "accuracy": max(_accuracy(apply(own), permuted[unseen], labels[unseen]) for own, _ in runs),
        }


def _train(apply: Apply, own: Params, data: Data, rate: float) -> tuple[Params, Any]:
    """The trained parameters, and the compiled step."""
    images, labels = data
    tx, own = optim.adam(rate), jax.tree.map(jnp.copy, own)  # a copy, because updates are in place

    def step(own: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any]:
        grads = jax.grad(lambda own: jnp.mean(cross_entropy(apply(own)(x), y)))(own)
        updates, state = tx.update(grads, state, own)
        return optax.apply_updates(own, updates), state

    state, draws = tx.init(own), np.random.default_rng(0)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(own, state, images[:ROWS], labels[:ROWS]).compile()
    for _ in range(STEPS):
        rows = draws.integers(0, len(images), ROWS)
        own, state = compiled(own, state, images[rows], labels[rows])
    return own, compiled


def _accuracy(network: Any, images: jax.Array, labels: jax.Array) -> float:
    return float(jnp.mean((jnp.argmax(jax.jit(network)(images), -1) == labels).astype(jnp.float32)))
