"""Whose weights are these? A mark of a directory's weights, by which what was learnt beside them knows them again.

It is made of the signs of the first 2,048 numbers of every tensor: the same in float32, float16 and bfloat16, and other
as soon as somebody trained them. A few rows of each tensor are read, whatever the model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from jaxmem.config import Decoder
from jaxmem.config.hugging_face import decoder_fields
from jaxmem.config.peft import CONFIG, named_base
from jaxmem.errors import UserError
from jaxmem.hf.load import is_known
from jaxmem.hf.tensors import DTYPES, Tensors

NUMBERS = 2048  # of each tensor
ADAPTER = "adapter_model.safetensors"
KEY = "base"  # in the metadata of an adapter's safetensors


def mark(directory: str | Path) -> str:
    """Of the weights of a Hugging Face directory."""
    cfg, digest = Decoder(**decoder_fields(str(directory))), hashlib.blake2b(digest_size=16)
    with Tensors(directory) as tensors:
        for name, entry in sorted(tensors.entries.items()):
            if not is_known(cfg, name) and entry.dtype in DTYPES and entry.shape and 0 not in entry.shape:
                some = tensors.read(name, _first(entry.shape)).astype(np.float32)
                digest.update(f"{name} {entry.shape} ".encode() + np.packbits(np.signbit(some)).tobytes())
    return digest.hexdigest()


def _first(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """As many rows of a tensor as have so many numbers, or the beginning of one."""
    rows = -(-NUMBERS // shape[-1])
    return (*(slice(0, min(rows, size)) for size in shape[:-1]), slice(0, min(NUMBERS, shape[-1])))


def check_adapter(directory: str | Path, base: str | Path) -> None:
    """Refuse an adapter that was made for other weights than those of `base`, where it can be known: an adapter of this
    library has their mark with it, another names its base, which may be a directory here."""
    with Tensors(directory, ADAPTER) as tensors:
        made_for = tensors.metadata().get(KEY)
    named, here = named_base(directory)
    if made_for is None and here is not None and any(here.glob("*.safetensors")):
        made_for = mark(here)
    if made_for is not None and made_for != mark(base):
        raise UserError(
            f"adapter.hf: {directory} was made for other weights than those of {base}; give the model that it belongs"
            f" to as model.hf{f' (its {CONFIG} says {named})' if named else ''}"
        )
