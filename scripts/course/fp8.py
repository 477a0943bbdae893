"""Matmuls in FP8: the errors of a result and of its gradients, and what an outlier costs in a float and in an
integer format."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.config.base import Scaling
from jaxmem.models.linear import matmul
from scripts.course import Findings, main
from scripts.course.panels import Histogram, LinePlot
from scripts.course.table import Row, Table

TOKENS, INPUTS, OUTPUTS = 512, 256, 256
OUTLIERS = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)  # times the other values
SCALINGS: dict[str, Scaling] = {"FP8, a scale per tensor": "tensor", "FP8, a scale per row": "row"}
MXFP8 = "MXFP8, a scale per 32 values"
INT8 = "int8, a scale per tensor"
RESULTS = ("result", "gradient of x", "gradient of w")
Arrays = tuple[jax.Array, jax.Array, jax.Array]


def measure() -> Findings:
    x, w, g = arrays()
    scalings: dict[str, Scaling | None] = {"bfloat16": None, **SCALINGS, MXFP8: "mxfp8"}
    rows = [{"matmuls in": name, **errors(x, w, g, scaling)} for name, scaling in scalings.items()]
    beside = {factor: {name: error_beside(factor, name) for name in (INT8, *SCALINGS)} for factor in OUTLIERS}
    curves = {name: [(factor, of_factor[name]) for factor, of_factor in beside.items()] for name in (INT8, *SCALINGS)}
    sizes = {name: _sizes(values) for name, values in (("activations", x), ("gradients", logit_gradients()))}
    edges = np.arange(-40, 1)
    counts = {name: np.histogram(logs, edges)[0] / len(logs) for name, logs in sizes.items()}
    limits = {"0 in e4m3 below": np.log2(2.0**-10 / 448), "0 in e5m2 below": np.log2(2.0**-17 / 57344)}
    tensor, row = SCALINGS
    facts = {
        "result": rows[1]["result"],
        "gradient": rows[1]["gradient of x"],
        "exact": rows[0]["result"],
        "integer": beside[1e3][INT8],
        "tensor": beside[1e3][tensor],
        "extreme": beside[1e6][tensor],
        "row": beside[1e6][row],
        "below": float(np.mean(sizes["gradients"] < limits["0 in e4m3 below"])),
        "wide": float(np.mean(sizes["gradients"] < limits["0 in e5m2 below"])),
    }
    return Findings(
        [
            Table("Relative errors against float64, values normally distributed", rows),
            Table(
                "Relative error of the other rows of x @ w beside an outlier in x",
                [{"outlier, times the others": f"{factor:g}", **of_factor} for factor, of_factor in beside.items()],
            ),
        ],
        facts,
        [
            LinePlot("An outlier in another row", "outlier, times the others", "relative error", curves, "xy"),
            Histogram("Values of a tensor", "log2 of value / largest", edges, counts, limits),
        ],
    )


def arrays() -> Arrays:
    """x, w, and the gradient of x @ w."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (TOKENS, INPUTS), (INPUTS, OUTPUTS), (TOKENS, OUTPUTS)
    x, w, g = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return x, w, g


def logit_gradients() -> jax.Array:
    """The gradients of a cross-entropy for its logits, of a model that is right most of the time."""
    logits_key, target_key = jax.random.split(jax.random.key(1))
    targets = jax.nn.one_hot(jax.random.randint(target_key, (TOKENS,), 0, OUTPUTS), OUTPUTS)
    logits = 3 * jax.random.normal(logits_key, (TOKENS, OUTPUTS)) + 12 * targets
    return jax.nn.softmax(logits) - targets


def _sizes(values: jax.Array) -> np.ndarray:
    """log2 of the absolute values, relative to the largest."""
    sizes = np.abs(np.asarray(values, np.float64)).ravel()
    return np.log2(sizes / sizes.max())


def errors(x: jax.Array, w: jax.Array, g: jax.Array, scaling: Scaling | None) -> Row:
    """The relative errors of x @ w and of both gradients. Sums are in float32, as on GPUs."""
    exact = (_wide(x) @ _wide(w), _wide(g) @ _wide(w).T, _wide(x).T @ _wide(g))
    if scaling is None:
        x, w, g = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, w, g))
    y, backward = jax.vjp(lambda x, w: matmul(x, w, scaling), x, w)
    computed = (y, *backward(g))
    return {name: relative(result, true) for name, result, true in zip(RESULTS, computed, exact, strict=True)}


def error_beside(factor: float, name: str) -> float:
    """The relative error of the rows of x @ w that have no outlier, if the largest value of the first row of x is
    `factor` times as large."""
    x, w, _ = arrays()
    largest = jnp.argmax(jnp.abs(x[0]))
    x = x.at[0, largest].multiply(factor)
    y = _integer_product(x, w) if name == INT8 else matmul(x, w, SCALINGS[name])
    return relative(y[1:], _wide(x)[1:] @ _wide(w))


def _integer_product(x: jax.Array, w: jax.Array) -> jax.Array:
    def rounded(a: jax.Array) -> jax.Array:
        scale = jnp.max(jnp.abs(a)) / 127
        return jnp.round(a / scale) * scale

    return rounded(x) @ rounded(w)


def relative(result: jax.Array, exact: np.ndarray) -> float:
    """The norm of the error, relative to that of the exact values."""
    return float(np.linalg.norm(_wide(result) - exact) / np.linalg.norm(exact))


def _wide(a: jax.Array) -> np.ndarray:
    return np.asarray(a, np.float64)


if __name__ == "__main__":
    main(__file__)
