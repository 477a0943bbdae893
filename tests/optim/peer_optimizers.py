"""What other libraries' optimizers make of the same weights and gradients: the reference of tests/optim/test_peers.py.

In an environment with torch, bitsandbytes, torchao, galore-torch and apollo-torch:

    python -m tests.optim.peer_optimizers tests/optim/data/peers.npz

Recorded with torch 2.13.0, bitsandbytes 0.50.2, torchao 0.18.0, galore-torch 1.0, apollo-torch 1.0.3, on a CPU.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 6
WIDE = (2, 2048)  # blocks of 256 are the same in every order of counting
MATRIX = (24, 40)
SQUARE = (24, 24)  # where these libraries choose a side by which dimension of torch's [out, in] is which
RANK = 4
RATE = 1e-2
ADAM = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def weights(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def gradients(shape: tuple[int, int]) -> list[np.ndarray]:
    """Of values that differ by decades, as real ones do."""
    draw = np.random.default_rng(1)
    return [
        (draw.standard_normal(shape) * np.exp(2 * draw.standard_normal(shape)) * 1e-2).astype(np.float32)
        for _ in range(STEPS)
    ]


def trained(shape: tuple[int, int], make: Callable[[Any], Any]) -> np.ndarray:
    """Weights after all updates."""
    import torch

    w = torch.nn.Parameter(torch.from_numpy(weights(shape)))
    optimizer = make(w)
    for g in gradients(shape):
        w.grad = torch.from_numpy(g.copy())
        optimizer.step()
    return w.detach().numpy()


def without_transformers() -> None:
    """galore-torch and apollo-torch ask transformers for nothing but whether torch is new enough."""
    for name in ("transformers", "transformers.utils", "transformers.utils.versions"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["transformers.utils.versions"].require_version = lambda _: None  # type: ignore[attr-defined]


def main(path: str) -> None:
    without_transformers()
    import apollo_torch
    import bitsandbytes
    import galore_torch
    import torch
    import torchao.optim

    drawn = {}

    def apollo(w: Any, **own: Any) -> Any:
        group = {"params": [w], "proj": "random", "update_proj_gap": 100, "proj_type": "std", **own}
        made = apollo_torch.APOLLOAdamW([group], **ADAM)
        drawn[own["rank"]] = made.state[w]
        return made

    galore = {"rank": RANK, "update_proj_gap": 100, "scale": 0.25, "proj_type": "std"}
    found = {
        "bitsandbytes_adamw8bit": trained(WIDE, lambda w: bitsandbytes.optim.AdamW8bit([w], **ADAM)),
        "bitsandbytes_lion8bit": trained(
            WIDE, lambda w: bitsandbytes.optim.Lion8bit([w], lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
        ),
        "torchao_adamw8bit": trained(WIDE, lambda w: torchao.optim.AdamW8bit([w], block_size=256, **ADAM)),
        "torchao_adamw4bit": trained(WIDE, lambda w: torchao.optim.AdamW4bit([w], block_size=128, **ADAM)),
        "torch_adamw": trained(WIDE, lambda w: torch.optim.AdamW([w], **ADAM)),
        "torch_muon": trained(
            MATRIX, lambda w: torch.optim.Muon([w], lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        ),
        "galore": trained(MATRIX, lambda w: galore_torch.GaLoreAdamW([{"params": [w], **galore}], **ADAM)),
        "galore_square": trained(SQUARE, lambda w: galore_torch.GaLoreAdamW([{"params": [w], **galore}], **ADAM)),
        "apollo": trained(MATRIX, lambda w: apollo(w, rank=RANK, scale=1.0, scale_type="channel")),
        "apollo_mini": trained(MATRIX, lambda w: apollo(w, rank=1, scale=128.0, scale_type="tensor")),
    }
    for rank, state in drawn.items():
        found[f"apollo_projection_{rank}"] = state["projector"].ortho_matrix.numpy()
    np.savez_compressed(path, **found)
    for name, value in found.items():
        print(f"{name:24} {value.shape} {float(np.abs(value).mean()):.6f}")


if __name__ == "__main__":
    main(sys.argv[1])
