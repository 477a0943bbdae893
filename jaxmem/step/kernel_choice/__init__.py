"""How a run gets its kernels, in the order in which to read it.

kernels/choice.py                     the first implementation that is not refused, and why; `triton_refusal`
kernels/fused_attention/support.py    what each implementation of attention does not support, and their order
choice.py                             the choice for each setting of a config: memory.attention, memory.experts,
                                      optimizer.kernel
attention.py                          the call of attention on one device; the method of mesh.context
check.py                              compares chosen kernels with plain JAX at the start of a run; the next choice
"""

from jaxmem.lazy import lazy_names

__getattr__, __all__ = lazy_names(
    __name__,
    attention="context_traffic",
    check="checked_kernels failure_of refuse_gpu_kernels",
    choice="ATTENTION EXPERTS UPDATE AttentionChoice KernelChoices attention_choice kernel_choices resolve_kernels",
)
