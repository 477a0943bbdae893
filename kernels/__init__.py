"""Operations on plain arrays, useful to anyone with jax; nothing here imports jaxmem.

One folder an operation: `reference.py` is the contract, beside it stand the implementations, the arguments'
checks that they share and the real shapes they are tested and measured with.
"""

from .attention import attention

__all__ = ["attention"]
