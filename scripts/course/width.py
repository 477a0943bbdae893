"""MLPs of growing width on few images with some wrong labels: the loss on the training images and on held-out ones."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.data.digits import Digits
from scripts.course import Findings, main
from scripts.course.panels import LinePlot
from scripts.course.table import Row, Table

WIDTHS = (2, 4, 8, 16, 32, 64, 128, 256)
TRAINED, WRONG = 300, 0.15  # images, and the share of them whose label is random
RATE, EVERY = 3e-3, 20  # learning rate, and the steps between evaluations
Weights = dict[str, jax.Array]
Data = tuple[np.ndarray, np.ndarray]


def measure(steps: int, widths: Sequence[int] = WIDTHS) -> Findings:
    trained, held_out = images()
    rows = [row(width, steps, trained, held_out) for width in widths]
    best = min(rows, key=lambda row: row["held-out loss"])
    widest = rows[-1]
    losses = {
        name: [(row["width"], row[name]) for row in rows]
        for name in ("training loss", "held-out loss", "held-out loss, stopped early")
    }
    right = {
        name: [(row["width"], 100 * row[name]) for row in rows] for name in ("training accuracy", "held-out accuracy")
    }
    return Findings(
        [Table(f"{TRAINED} images of digits, {WRONG:.0%} of the labels random, {steps} steps", rows)],
        {"best": best, "widest": widest},
        [
            LinePlot("Loss by width", "hidden units", "nats", losses, "xy"),
            LinePlot("Accuracy by width", "hidden units", "%", right, "x"),
        ],
    )


def images() -> tuple[Data, Data]:
    """Training images with some random labels, and held-out images with the right ones."""
    data, draws = Digits(), np.random.default_rng(0)
    order = draws.permutation(len(data))
    x, labels = data.images.reshape(-1, 64)[order].astype(np.float32) / 16, data.labels[order].astype(np.int32)
    noisy = np.where(draws.random(TRAINED) < WRONG, draws.integers(0, 10, TRAINED), labels[:TRAINED]).astype(np.int32)
    return (x[:TRAINED], noisy), (x[TRAINED:], labels[TRAINED:])


def initial(width: int) -> Weights:
    first, second = jax.random.split(jax.random.key(width))
    return {
        "w1": jax.random.normal(first, (64, width)) / 8,
        "b1": jnp.zeros(width),
        "w2": jax.random.normal(second, (width, 10)) / np.sqrt(width).astype(np.float32),
        "b2": jnp.zeros(10),
    }


def scores(weights: Weights, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean cross-entropy, and the share of right labels."""
    logits = jax.nn.relu(x @ weights["w1"] + weights["b1"]) @ weights["w2"] + weights["b2"]
    loss = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])
    return loss, jnp.mean(jnp.argmax(logits, axis=1) == labels)


def row(width: int, steps: int, trained: Data, held_out: Data) -> Row:
    tx = optax.adam(RATE)
    weights = initial(width)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        weights, state = carry
        gradients = jax.grad(lambda w: scores(w, *trained)[0])(weights)
        updates, state = tx.update(gradients, state)
        return (optax.apply_updates(weights, updates), state), None

    def steps_and_loss(carry: Any, _: None) -> tuple[Any, jax.Array]:
        carry, _ = jax.lax.scan(step, carry, None, EVERY)
        return carry, scores(carry[0], *held_out)[0]

    run = jax.jit(lambda carry: jax.lax.scan(steps_and_loss, carry, None, steps // EVERY))
    (weights, _), held_out_losses = run((weights, tx.init(weights)))
    loss, accuracy = scores(weights, *map(jnp.asarray, trained))
    unseen_loss, unseen_accuracy = scores(weights, *map(jnp.asarray, held_out))
    return {
        "width": width,
        "parameters": sum(w.size for w in weights.values()),
        "training loss": float(loss),
        "held-out loss": float(unseen_loss),
        "held-out loss, stopped early": float(held_out_losses.min()),
        "training accuracy": float(accuracy),
        "held-out accuracy": float(unseen_accuracy),
    }


if __name__ == "__main__":
    main(__file__)
