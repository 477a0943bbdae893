"""Quantized arrays: 2 to 8 bits per value, usable under jit, in checkpoints and on any mesh.

q = quantize(weight, "nf4", axis=-2, double_quant=True)     # 4.13 bits per value
q.nbytes, q.shape, q.dequantize(jnp.bfloat16)

The main places where a QTensor is dequantized:

    user                      function                                  when
    frozen weight             models.linear.dequantizing_matmul         in the forward and again in the backward pass
    trained weight            sharding.gathering.gather_with_input      after the all-gather (FP8: `gather_encoded`)
    embedding                 models.embedding.take_rows                only the rows that are looked up
    output matrix, in slices  models.cross_entropy.SlicedLoss.fetch     one slice at a time
    frozen experts            models.mixture._linear                    one expert at a time
                              kernels.grouped_matmul.triton             tile by tile, in registers
    update of a weight        optim.apply_updates                       up to 8 M elements at a time
                              kernels.int8_add                          in the kernel
    optimizer state           optim.rules.quantized.Quantized.update    before the rule
    KV cache                  models.kv_cache.CacheSlot.attend          one layer at a time
    saved activations         stack.remat.decode                        in the backward pass

A frozen QTensor has no gradient. A trained one is paired with zeros that receive its gradient
(`sharding.weights.StoredWeight`); the backward pass of `gather_with_input` returns this gradient, and
`optim.apply_updates` adds the update and quantizes the result.
"""

from jaxmem.kernels.codes import dynamic_code
from jaxmem.quant.formats import FORMATS, Format
from jaxmem.quant.qtensor import QTensor, even_block_size, quantize, values_of

__all__ = ["FORMATS", "Format", "QTensor", "dynamic_code", "even_block_size", "quantize", "values_of"]
