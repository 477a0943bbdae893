"""Quantized arrays: 2 to 8 bits per value, usable under jit, in checkpoints and on any mesh.

q = quantize(weight, "nf4", axis=-2, double_quant=True)     # 4.13 bits per value
q.nbytes, q.shape, q.dequantize(jnp.bfloat16)
"""

from jaxmem.kernels.codes import dynamic_code
from jaxmem.quant.formats import FORMATS, Format
from jaxmem.quant.qtensor import QTensor, even_block_size, quantize, values_of

__all__ = ["FORMATS", "Format", "QTensor", "dynamic_code", "even_block_size", "quantize", "values_of"]
