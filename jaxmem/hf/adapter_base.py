"""The base model that an adapter belongs to: a fingerprint of the weights of the base is stored with the adapter.

It is a hash of the signs of the first 2,048 numbers of every tensor: equal for float32, float16 and bfloat16 copies,
and different as soon as the weights are trained. Only a few rows of each tensor are read.
"""

import hashlib
from pathlib import Path

import numpy as np

from jaxmem.config.hugging_face import decoder_fields
from jaxmem.config.networks import Decoder
from jaxmem.config.peft import CONFIG, base_directory
from jaxmem.errors import UserError
from jaxmem.hf.names import ADAPTER, is_ignored
from jaxmem.hf.tensors import DTYPES, Tensors

NUMBERS = 2048  # numbers of each tensor in the fingerprint
KEY = "base"  # key in the metadata of the safetensors file of an adapter


def fingerprint(directory: str | Path) -> str:
    """The fingerprint of the weights of a Hugging Face directory."""
    cfg, digest = Decoder(**decoder_fields(str(directory))), hashlib.blake2b(digest_size=16)
    with Tensors(directory) as tensors:
        for name, entry in sorted(tensors.entries.items()):
            if not is_ignored(cfg, name) and entry.dtype in DTYPES and entry.shape and 0 not in entry.shape:
                sample = tensors.read(name, entry.shape, _first(entry.shape)).astype(np.float32)
                digest.update(f"{name} {entry.shape} ".encode() + np.packbits(np.signbit(sample)).tobytes())
    return digest.hexdigest()


def _first(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The first rows of a tensor, which contain `NUMBERS` numbers, or the beginning of its first row."""
    rows = -(-NUMBERS // shape[-1])
    return (*(slice(0, min(rows, size)) for size in shape[:-1]), slice(0, min(NUMBERS, shape[-1])))


def check_adapter(directory: str | Path, base: str | Path) -> None:
    """Refuses an adapter that was trained on other weights than those of `base`. An adapter of jaxmem stores the
    fingerprint of its base; other adapters store its name, and are checked if it is a directory on this machine."""
    with Tensors(directory, ADAPTER) as tensors:
        expected = tensors.metadata().get(KEY)
    name, local = base_directory(directory)
    if expected is None and local is not None and any(local.glob("*.safetensors")):
        expected = fingerprint(local)
    if expected is not None and expected != fingerprint(base):
        raise UserError(
            f"adapter.hf: {directory} was trained on other weights than those of {base}; set its base model as"
            f" model.hf{f' ({CONFIG} says {name})' if name else ''}"
        )
