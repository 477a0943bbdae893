"""Quantized arrays: 2 to 8 bits per value, usable under jit, in checkpoints and on any mesh.

q = quantize(weight, "nf4", axis=-2, double_quant=True)     # 4.13 bits per value
q.nbytes, q.shape, q.dequantize(jnp.bfloat16)

The main places where a QTensor is dequantized:

    user                      function                                  when
    frozen weight (1)         models.linear.dequantizing_matmul         in the forward and again in the backward pass
    other weights (2)         sharding.gathering.gather_with_input      after the all-gather
    embedding                 models.embedding.take_rows                only the rows that are looked up
    output matrix, in slices  models.cross_entropy.SlicedLoss.fetch     one slice at a time
    frozen experts            models.mixture._linear                    one expert at a time
                              kernels.grouped_matmul.triton             tile by tile, in registers
    update of a weight        optim.apply_updates                       up to 8 M elements at a time
                              kernels.int8_add                          in the kernel
    optimizer state           optim.rules.quantized.Quantized.update    before the rule
    KV cache                  models.kv_cache.CacheSlot.attend          one layer at a time
    saved activations         stack.remat.decode                        in the backward pass

(1) In a training step: a `StoredWeight` without proxy. (2) Trained, and every weight outside of training; with
`fp8_scaling: tensor` the function is `gather_encoded`.

A frozen QTensor has no gradient. A trained one is paired with zeros that receive its gradient
(`sharding.weights.StoredWeight`); the backward pass of `gather_with_input` returns this gradient, and
`optim.apply_updates` adds the update and quantizes the result.
"""

from jaxmem.kernels.codes import dynamic_code
from jaxmem.quant.formats import FORMATS, Format
from jaxmem.quant.qtensor import QTensor, even_block_size, quantize, values_of

__all__ = ["FORMATS", "Format", "QTensor", "dynamic_code", "even_block_size", "quantize", "values_of"]
