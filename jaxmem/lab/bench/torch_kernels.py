"""The same operations in libraries for PyTorch. A peer returns a call for each pass of a shape, or raises ValueError if
its library is not installed or does not support the shape."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxmem.lab.bench.contest import Call

Calls = Mapping[str, Call]  # by the name of the pass


def needed(*names: str) -> list[Any]:
    """PyTorch and these modules; ValueError if one is missing or PyTorch has no GPU."""
    found = []
    for name in ("torch", *names):
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            raise ValueError(f"{name.partition('.')[0]} is not installed") from error
    if not found[0].cuda.is_available():
        raise ValueError("torch has no GPU")
    return found


def wait(_: Any) -> None:
    importlib.import_module("torch").cuda.synchronize()


def attention_by_torch(shape: Any, *, backend: str) -> Calls:
    """`scaled_dot_product_attention` with one of its fused kernels, which do not support windows."""
    torch, kinds = needed("torch.nn.attention")
    if shape.window is not None:
        raise ValueError("torch's fused kernels do not support a window")
    own, theirs = (
        (shape.batch, *size, shape.dim) for size in ((shape.heads, shape.queries), (shape.kv_heads, shape.keys))
    )
    q, k, v, d_out = _random(torch, own, theirs, theirs, own)
    for x in (q, k, v):
        x.requires_grad_()

    def forward() -> Any:
        with kinds.sdpa_kernel(getattr(kinds.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=True)

    out = forward()
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)}


def matmul_by_bitsandbytes(shape: Any, *, decoded: bool) -> Calls:
    """The matmul of QLoRA in bitsandbytes, which chooses its kernel; `decoded`: dequantized, then multiplied by
    cuBLAS."""
    torch, bitsandbytes, functional = needed("bitsandbytes", "bitsandbytes.functional")
    if shape.format not in ("nf4", "fp4"):
        raise ValueError(f"bitsandbytes multiplies nf4 and fp4 in blocks, not {shape.format}")
    sizes = (shape.tokens, shape.inputs), (shape.tokens, shape.outputs), (shape.outputs, shape.inputs)
    x, g, w = _random(torch, *sizes)
    form = {"blocksize": shape.block, "compress_statistics": shape.double, "quant_type": shape.format}
    codes, state = functional.quantize_4bit(w, **form)
    if decoded:
        decode = partial(functional.dequantize_4bit, codes, state)
        return {"forward": lambda: x @ decode().t(), "backward": lambda: g @ decode()}
    return _with_gradient(torch, lambda x: bitsandbytes.matmul_4bit(x, codes.t(), quant_state=state), x, g)


def matmul_by_torchao(shape: Any) -> Calls:
    """A linear layer after torchao's `quantize_`: int4 in groups, int8 with a scale per output."""
    torch, quantization = needed("torchao.quantization")
    if shape.format not in ("int4", "int8"):
        raise ValueError(f"torchao multiplies int4 and int8, not {shape.format}")
    layer = torch.nn.Linear(shape.inputs, shape.outputs, bias=False, device="cuda", dtype=torch.bfloat16)
    int4 = shape.format == "int4"
    form = quantization.Int4WeightOnlyConfig(group_size=shape.block) if int4 else quantization.Int8WeightOnlyConfig()
    quantization.quantize_(layer, form)
    return _with_gradient(torch, layer, *_random(torch, (shape.tokens, shape.inputs), (shape.tokens, shape.outputs)))


def adam8_by_bitsandbytes(shape: Any) -> Calls:
    """The 8-bit AdamW of bitsandbytes, in blocks of 256 consecutive numbers. It also updates the weight, 4 bytes more
    per number, which the amount of work does not count."""
    torch, functional = needed("bitsandbytes.functional")
    if shape.block != 256:
        raise ValueError(f"bitsandbytes' blocks are of 256 numbers, not {shape.block}")
    p, g = _random(torch, shape.dims, shape.dims)
    state = {f"state{i}": torch.zeros(shape.dims, dtype=torch.uint8, device="cuda") for i in (1, 2)}
    state |= {f"absmax{i}": torch.zeros(shape.numbers // 256, device="cuda") for i in (1, 2)}
    maps = {f"qmap{i}": functional.create_dynamic_map(signed=i == 1).to("cuda") for i in (1, 2)}
    rates = {"beta1": 0.9, "beta2": 0.95, "beta3": 0.0, "alpha": 0.0, "eps": 1e-8, "step": 2, "lr": 1e-3}
    return {"update": partial(functional.optimizer_update_8bit_blockwise, "adam", g, p, **state, **maps, **rates)}


PEERS: Mapping[str, Mapping[str, Callable[[Any], Calls]]] = {  # operation -> name -> calls for a shape
    "attention": {
        "torch flash": partial(attention_by_torch, backend="FLASH_ATTENTION"),
        "torch cudnn": partial(attention_by_torch, backend="CUDNN_ATTENTION"),
    },
    "dequant_matmul": {
        "bitsandbytes": partial(matmul_by_bitsandbytes, decoded=False),
        "bitsandbytes, decoded": partial(matmul_by_bitsandbytes, decoded=True),
        "torchao": matmul_by_torchao,
    },
    "adam8_update": {"bitsandbytes": adam8_by_bitsandbytes},
}


def _with_gradient(torch: Any, layer: Callable[[Any], Any], x: Any, g: Any) -> Calls:
    """A matmul, and its gradient with respect to x."""
    x.requires_grad_()
    out = layer(x)

    def forward() -> Any:
        with torch.no_grad():
            return layer(x)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, x, g, retain_graph=True)}


def _random(torch: Any, *shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
