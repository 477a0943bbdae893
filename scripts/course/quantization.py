"""The bytes and errors of each scheme; then a small trained model with fewer and fewer bits."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import models
from jaxmem.config import load_config
from jaxmem.inference.evaluate import Evaluator
from jaxmem.models.network import Execution
from jaxmem.quant import quantize
from jaxmem.training.run import run
from jaxmem.typing import JsonDict
from scripts.course import Findings, main
from scripts.course.common import CONFIGS
from scripts.course.panels import LinePlot
from scripts.course.table import Row, Table

MODEL = "llama3-70b"
BLOCK = 64
SIZE = 1024  # rows and columns of the matrix of normally distributed values
TRAINED = CONFIGS["quantization"]["trained"]
BITS = (8, 6, 5, 4, 3, 2)
Quantizer = Callable[[jax.Array], Any]
IN_BLOCKS: JsonDict = {"block_size": BLOCK, "axis": -2}
# The quantization of a matrix; vectors remain in float32.
SCHEMES: dict[str, Quantizer] = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
    "int8": partial(quantize, format="int8", **IN_BLOCKS),
    "int6": partial(quantize, format="int6", **IN_BLOCKS),
    "int5": partial(quantize, format="int5", **IN_BLOCKS),
    "int4, one scale": partial(quantize, format="int4", block_size=BLOCK, axis=None),
    "int4, a scale per channel": partial(quantize, format="int4", block_size=None, axis=-2),
    "int4, blocks of 64": partial(quantize, format="int4", **IN_BLOCKS),
    "uint4, affine blocks": partial(quantize, format="uint4", **IN_BLOCKS),
    "nf4, blocks of 64": partial(quantize, format="nf4", **IN_BLOCKS),
    "nf4, double quantization": partial(quantize, format="nf4", double_quant=True, **IN_BLOCKS),
    "int3": partial(quantize, format="int3", **IN_BLOCKS),
    "int2": partial(quantize, format="int2", **IN_BLOCKS),
}


def measure() -> Findings:
    schemes = Table(f"Weights of {MODEL}; errors of normally distributed values", list(_schemes()), ("parameters",))
    networks = Table(
        "A network that is quantized after training: accuracy and loss on digits, with symmetric and affine codes",
        list(quantized_networks()),
        ("bits",),
    )
    rows = {row["stored as"]: row for row in schemes.rows}
    trained = networks.rows[0]["symmetric"]
    even = [row for row in networks.rows if row["affine"] is not None]
    fewest = min(row["bits"] for row in even if row["symmetric"] >= trained - 0.01)
    points = {name: [(row["bits per weight"], row["mean error"])] for name, row in rows.items() if row["mean error"]}
    curves = {name: [(row["bits"], row[name]) for row in even] for name in ("symmetric", "affine")}
    return Findings(
        [schemes, networks],
        {"billions": rows["float32"]["parameters"] / 1e9, "schemes": rows, "trained": trained, "fewest": fewest},
        [
            LinePlot("Mean error of normal numbers", "bits per weight, with scales", "error", points, "y"),
            LinePlot("Accuracy on held-out digits", "bits per weight, without scales", "accuracy", curves),
        ],
    )


def _schemes() -> Iterator[Row]:
    weights = _weights(MODEL)
    count = sum(x.size for x in weights)
    x = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    for name, stored in SCHEMES.items():
        size = sum(_bytes(jax.eval_shape(stored, x)) if is_matrix(x) else 4 * x.size for x in weights)
        x_stored = stored(x)
        back = x_stored.astype(jnp.float32) if isinstance(x_stored, jax.Array) else x_stored.dequantize()
        yield {
            "stored as": name,
            "bits per weight": 8 * size / count,
            "mean error": float(jnp.mean(jnp.abs(back - x))),
            "all weights, GB": size / 1e9,
            "parameters": count,
        }


def _weights(model: str) -> list[Any]:
    """The weights of a model, as shapes."""
    cfg = load_config({"name": "x", "model": {"preset": model}, "train": {"steps": 1}}).model
    network = nnx.eval_shape(lambda: models.build(cfg, nnx.Rngs(0), Execution()))
    return jax.tree.leaves(nnx.state(network, nnx.Param))


def _bytes(stored: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))


def is_matrix(x: Any) -> bool:
    """Whether an array is quantized. The weights of norms are vectors, although a stack of them has two dimensions."""
    return x.ndim > 1 and min(x.shape[-2:]) >= BLOCK


def rounded(x: jax.Array, form: str, axis: int = -2) -> jax.Array:
    """A matrix quantized in blocks along its inputs with double quantization, and dequantized."""
    if not is_matrix(x):
        return x
    return jax.device_put(quantize(x, form, BLOCK, axis, double_quant=True).dequantize(), x.sharding)


def quantized_networks() -> Iterator[Row]:
    """The accuracy and the loss of a trained network with its matrices quantized to each number of bits."""

    def row(name: str, bits: int, metrics: Mapping[str, float], affine: Mapping[str, float]) -> Row:
        symmetric = {"symmetric": metrics["accuracy"], "loss": metrics["loss"]}
        return {
            "weights": name, "bits": bits, **symmetric,
            "affine": affine.get("accuracy"), "affine loss": affine.get("loss"),
        }  # fmt: skip

    with tempfile.TemporaryDirectory() as place:
        result = run(load_config({**TRAINED, "output": place}), jax.devices()[:1])
        with Evaluator(result.plan.program) as held_out:

            def means(form: str) -> Mapping[str, float]:
                return held_out(jax.tree.map(partial(rounded, form=form), result.state.params))

            yield row("32 bits, as trained", 32, held_out(result.state.params), {})
            for bits in BITS:
                yield row(f"{bits} bits", bits, means(f"int{bits}"), means(f"uint{bits}"))
            yield row("nf4", 4, means("nf4"), {})


if __name__ == "__main__":
    main(__file__)
