"""Weights of Hugging Face directories are read and written, only as safetensors; nothing is unpickled, no code is run.

model = load("llama-3.2-1b", dtype=jnp.bfloat16)     # a network, its weights sharded by a layout
save(model, "mine")                                  # a directory that transformers opens

`model.hf: DIR` in a config loads a directory for a run; `jaxmem export` saves one.
"""

from jaxmem.lazy import lazy_names

_MODULES = {
    "check_adapter": "adapter_base",
    "copy_metadata": "files",
    "fingerprint": "adapter_base",
    "load": "reader",
    "read_adapter": "peft",
    "read_weights": "reader",
    "save": "writer",
    "save_adapter": "peft",
    "saved_names": "peft",
    "storage_dtype": "files",
}
__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
