"""What the package gguf decodes from blocks that jaxmem encoded: the reference of tests/hf/test_gguf.py.

    python -m tests.hf.gguf_reference encode FILE      # here: the blocks
    python tests/hf/gguf_reference.py decode FILE      # in an environment with gguf: adds the decoded numbers

Recorded with gguf 0.19 and numpy 2.
"""

import json
import sys
from pathlib import Path

import numpy as np

KINDS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k": "Q4_K"}


def numbers() -> np.ndarray:
    """Two blocks of 256: of both signs, and with an offset."""
    x = np.random.default_rng(3).standard_normal((2, 256), dtype=np.float32)
    x[1] = np.abs(x[1]) + 1
    return x


def main(command: str, file: str) -> None:
    if command == "encode":
        from jaxmem.hf.gguf_blocks import FORMATS, encode

        record = {kind: {"bytes": encode(numbers(), FORMATS[kind]).hex()} for kind in KINDS}
    else:
        from gguf import GGMLQuantizationType, quants

        record = json.loads(Path(file).read_text())
        for kind, name in KINDS.items():
            blocks = np.frombuffer(bytes.fromhex(record[kind]["bytes"]), np.uint8).reshape(2, -1)
            record[kind]["values"] = quants.dequantize(blocks, GGMLQuantizationType[name]).ravel().tolist()
    Path(file).write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
