"""Hugging Face directories: their weights in, and out again. safetensors only; nothing is unpickled, no code is run.

model = load("llama-3.2-1b", dtype=jnp.bfloat16)     # a network, its weights where a layout puts them
save(model, "mine")                                  # a directory that transformers opens

`model.hf: DIR` in a config does the first for a run, `jaxmem export` the second.
"""

from jaxmem.hf.base import check_adapter, mark
from jaxmem.hf.beside import copy_beside, storage_dtype
from jaxmem.hf.load import load, read_weights
from jaxmem.hf.peft import read_adapter, save_adapter
from jaxmem.hf.save import save

__all__ = [
    "check_adapter",
    "copy_beside",
    "load",
    "mark",
    "read_adapter",
    "read_weights",
    "save",
    "save_adapter",
    "storage_dtype",
]
