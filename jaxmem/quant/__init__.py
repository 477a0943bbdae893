"""Arrays in a few bits a value: quantize, compute with them, keep them on disk and on any mesh.

q = quantize(weight, "nf4", axis=-2, double=True)     # 4.13 bits a value
q.nbytes, q.shape, q.dequantize(jnp.bfloat16)
"""

from jaxmem.kernels.codes import dynamic_code
from jaxmem.quant.formats import FORMATS, Format
from jaxmem.quant.qtensor import QTensor, even_block, quantize

__all__ = ["FORMATS", "Format", "QTensor", "dynamic_code", "even_block", "quantize"]
