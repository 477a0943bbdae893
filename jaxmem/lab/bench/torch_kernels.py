"""The same operations by libraries for PyTorch, as peers. ValueError where one is not installed or does not support a
format."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.kernels.fused_attention import shapes as attention_shapes
from jaxmem.kernels.quantized_matmul import shapes as matmul_shapes
from jaxmem.kernels.quantized_update import shapes as update_shapes
from jaxmem.lab.bench.contest import Call

Calls = Mapping[str, Call]  # by the name of the pass


def needed(*names: str) -> list[Any]:
    """PyTorch, where it sees a GPU, and these modules."""
    found = []
    for name in ("torch", *names):
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            raise ValueError(f"{name.partition('.')[0]} is not installed") from error
    if not found[0].cuda.is_available():
        raise ValueError("torch sees no GPU")
    return found


def wait(_: Any) -> None:
    importlib.import_module("torch").cuda.synchronize()


def attention_by_torch(shape: attention_shapes.Shape, *, kind: str, on: str = "cuda") -> Calls:
    """Without windows: torch's fused kernels know none."""
    torch, kinds = needed("torch.nn.attention")
    if shape.window is not None:
        raise ValueError("torch's fused kernels know no window")
    backend = {"flash": kinds.SDPBackend.FLASH_ATTENTION, "cudnn": kinds.SDPBackend.CUDNN_ATTENTION}[kind]
    own, theirs = (
        (shape.batch, *size, shape.dim) for size in ((shape.heads, shape.queries), (shape.kv_heads, shape.keys))
    )
    q, k, v, d_out = _drawn(torch, on, own, theirs, theirs, own)
    for x in (q, k, v):
        x.requires_grad_()

    def forward() -> Any:
        with kinds.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=True)

    out = forward()
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)}


def matmul_by_bitsandbytes(shape: matmul_shapes.Shape, *, on: str = "cuda") -> Calls:
    """What QLoRA runs there: its own choice of a kernel, or of decoding first."""
    torch, bitsandbytes = needed("bitsandbytes")
    x, g, codes, state = _in_four_bits(shape, on)
    return _with_gradient(torch, lambda x: bitsandbytes.matmul_4bit(x, codes.t(), quant_state=state), x, g)


def dequantized_matmul_by_bitsandbytes(shape: matmul_shapes.Shape, *, on: str = "cuda") -> Calls:
    """Dequantized, then multiplied by cuBLAS."""
    x, g, codes, state = _in_four_bits(shape, on)
    decode = needed("bitsandbytes.functional")[1].dequantize_4bit
    return {"forward": lambda: x @ decode(codes, state).t(), "backward": lambda: g @ decode(codes, state)}


def _in_four_bits(shape: matmul_shapes.Shape, on: str) -> tuple[Any, Any, Any, Any]:
    """x, the gradient of x @ w.T, and the codes and state of w [outputs, inputs]."""
    torch, functional = needed("bitsandbytes.functional")
    if shape.format not in ("nf4", "fp4"):
        raise ValueError(f"bitsandbytes multiplies nf4 and fp4 in blocks, not {shape.format}")
    x, g, w = _drawn(
        torch, on, (shape.tokens, shape.inputs), (shape.tokens, shape.outputs), (shape.outputs, shape.inputs)
    )
    form = {"blocksize": shape.block, "compress_statistics": shape.double, "quant_type": shape.format}
    return x, g, *functional.quantize_4bit(w, **form)


def matmul_by_torchao(shape: matmul_shapes.Shape, *, on: str = "cuda") -> Calls:
    """A linear layer as its `quantize_` leaves it: int4 in groups, int8 with a constant for each output."""
    torch, quantization = needed("torchao.quantization")
    if shape.format not in ("int4", "int8"):
        raise ValueError(f"torchao multiplies int4 and int8, not {shape.format}")
    layer = torch.nn.Linear(shape.inputs, shape.outputs, bias=False, device=on, dtype=torch.bfloat16)
    int4 = shape.format == "int4"
    form = quantization.Int4WeightOnlyConfig(group_size=shape.block) if int4 else quantization.Int8WeightOnlyConfig()
    quantization.quantize_(layer, form)
    x, g = _drawn(torch, on, (shape.tokens, shape.inputs), (shape.tokens, shape.outputs))
    return _with_gradient(torch, layer, x, g)


def _with_gradient(torch: Any, layer: Callable[[Any], Any], x: Any, g: Any) -> Calls:
    """A matmul, and its gradient with respect to x."""
    x.requires_grad_()
    made = layer(x)

    def forward() -> Any:
        with torch.no_grad():
            return layer(x)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(made, x, g, retain_graph=True)}


def adam8_by_bitsandbytes(shape: update_shapes.Shape, *, on: str = "cuda") -> Calls:
    """Its 8-bit AdamW, in blocks of 256 numbers as they lie, which changes the weight in the same pass: 4 bytes more a
    number than the update alone, for which both count the same."""
    torch, functional = needed("bitsandbytes.functional")
    if shape.block != 256:
        raise ValueError(f"bitsandbytes' blocks are of 256 numbers, not {shape.block}")
    p, g = _drawn(torch, on, shape.dims, shape.dims)
    state = {f"state{i}": torch.zeros(shape.dims, dtype=torch.uint8, device=on) for i in (1, 2)}
    state |= {f"absmax{i}": torch.zeros(shape.numbers // 256, device=on) for i in (1, 2)}
    maps = {f"qmap{i}": functional.create_dynamic_map(signed=i == 1).to(on) for i in (1, 2)}
    rates = {"beta1": 0.9, "beta2": 0.95, "beta3": 0.0, "alpha": 0.0, "eps": 1e-8, "step": 2, "lr": 1e-3}
    update = functional.optimizer_update_8bit_blockwise
    return {"update": lambda: update("adam", g, p, **state, **maps, **rates)}


def _drawn(torch: Any, on: str, *shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape, dtype=torch.bfloat16, device=on) for shape in shapes]
