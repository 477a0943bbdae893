"""Record what bitsandbytes makes of fixed arrays, for tests/quant to compare with bit by bit.

Needs an environment of its own: pip install torch==2.13.0 bitsandbytes==0.50.2 numpy
    python -m tests.quant.bitsandbytes_reference tests/quant/data/bitsandbytes.npz
"""

import sys

import bitsandbytes
import numpy as np
import torch
from bitsandbytes import functional

SHAPE = (8, 512)  # [out, in] as torch has weights: blocks lie along `in`


def inputs() -> np.ndarray:
    """Normal values of several scales, a block of equal ones, one that dwarfs its block."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    x *= np.float32(10.0) ** np.arange(-3, 5, dtype=np.float32)[:, None]
    x[2, 64:128], x[3, 5] = 0.125, 1e4
    return x


def main(path: str) -> None:
    x = inputs()
    found = {
        "x": x,
        "signed_code": functional.create_dynamic_map(signed=True),
        "unsigned_code": functional.create_dynamic_map(signed=False),
    }
    for name in ("nf4", "fp4"):
        codes, state = functional.quantize_4bit(torch.tensor(x), blocksize=64, quant_type=name)
        found |= {
            f"{name}_codes": codes,
            f"{name}_scale": state.absmax,
            f"{name}_values": functional.dequantize_4bit(codes, state),
        }
        codes, state = functional.quantize_4bit(
            torch.tensor(x), blocksize=64, quant_type=name, compress_statistics=True
        )
        found[f"{name}_double_values"] = functional.dequantize_4bit(codes, state)
    for name, given in (("signed", x), ("unsigned", np.abs(x))):
        # As float64, for which it takes its plain path: its fast one on CPUs does not always find the nearest code.
        found[f"{name}_code"] = functional.create_dynamic_map(signed=name == "signed")
        quantize = torch.ops.bitsandbytes.quantize_blockwise.default
        codes, scale = quantize(torch.tensor(given).double(), found[f"{name}_code"], 256)
        found |= {f"{name}_codes": codes, f"{name}_scale": scale}
    versions = {"torch": torch.__version__, "bitsandbytes": bitsandbytes.__version__}
    np.savez_compressed(path, versions=str(versions), **{name: np.asarray(value) for name, value in found.items()})
    print(path, versions)


if __name__ == "__main__":
    main(sys.argv[1])
