"""Weights of Hugging Face directories are read and written as safetensors, those of llama.cpp as GGUF; nothing is
unpickled, no code is run.

model = load("llama-3.2-1b", dtype=jnp.bfloat16)     # a network, its weights sharded by a layout
save(model, "mine")                                  # a directory that transformers opens

`model.hf: DIR` in a config loads a directory for a run; `jaxmem export` saves one.
"""

from jaxmem.lazy import lazy_names

__getattr__, __all__ = lazy_names(
    __name__,
    gguf_writer="save_gguf",
    files="CHAT_TEMPLATE copy_metadata storage_dtype",
    peft="save_adapter saved_names",
    reader="load",
    writer="save",
)
