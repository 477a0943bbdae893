"""Operations on plain arrays, useful to anyone with jax; nothing here imports jaxmem.

One folder an operation: `reference.py` is the contract, beside it stand the implementations, the arguments'
checks that they share and the real shapes they are tested and measured with.
"""

from .adam8_update import Moments8, adam8_update, int8_add
from .attention import attention
from .cross_entropy import cross_entropy
from .dequant_matmul import Constants, dequant_matmul
from .rms_norm import rms_norm

__all__ = [
    "Constants",
    "Moments8",
    "adam8_update",
    "attention",
    "cross_entropy",
    "dequant_matmul",
    "int8_add",
    "rms_norm",
]
