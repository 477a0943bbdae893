"""Each kind, from the same weights and with the same number of updates; then a random subset of the weights."""

import ast
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from jaxmem.data.text import stdlib_files
from jaxmem.inference.evaluate import Evaluator
from jaxmem.inference.load import open_model
from jaxmem.models.losses import cross_entropy
from jaxmem.typing import JsonDict, Tree
from scripts.course import Findings, main
from scripts.course.common import CONFIGS, Outcome, rows_of, train_all
from scripts.course.panels import Bars, LinePlot
from scripts.course.table import Row, Table

BASE = CONFIGS["adapters"]["base"]
KINDS = rows_of("adapters", "kinds")
STEPS = 60  # updates of each fine-tuning run


def measure() -> Findings:
    before, rows = _fine_tune()
    kinds = Table("A decoder pretrained on source text is fine-tuned to answer", rows)
    subsets = Table("A random subset of the weights, on digits with permuted pixels", list(compare_subsets()))
    everything, low_rank, subset = subsets.rows
    usual, *_ = RATES
    accuracies = {row["trainable"]: [(rate, row[f"accuracy at {rate:g}"]) for rate in RATES] for row in subsets.rows}
    return Findings(
        [kinds, subsets],
        {
            "before": before["packed"],
            "unpacked": before["not packed"],
            "times": subset["temporary buffers, MiB"] / everything["temporary buffers, MiB"],
            "rate": usual,
            "lora": low_rank[f"accuracy at {usual:g}"],
            "subset": subset[f"accuracy at {usual:g}"],
            "best_lora": low_rank["best"],
            "best_subset": subset["best"],
            "noise": (subset["best"] * (1 - subset["best"]) / HELD_OUT) ** 0.5,
        },
        [
            Bars(kinds, ("state, MiB", "gradients, activations, MiB"), "Memory of a step besides the weights, MiB"),
            Bars(kinds, ("loss",), "Held-out loss, nats per byte"),
            LinePlot("A random subset of the weights", "learning rate", "accuracy on digits", accuracies, "x"),
        ],
    )


def _fine_tune() -> tuple[dict[str, float], list[Row]]:
    """The losses before fine-tuning, on packed rows and on those of a soft prompt, and a row for each kind."""
    with tempfile.TemporaryDirectory() as place:
        texts = Path(place, "answers")
        base = f"{place}/base"
        texts.mkdir()
        for number, (question, answer) in enumerate(questions(*source_files()).items()):
            (texts / f"{number}.txt").write_text(f"{question}\n{answer}\n", encoding="utf-8")
        data = {"source": "text", "path": str(texts), "sequence_length": 64, "held_out": 0.05}
        train_all({"base": BASE}, keep=base)
        before = {
            "packed": _loss(base, {**data, "packing": True}),
            "not packed": _loss(base, {**data, "packing": False}),
        }
        config = {**BASE, "data": data, "adapter": {"base_run": base}, "train": {"steps": STEPS}}
        outcomes = train_all(dict.fromkeys(KINDS, config), KINDS)
    return before, [_row(name, outcome) for name, outcome in outcomes.items()]


def _row(name: str, outcome: Outcome) -> Row:
    parts = outcome.plan["bytes_per_device"]
    return {
        "trainable": name,
        "parameters": outcome.plan["model"]["trainable"],
        "state, MiB": (parts["optimizer"] + parts["master"]) / 2**20,
        "gradients, activations, MiB": sum(parts[of] for of in ("gradients", "activations", "other")) / 2**20,
        "loss": outcome.held_out["loss"],
        "config": " ".join(KINDS[name]),
    }


def _loss(run: str, data: JsonDict) -> float:
    """The loss of a run on as many held-out batches of other data as a training run evaluates."""
    program, params = open_model(run, [f"data={json.dumps(data)}"])
    with Evaluator(program) as held_out:
        return held_out(params, program.cfg.train.evaluate_batches)["loss"]


# ---------------------------------------------------------------- questions about the standard library
# What does X do? The answer is the first line of X's docstring, so the data needs no network.

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MIN_ANSWER = 16  # characters
MAX_ANSWER = 90


def source_files() -> tuple[list[Path], Path]:
    """The standard library's modules, and the folder that has all of them."""
    files = stdlib_files()
    return files, next(folder for folder in files[0].parents if all(file.is_relative_to(folder) for file in files))


def questions(files: Sequence[Path], root: Path) -> dict[str, str]:
    """Questions and answers for each public function and class of these modules that has a docstring."""
    answers: dict[str, str] = {}
    for file in files:
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):  # templates, and files that test the parser
            continue
        for name, node in _public(tree):
            summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            if MIN_ANSWER <= len(summary) <= MAX_ANSWER and re.match(r"[A-Z][a-z]+ ", summary):
                answers.setdefault(f"What does {module}.{name} do?", summary)
    return answers


def _public(parent: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for node in parent.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{prefix}{node.name}.")


# ---------------------------------------------------------------- a random subset

SUBSET_STEPS, ROWS, RANK, WIDTH = 200, 64, 4, 256
RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # learning rates
HELD_OUT = 300
Params = dict[Any, jax.Array]
Apply = Callable[[Params], Any]  # trainable parameters -> a network
Data = tuple[jax.Array, jax.Array]


def compare_subsets() -> Iterator[Row]:
    """A random subset of the weights, compared with a low-rank adapter with as many parameters: a residual network is
    trained on digits, then fine-tuned on digits with permuted pixels, at each learning rate. A random subset only saves
    optimizer state: the gradients of complete matrices are computed to select those of a few entries, and the forward
    pass needs a copy of each matrix."""
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
    base = _train(_compile(full, initial), initial, (images[seen], labels[seen]), RATES[0])
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
        step = _compile(apply, trainable)
        share_right = jax.jit(lambda trained, apply=apply: _accuracy(apply(trained), permuted[unseen], labels[unseen]))
        accuracies = {
            f"accuracy at {rate:g}": float(share_right(_train(step, trainable, (permuted[seen], labels[seen]), rate)))
            for rate in RATES
        }
        yield {
            "trainable": name,
            "parameters": count,
            "state, MiB": 8 * count / 2**20,
            "temporary buffers, MiB": step.memory_analysis().temp_size_in_bytes / 2**20,
            **accuracies,
            "best": max(accuracies.values()),
        }


def _accuracy(network: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean((jnp.argmax(network(images), -1) == labels).astype(jnp.float32))


def _compile(apply: Apply, trainable: Params) -> Any:
    """(trainable parameters, state, images, labels, learning rate) -> both after an update of AdamW, in place."""
    images, labels = jax.ShapeDtypeStruct((ROWS, 8, 8, 1), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)

    def step(trainable: Params, state: Tree, x: jax.Array, y: jax.Array, rate: jax.Array) -> tuple[Params, Any]:
        grads = jax.grad(lambda trainable: jnp.mean(cross_entropy(apply(trainable)(x), y)))(trainable)
        updates, state = optim.adam(rate).update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state

    state = optim.adam(RATES[0]).init(trainable)
    return jax.jit(step, donate_argnums=(0, 1)).lower(trainable, state, images, labels, jnp.float32(0)).compile()


def _train(step: Any, trainable: Params, data: Data, rate: float) -> Params:
    """The parameters after SUBSET_STEPS updates."""
    images, labels = data
    trainable = jax.tree.map(jnp.copy, trainable)  # a copy, because updates are in place
    state = optim.adam(RATES[0]).init(trainable)
    draws = np.random.default_rng(0)
    for _ in range(SUBSET_STEPS):
        rows = draws.integers(0, len(images), ROWS)
        trainable, state = step(trainable, state, images[rows], labels[rows], jnp.float32(rate))
    return trainable


if __name__ == "__main__":
    main(__file__)
