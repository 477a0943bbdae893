"""Each kind, from the same weights and with the same number of updates; then a random subset of the weights."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters, models, optim
from jaxmem.config import Mlp
from jaxmem.data.digits import MAX_BRIGHTNESS, Digits
from jaxmem.inference.evaluate import evaluate
from jaxmem.models.losses import cross_entropy
from jaxmem.typing import Tree
from scripts.course import Findings, main
from scripts.course.common import CONFIGS, rows_of, train_all
from scripts.course.docstrings import questions, source_files
from scripts.course.panels import Bars
from scripts.course.table import Row, Table

BASE = CONFIGS["adapters"]["base"]
KINDS = rows_of("adapters", "kinds")
STEPS = 60  # updates of each fine-tuning run


def measure() -> Findings:
    before, rows = _fine_tune()
    kinds = Table("A decoder pretrained on source text is fine-tuned to answer", rows)
    subsets = Table("A random subset of the weights, on digits with permuted pixels", list(compare_subsets()))
    buffers = {row["trainable"]: row["temporary buffers, MiB"] for row in subsets.rows}
    return Findings(
        [kinds, subsets],
        {"before": before, "times": buffers["random subset"] / buffers["all weights"]},
        [
            Bars(kinds, ("state, MiB", "gradients, activations, MiB"), "Memory of a step besides the weights, MiB"),
            Bars(kinds, ("loss",), "Held-out loss, nats per byte"),
        ],
    )


def _fine_tune() -> tuple[float, list[Row]]:
    """The loss before fine-tuning, and a row for each kind."""
    with tempfile.TemporaryDirectory() as place:
        texts = Path(place, "answers")
        base = f"{place}/base"
        texts.mkdir()
        for number, (question, answer) in enumerate(questions(*source_files()).items()):
            (texts / f"{number}.txt").write_text(f"{question}\n{answer}\n", encoding="utf-8")
        data = {"source": "text", "path": str(texts), "sequence_length": 64, "held_out": 0.05}
        train_all({"base": BASE}, keep=base)
        before = evaluate(Path(base), overrides=[f"data={json.dumps(data)}"])["loss"]
        config = {**BASE, "data": data, "adapter": {"base_run": base}, "train": {"steps": STEPS}}
        outcomes = train_all(dict.fromkeys(KINDS, config), KINDS)
    rows: list[Row] = []
    for name, (plan, held_out) in outcomes.items():
        parts = plan["bytes_per_device"]
        rows.append(
            {
                "trainable": name,
                "parameters": plan["model"]["trainable"],
                "state, MiB": (parts["optimizer"] + parts["master"]) / 2**20,
                "gradients, activations, MiB": sum(parts[of] for of in ("gradients", "activations", "other")) / 2**20,
                "loss": held_out["loss"],
                "config": " ".join(KINDS[name]),
            }
        )
    return before, rows


# ---------------------------------------------------------------- a random subset

SUBSET_STEPS, ROWS, RANK, WIDTH = 300, 64, 4, 256
LEARNING_RATE = 1e-2  # learning rate
HELD_OUT = 300
Params = dict[Any, jax.Array]
Apply = Callable[[Params], Any]  # trainable parameters -> a network
Data = tuple[jax.Array, jax.Array]


def compare_subsets() -> Iterator[Row]:
    """A random subset of the weights, compared with a low-rank adapter with as many parameters: a residual network is
    trained on digits, then fine-tuned on digits with permuted pixels. A random subset only saves optimizer state: the
    gradients of complete matrices are computed to select those of a few entries, and the forward pass needs a copy of
    each matrix."""
    digits = Digits()
    images = jnp.asarray(digits.images[..., None] / np.float32(MAX_BRIGHTNESS))
    order = np.random.default_rng(1).permutation(64)
    permuted = images.reshape(-1, 64)[:, order].reshape(images.shape)
    labels = jnp.asarray(digits.labels, jnp.int32)
    seen = slice(0, -HELD_OUT)
    unseen = slice(-HELD_OUT, None)

    graphdef, state = nnx.split(models.build(Mlp(layers=4, embed=WIDTH, mlp=2 * WIDTH), nnx.Rngs(0)))

    def full(trainable: Params) -> Tree:
        return nnx.merge(graphdef, unflatten_dict(trainable))

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

    def subset(trainable: Params) -> Tree:
        changed = {
            path: x.reshape(-1).at[places[path]].add(trainable[path]).reshape(x.shape) for path, x in matrices.items()
        }
        return full({**base, **changed})

    methods: dict[str, tuple[Apply, Params]] = {
        "all weights": (full, base),
        "low-rank adapter": (lambda trainable: nnx.merge(with_lora, unflatten_dict({**adapted, **trainable})), lora),
        "random subset": (subset, {path: jnp.zeros(len(at)) for path, at in places.items()}),
    }
    for name, (apply, trainable) in methods.items():
        count = sum(x.size for x in trainable.values())
        trainable, step = _train(apply, trainable, (permuted[seen], labels[seen]), LEARNING_RATE)
        predicted = jnp.argmax(jax.jit(apply(trainable))(permuted[unseen]), -1)
        yield {
            "trainable": name,
            "parameters": count,
            "state, MiB": 8 * count / 2**20,
            "temporary buffers, MiB": step.memory_analysis().temp_size_in_bytes / 2**20,
            "accuracy": float(jnp.mean((predicted == labels[unseen]).astype(jnp.float32))),
        }


def _train(apply: Apply, trainable: Params, data: Data, rate: float) -> tuple[Params, Any]:
    """The trained parameters, and the compiled step."""
    images, labels = data
    tx = optim.adam(rate)
    trainable = jax.tree.map(jnp.copy, trainable)  # a copy, because updates are in place

    def step(trainable: Params, state: Tree, x: jax.Array, y: jax.Array) -> tuple[Params, Any]:
        grads = jax.grad(lambda trainable: jnp.mean(cross_entropy(apply(trainable)(x), y)))(trainable)
        updates, state = tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state

    state = tx.init(trainable)
    draws = np.random.default_rng(0)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(trainable, state, images[:ROWS], labels[:ROWS]).compile()
    for _ in range(SUBSET_STEPS):
        rows = draws.integers(0, len(images), ROWS)
        trainable, state = compiled(trainable, state, images[rows], labels[rows])
    return trainable, compiled


if __name__ == "__main__":
    main(__file__)
