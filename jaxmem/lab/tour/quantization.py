"""Weights in a few bits: what 70 B of them come to, how far each value moves, what a trained model can do without.

A value is kept as a code of b bits times a constant that it shares with others: with all (one scale), with a channel,
with a block of 64; affine codes begin at a constant of their own; those of nf4 lie where a normal distribution has its
values (Dettmers et al., arXiv:2305.14314), and `double` keeps the constants themselves in 8 bits. Blocks of k values
cost 32 / k bits a value for their constants, 8 / k with `double`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmem.config import load_config
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop, only_here

if TYPE_CHECKING:
    import jax
    from matplotlib.figure import Figure

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


class Form(NamedTuple):
    """How values share constants; a format of None is that many bytes a value."""

    name: str
    format: str | None
    block: int | None = BLOCK
    axis: int | None = -2
    double: bool = False
    width: int = 0


FORMS = (
    Form("float32", None, width=4),
    Form("bfloat16", None, width=2),
    Form("int8", "int8"),
    Form("int6", "int6"),
    Form("int5", "int5"),
    Form("int4, one scale", "int4", axis=None),
    Form("int4, a scale a channel", "int4", block=None),
    Form("int4, blocks of 64", "int4"),
    Form("uint4, affine blocks", "uint4"),
    Form("nf4, blocks of 64", "nf4"),
    Form("nf4, double", "nf4", double=True),
    Form("int3", "int3"),
    Form("int2", "int2"),
)


def by_bits(
    target: str | None = None, model: str = MODEL, forms: Sequence[Form] = FORMS, trained: Mapping[str, Any] = TRAINED
) -> Found:
    """Bytes and errors of each form; then a small model, trained here, with its weights in fewer and fewer bits."""
    only_here("quantization", target, "counts and trains")
    rows, kept = list(_forms(model, forms)), list(_trained(trained))
    sizes: Columns = {
        "a weight as": lambda row: row["name"],
        "bits": lambda row: f"{row['bits']:.2f}",
        "mean error": lambda row: f"{row['error']:.4f}",
        "of all weights, GB": lambda row: f"{row['bytes'] / 1e9:.1f}",
    }
    digits: Columns = {"bits": lambda row: row["name"]}
    for series, right, loss in (("scale", "by scale: right", "loss"), ("affine", "affine: right", "its loss")):
        digits[right] = partial(_number, series=series, name="accuracy", form=".1%")
        digits[loss] = partial(_number, series=series, name="loss", form=".3f")
    tables = [
        Shown(f"{rows[0]['parameters'] / 1e9:.1f} B weights of {model}; errors of normal numbers", rows, sizes),
        Shown("A network that reads digits, every matrix in so many bits after training", kept, digits),
    ]
    return Found(tables, _note(rows, kept), partial(_draw, rows=rows, kept=kept))


def _number(row: Row, series: str, name: str, form: str) -> str:
    return format(row[series][name], form) if row[series] else ""


def _forms(model: str, forms: Sequence[Form]) -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    weights = _weights(model)
    count = sum(x.size for x in weights)
    x = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    for form in forms:
        if form.format is None:
            back = x.astype(jnp.bfloat16 if form.width == 2 else jnp.float32).astype(jnp.float32)
        else:
            back = _quantized(form, x).dequantize()
        held = sum(_bytes(form, x) for x in weights)
        yield {
            "name": form.name,
            "parameters": count,
            "bytes": held,
            "bits": 8 * held / count,
            "error": float(jnp.mean(jnp.abs(back - x))),
        }


def _weights(model: str) -> list[Any]:
    """Abstract: nothing of them is made."""
    import jax
    from flax import nnx

    from jaxmem import models

    cfg = load_config({"name": "x", "model": {"preset": model}, "train": {"steps": 1}}).model
    network = nnx.eval_shape(lambda: models.build(cfg, nnx.Rngs(0), models.Execution()))
    return jax.tree.leaves(nnx.state(network, nnx.Param))


def _bytes(form: Form, x: Any) -> int:
    """Of one weight; vectors stay as they are."""
    import jax

    if not is_matrix(x):
        return 4 * x.size
    return form.width * x.size if form.format is None else jax.eval_shape(partial(_quantized, form), x).nbytes


def _quantized(form: Form, x: Any) -> Any:
    from jaxmem.quant import quantize

    return quantize(x, form.format, form.block, form.axis, double_quant=form.double)


def is_matrix(x: Any) -> bool:
    """Norms of a stack of layers are one vector a layer."""
    return x.ndim > 1 and min(x.shape[-2:]) >= BLOCK


def rounded(x: jax.Array, form: str, axis: int = -2) -> jax.Array:
    """A matrix as its codes say, in blocks along its inputs, their constants in 8 bits."""
    import jax

    from jaxmem.quant import quantize

    if not is_matrix(x):
        return x
    return jax.device_put(quantize(x, form, BLOCK, axis, double_quant=True).dequantize(), x.sharding)


def _trained(given: Mapping[str, Any]) -> Iterator[Row]:
    import jax

    from jaxmem.inference.evaluate import HeldOut
    from jaxmem.training.run import run

    with tempfile.TemporaryDirectory() as place:
        result = run(load_config({**given, "output": place}), jax.devices()[:1])
        with HeldOut(result.plan.program) as held_out:

            def of(form: str) -> Row:
                return held_out(jax.tree.map(partial(rounded, form=form), result.state.params))

            yield {"name": "32, as trained", "bits": 32, "scale": held_out(result.state.params), "affine": None}
            for bits in BITS:
                yield {"name": str(bits), "bits": bits, "scale": of(f"int{bits}"), "affine": of(f"uint{bits}")}
            yield {"name": "4, nf4", "bits": 4, "scale": of("nf4"), "affine": None}


def _note(rows: Sequence[Row], kept: Sequence[Row]) -> str:
    by_name = {row["name"]: row for row in rows}
    whole, blocks, normal, double = (
        by_name[name] for name in ("int4, one scale", "int4, blocks of 64", "nf4, blocks of 64", "nf4, double")
    )
    trained = kept[0]["scale"]["accuracy"]
    enough = [row for row in kept[1:] if row["scale"]["accuracy"] >= trained - 0.01]
    least, last = min(enough, key=lambda row: row["bits"]), next(row for row in kept if row["bits"] == BITS[-1])
    return (
        f"In 4 bits and nothing else {rows[0]['parameters'] / 1e9:.1f} B weights are"
        f" {rows[0]['parameters'] / 2e9:.1f} GB; nf4 with its constants in 8 bits is {double['bytes'] / 1e9:.1f}."
        f" Constants for blocks in place of one for all take the error of int4 from {whole['error']:.3f} to"
        f" {blocks['error']:.3f}, and codes where normal numbers are to {normal['error']:.3f}; constants in 8 bits save"
        f" {normal['bits'] - double['bits']:.2f} bits for {double['error'] - normal['error']:+.4f}. A bit less doubles"
        f" the error. The network is right {trained:.1%} of the time as it was trained and within a point of that down"
        f" to {least['name']} bits; in {BITS[-1]} it is at {last['scale']['accuracy']:.1%} by scale, which has three"
        f" values, and at {last['affine']['accuracy']:.1%} affine, which has four."
    )


def _draw(drawn: Figure, rows: Sequence[Row], kept: Sequence[Row]) -> None:
    error, right = drawn.subplots(1, 2, width_ratios=(1.3, 1))
    four = [row for row in rows if row["name"].startswith(("int4", "uint4", "nf4"))]
    for row in rows:
        if row["error"]:
            label = row["name"] if row in four else None
            error.plot(row["bits"], row["error"], "o", label=label, c=None if label else "gray")
            if not label:
                beside = {"ha": "right", "xytext": (-7, -4)} if row["bits"] > 10 else {"xytext": (7, -4)}
                error.annotate(row["name"], (row["bits"], row["error"]), textcoords="offset points", **beside)
    error.set(yscale="log", xlabel="bits a weight, constants included", title="mean error of normal numbers")
    error.legend(fontsize=8)
    even = [row for row in kept if row["affine"]]
    for series in ("scale", "affine"):
        right.plot([row["bits"] for row in even], [100 * row[series]["accuracy"] for row in even], "o-", label=series)
    right.axhline(100 * kept[0]["scale"]["accuracy"], ls=":", c="gray", label="as trained")
    right.set(xlabel="bits a weight, without constants", title="% of held-out digits read rightly")
    right.legend()


STOP = Stop(
    "quantization",
    "70 B weights in 35 GB: bits, errors, and what a trained network can do without",
    by_bits,
    uses="devices",
    config=["precision.parameters=nf4", "precision.block_size=64", "adapter.double_quant=true"],
    read=["jaxmem/quant/qtensor.py", "jaxmem/quant/formats.py", "jaxmem/quant/packing.py"],
)
