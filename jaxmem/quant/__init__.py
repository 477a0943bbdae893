"""Quantized arrays: 2 to 8 bits per value, usable under jit, in checkpoints and on any mesh.

q = quantize(weight, "nf4", axis=-2, double_quant=True)     # 4.13 bits per value
q.nbytes, q.shape, q.dequantize(jnp.bfloat16)

A matmul with a frozen QTensor (`models.linear`) dequantizes it in the forward pass and again in the backward pass, for
the gradient of its input; it has no gradient itself. One that is trained is paired with zeros that receive its gradient
(`sharding.weights.StoredWeight`); `_gathered` of `sharding.gathering` dequantizes it and returns their gradient, and
`optim.apply_updates` adds the update and quantizes the result.
"""

from jaxmem.kernels.codes import dynamic_code
from jaxmem.quant.formats import FORMATS, Format
from jaxmem.quant.qtensor import QTensor, even_block_size, quantize, values_of

__all__ = ["FORMATS", "Format", "QTensor", "dynamic_code", "even_block_size", "quantize", "values_of"]
