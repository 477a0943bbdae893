"""Adapters whose initial values are a part of the weight of the base model.

PiSSA (Meng et al., arXiv:2404.02948) and OLoRA (Büyükakyüz, arXiv:2406.01775) initialize an adapter with a part of the
weight: s A0 B0 is its best approximation of rank r (PiSSA), or the first r columns of its QR decomposition (OLoRA). The
base is then W - s A0 B0, which PEFT computes again when it loads such an adapter. In jaxmem the base does not change,
and the adapter has twice the rank: [A, A0] and [B, -B0], as in PEFT's conversion of these adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxmem.config.adapter import LowRank
from jaxmem.config.hf_modules import ALL_MODULES
from jaxmem.config.names import split_stack
from jaxmem.config.peft import ADAPTER
from jaxmem.hf.names import ADAPTER_PREFIX
from jaxmem.hf.tensors import Tensors

RANK_DIMS = {"lora_A": 0, "lora_B": 1}  # the dimension of a tensor that is the rank


class InitializedTensors(Tensors):
    """The tensors of a PiSSA or OLoRA adapter, with twice the rank."""

    def __init__(
        self, directory: str | Path, base: str | Path, method: str, stacks: Mapping[str, Sequence[LowRank | None]]
    ) -> None:
        super().__init__(directory, ADAPTER)
        self._base = Tensors(base)
        self._method = method
        self._scales: dict[str, float] = {}
        for path, stack in stacks.items():
            module, layers = split_stack(path)
            numbered = zip(layers or range(len(stack)), stack, strict=True)
            self._scales |= {
                ALL_MODULES[module].format(layer): low_rank.scale for layer, low_rank in numbered if low_rank
            }
        self._initial: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._by_name = dict(self.entries)
        for name, entry in self._by_name.items():
            dim = RANK_DIMS.get(name.split(".")[-2])
            self.entries[name] = replace(entry, shape=tuple(n * (1 + (i == dim)) for i, n in enumerate(entry.shape)))

    def read(self, name: str, shape: Sequence[int], index: tuple[slice, ...]) -> np.ndarray:
        module, kind, _ = name.removeprefix(ADAPTER_PREFIX).rsplit(".", 2)
        if kind not in RANK_DIMS:
            return super().read(name, shape, index)
        dim = RANK_DIMS[kind]
        rank = self._by_name[name].shape[dim]
        first = self._open[self._by_name[name].file].get_slice(name)[:]
        if module not in self._initial:
            weight = f"{module}.weight"
            full = self._base.entries[weight].shape
            w = self._base.read(weight, full, (slice(None),) * 2).astype(np.float64)
            self._initial[module] = _initial(w, rank, self._method, self._scales[module])
        both = np.concatenate([first.astype(np.float32), self._initial[module][dim]], axis=dim)
        return np.pad(both, [(0, padded - n) for padded, n in zip(shape, both.shape, strict=True)])[index]


def _initial(w: np.ndarray, rank: int, method: str, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """A0 [rank, in] and -B0 [out, rank] of a weight [out, in]."""
    if method == "olora":
        b, _ = np.linalg.qr(w[:, :rank])
        a = b.T @ w
    elif w.shape[0] < w.shape[1]:
        b = np.linalg.eigh(w @ w.T)[1][:, -rank:]
        a = b.T @ w
        b = b / scale
    else:
        a = np.linalg.eigh(w.T @ w)[1][:, -rank:].T
        b = w @ a.T / scale
    return a.astype(np.float32), -b.astype(np.float32)
