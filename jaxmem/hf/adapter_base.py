"""Which base model an adapter belongs to: a fingerprint of the base's weights, stored with the adapter.

It is made of the signs of the first 2,048 numbers of every tensor: equal for float32, float16 and bfloat16 copies, and
different as soon as the weights are trained. A few rows of each tensor are read, whatever the model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from jaxmem.config.hugging_face import decoder_fields
from jaxmem.config.networks import Decoder
from jaxmem.config.peft import CONFIG, base_directory
from jaxmem.errors import UserError
from jaxmem.hf.names import ADAPTER, is_ignored
from jaxmem.hf.tensors import DTYPES, Tensors

NUMBERS = 2048  # of each tensor
KEY = "base"  # in the metadata of an adapter's safetensors


def fingerprint(directory: str | Path) -> str:
    """Of the weights of a Hugging Face directory."""
    cfg, digest = Decoder(**decoder_fields(str(directory))), hashlib.blake2b(digest_size=16)
    with Tensors(directory) as tensors:
        for name, entry in sorted(tensors.entries.items()):
            if not is_ignored(cfg, name) and entry.dtype in DTYPES and entry.shape and 0 not in entry.shape:
                sample = tensors.read(name, entry.shape, _first(entry.shape)).astype(np.float32)
                digest.update(f"{name} {entry.shape} ".encode() + np.packbits(np.signbit(sample)).tobytes())
    return digest.hexdigest()


def _first(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """As many rows of a tensor as contain `NUMBERS` numbers, or the beginning of one row."""
    rows = -(-NUMBERS // shape[-1])
    return (*(slice(0, min(rows, size)) for size in shape[:-1]), slice(0, min(NUMBERS, shape[-1])))


def check_adapter(directory: str | Path, base: str | Path) -> None:
    """Refuse an adapter of other weights than those of `base`, where that can be known: an adapter of this library
    stores the fingerprint of its base, any other names its base, which may be a directory of this machine."""
    with Tensors(directory, ADAPTER) as tensors:
        expected = tensors.metadata().get(KEY)
    name, local = base_directory(directory)
    if expected is None and local is not None and any(local.glob("*.safetensors")):
        expected = fingerprint(local)
    if expected is not None and expected != fingerprint(base):
        raise UserError(
            f"adapter.hf: {directory} was made for other weights than those of {base}; give its base model as"
            f" model.hf{f' ({CONFIG} says {name})' if name else ''}"
        )
