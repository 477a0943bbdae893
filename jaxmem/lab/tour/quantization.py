"""Quantized weights: the bytes of 70 B of them, the error of each value, and what a trained model loses.

A value is stored as a code of b bits and shares a scale with others: all of them, those of a channel, or a block of 64;
affine codes also have a zero point; nf4 has its levels at the quantiles of a normal distribution (Dettmers et al.,
arXiv:2305.14314), and double quantization stores the scales in 8 bits. Blocks of k values cost 32 / k bits per value
for their scales, 8 / k with double quantization.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import models
from jaxmem.config import load_config
from jaxmem.inference.evaluate import Evaluator
from jaxmem.lab.tour.panels import Lines
from jaxmem.lab.tour.stop import Findings, refuse_target
from jaxmem.lab.tour.table import Row, Table
from jaxmem.quant import quantize
from jaxmem.training.run import run

MODEL = "llama3-70b"
BLOCK = 64
SIZE = 1024  # of the square of normal numbers
TRAINED: dict[str, Any] = {
    "name": "quantization",
    "objective": "classify",
    "model": {"family": "mlp", "layers": 2, "embed": 64, "mlp": 128},
    "data": {"source": "digits", "held_out": 0.2},
    "batch": {"global_size": 64},
    "optimizer": {"learning_rate": 5e-3, "warmup": 20},
    "train": {"steps": 200, "evaluate_every": 200, "log_every": 200},
}
BITS = (8, 6, 5, 4, 3, 2)


class Scheme(NamedTuple):
    """A format and how values share scales; without a format, `width` bytes per value."""

    name: str
    format: str | None
    block: int | None = BLOCK
    axis: int | None = -2
    double: bool = False
    width: int = 0


SCHEMES = (
    Scheme("float32", None, width=4),
    Scheme("bfloat16", None, width=2),
    Scheme("int8", "int8"),
    Scheme("int6", "int6"),
    Scheme("int5", "int5"),
    Scheme("int4, one scale", "int4", axis=None),
    Scheme("int4, a scale per channel", "int4", block=None),
    Scheme("int4, blocks of 64", "int4"),
    Scheme("uint4, affine blocks", "uint4"),
    Scheme("nf4, blocks of 64", "nf4"),
    Scheme("nf4, double quantization", "nf4", double=True),
    Scheme("int3", "int3"),
    Scheme("int2", "int2"),
)


def measure(
    target: str | None = None,
    model: str = MODEL,
    schemes: Sequence[Scheme] = SCHEMES,
    trained: Mapping[str, Any] = TRAINED,
) -> Findings:
    """Bytes and errors of each scheme; then a small model, trained here, with its weights in fewer and fewer bits."""
    refuse_target("quantization", target)
    rows, networks = list(_schemes(model, schemes)), list(quantized_networks(trained))
    error = {row["stored as"]: row["mean error"] for row in rows}
    size = {row["stored as"]: row["all weights"] for row in rows}
    count, accuracy = rows[0]["parameters"], networks[0]["symmetric"]
    even = [row for row in networks if row["affine"] is not None]
    fewest = min(row["bits"] for row in even if row["symmetric"] >= accuracy - 0.01)
    formats = {"bits": ".2f", "mean error": ".4f", "all weights": "GB", "parameters": None}
    percent = {"symmetric": ".1%", "loss": ".3f", "affine": ".1%", "affine loss": ".3f", "bits": None}
    points = {row["stored as"]: [(row["bits"], row["mean error"])] for row in rows if row["mean error"]}
    curves = {name: [(row["bits"], 100 * row[name]) for row in even] for name in ("symmetric", "affine")}
    return Findings(
        [
            Table(f"{count / 1e9:.1f} B weights of {model}; errors of normal numbers", rows, formats),
            Table("Accuracy on digits of a network that is quantized after training", networks, percent),
        ],
        f"In 4 bits alone {count / 1e9:.1f} B weights are {count / 2e9:.1f} GB; nf4 with double quantization is"
        f" {size['nf4, double quantization'] / 1e9:.1f} GB. A scale per block takes the error of int4 from"
        f" {error['int4, one scale']:.3f} to {error['int4, blocks of 64']:.3f}, and the levels of nf4 to"
        f" {error['nf4, blocks of 64']:.3f}; each bit less doubles it. The network has an accuracy of {accuracy:.1%}"
        f" and stays within a point of that down to {fewest} bits; in {BITS[-1]} bits it has"
        f" {even[-1]['symmetric']:.1%} with symmetric codes (three values), {even[-1]['affine']:.1%} with affine ones"
        " (four).",
        [
            Lines("Mean error of normal numbers", "bits per weight, with scales", "error", points, "y"),
            Lines("Accuracy on held-out digits", "bits per weight, without scales", "%", curves),
        ],
    )


def _schemes(model: str, schemes: Sequence[Scheme]) -> Iterator[Row]:
    weights = _weights(model)
    count = sum(x.size for x in weights)
    x = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    for scheme in schemes:
        if scheme.format is None:
            back = x.astype(jnp.bfloat16 if scheme.width == 2 else jnp.float32).astype(jnp.float32)
        else:
            back = _quantized(scheme, x).dequantize()
        stored = sum(_bytes(scheme, x) for x in weights)
        error = float(jnp.mean(jnp.abs(back - x)))
        own = {"bits": 8 * stored / count, "mean error": error, "all weights": stored, "parameters": count}
        yield {"stored as": scheme.name, **own}


def _weights(model: str) -> list[Any]:
    """Abstract arrays."""
    cfg = load_config({"name": "x", "model": {"preset": model}, "train": {"steps": 1}}).model
    network = nnx.eval_shape(lambda: models.build(cfg, nnx.Rngs(0), models.Execution()))
    return jax.tree.leaves(nnx.state(network, nnx.Param))


def _bytes(scheme: Scheme, x: Any) -> int:
    """Of one weight; vectors stay in float32."""
    if not is_matrix(x):
        return 4 * x.size
    return scheme.width * x.size if scheme.format is None else jax.eval_shape(partial(_quantized, scheme), x).nbytes


def _quantized(scheme: Scheme, x: Any) -> Any:
    return quantize(x, scheme.format, scheme.block, scheme.axis, double_quant=scheme.double)


def is_matrix(x: Any) -> bool:
    """The norms of a stack of layers are one vector per layer."""
    return x.ndim > 1 and min(x.shape[-2:]) >= BLOCK


def rounded(x: jax.Array, form: str, axis: int = -2) -> jax.Array:
    """A matrix quantized in blocks along its inputs with double quantization, and dequantized."""
    if not is_matrix(x):
        return x
    return jax.device_put(quantize(x, form, BLOCK, axis, double_quant=True).dequantize(), x.sharding)


def quantized_networks(config: Mapping[str, Any]) -> Iterator[Row]:
    """A trained network's accuracy and loss, with its matrices in each number of bits."""

    def row(name: str, bits: int, symmetric: Mapping[str, float], affine: Mapping[str, float]) -> Row:
        own = {"symmetric": symmetric["accuracy"], "loss": symmetric["loss"]}
        return {
            "weights": name,
            "bits": bits,
            **own,
            "affine": affine.get("accuracy"),
            "affine loss": affine.get("loss"),
        }

    with tempfile.TemporaryDirectory() as place:
        result = run(load_config({**config, "output": place}), jax.devices()[:1])
        with Evaluator(result.plan.program) as held_out:

            def means(form: str) -> Mapping[str, float]:
                return held_out(jax.tree.map(partial(rounded, form=form), result.state.params))

            yield row("32 bits, as trained", 32, held_out(result.state.params), {})
            for bits in BITS:
                yield row(f"{bits} bits", bits, means(f"int{bits}"), means(f"uint{bits}"))
            yield row("nf4", 4, means("nf4"), {})
