"""The implementation of each operation that has a fused form, and why: `memory.attention`, `memory.experts`,
`adapter.matmul` and `optimizer.kernel`, with `auto` resolved."""

import math
from typing import Any

from jaxmem.config import Config, Decoder
from jaxmem.config.check_sections import MATMUL_FORMATS
from jaxmem.kernels.choice import Choice, triton_refusal
from jaxmem.kernels.quantized_matmul import FORMS
from jaxmem.quant import FORMATS
from jaxmem.quant.precision import compute_dtype
from jaxmem.quant.qtensor import even_block_size
from jaxmem.sharding.weights import MIN_BLOCK
from jaxmem.step.attention_choice import attention_choice

ATTENTION, EXPERTS = "memory.attention", "memory.experts"
MATMUL, UPDATE = "adapter.matmul", "optimizer.kernel"
# Tokens of a matmul below which the fused kernel is estimated to be faster. On an H100, dequantizing first moves 4.5
# bytes per weight at 2.8 TB/s and then multiplies at 690 TFLOP/s. The fused kernel moves 0.5 bytes, multiplies at 530
# TFLOP/s, and decodes each weight once per 128 tokens in about 10 instructions; it issues 33 T instructions per second.
FEW_TOKENS = 400


def kernel_choices(cfg: Config, platform: str, capability: int | None, device: str) -> dict[str, Any]:
    """The choice for each operation that the config has, by its setting. Arguments: as for `attention_choice`."""
    found = {
        ATTENTION: attention_choice(cfg, platform, capability, device),
        EXPERTS: experts_choice(cfg, platform, capability),
        MATMUL: matmul_choice(cfg, platform, capability),
        UPDATE: update_choice(cfg, capability),
    }
    return {setting: one for setting, one in found.items() if one is not None}


def resolved(cfg: Config, platform: str, capability: int | None, device: str) -> Config:
    """The config with `auto` in these settings and in `mesh.context_method` resolved for such devices. The setting of
    an operation that the config does not have stays `auto`."""
    found = kernel_choices(cfg, platform, capability, device)
    names = {setting: one.implementation for setting, one in found.items()}
    attention = found.get(ATTENTION)
    return cfg.replace(
        memory={"attention": names.get(ATTENTION, "auto"), "experts": names.get(EXPERTS, "auto")},
        mesh={"context_method": attention.context_method if attention else "auto"},
        adapter={"matmul": names.get(MATMUL, "auto")},
        optimizer={"kernel": names.get(UPDATE, "auto")},
    )


def _tokens(cfg: Config) -> int:
    """Tokens of a micro-batch on one device."""
    mesh = cfg.mesh
    rows = cfg.batch.global_size // (cfg.batch.accumulate * max(1, mesh.row_shards))
    return max(1, rows) * (cfg.row_length if cfg.reads_text else 1) // max(1, mesh.context)


def experts_choice(cfg: Config, platform: str, capability: int | None) -> Choice | None:
    """The matmuls of experts; None: the config has no experts."""
    model, form = cfg.model, cfg.expert_precision.parameters
    if not isinstance(model, Decoder) or model.experts is None:
        return None
    compute = compute_dtype(cfg.precision, platform).name
    stays_quantized = cfg.expert_precision.is_quantized and bool(cfg.trainable_patterns)
    kind = f"{form if stays_quantized else 'dense'} {compute}"
    sizes = (_tokens(cfg) * model.experts.top_k, model.experts.count, model.embed, model.mlp)
    if cfg.memory.experts != "auto":
        return Choice(cfg.memory.experts, EXPERTS, kind, sizes)
    why = triton_refusal("experts", capability)
    if why is None and stays_quantized:
        why = _no_quantized_experts(cfg, model)
    if why is not None:
        return Choice("blockwise", why, kind, sizes)
    return Choice("triton", "all experts at once; blockwise computes one block of tokens after the other", kind, sizes)


def _no_quantized_experts(cfg: Config, model: Decoder) -> str | None:
    """The reason why the fused kernel cannot dequantize the experts; None: it can."""
    precision = cfg.expert_precision
    if (form := FORMS.get(precision.parameters)) is None:
        return f"triton does not dequantize {precision.parameters}; blockwise dequantizes one expert at a time"
    for inputs, parts in ((model.embed, 1), (model.mlp, cfg.mesh.tensor)):
        limit = precision.block_size or FORMATS[precision.parameters].block_size
        block = math.gcd(even_block_size(inputs, limit) or min(limit, inputs), inputs // parts)
        if inputs >= MIN_BLOCK and block % form.together:
            return f"triton needs blocks of a multiple of {form.together} values; {inputs} inputs have {block}"
    return None


def matmul_choice(cfg: Config, platform: str, capability: int | None) -> Choice | None:
    """The matmul with a frozen quantized weight; None: the config has none."""
    base, mesh, tokens = cfg.base_precision, cfg.mesh, _tokens(cfg)
    if cfg.adapter.kind == "none" or base.parameters not in MATMUL_FORMATS:
        return None
    kind = f"{base.parameters} {compute_dtype(cfg.precision, platform).name}"

    def chosen(name: str, why: str) -> Choice:
        return Choice(name, why, kind, (tokens,))

    if cfg.adapter.matmul != "auto":
        return chosen(cfg.adapter.matmul, MATMUL)
    count = f"{tokens:,} tokens per matmul"
    if tokens >= FEW_TOKENS:
        return chosen("dequantize", f"{count}; triton is estimated to be faster below {FEW_TOKENS}")
    why = triton_refusal(MATMUL, capability)
    if mesh.tensor != 1:
        why = "triton does not support mesh.tensor"
    elif not _has_even_blocks(cfg):
        why = "triton needs blocks of one size"
    return chosen("triton", f"{count}, estimated to be faster") if why is None else chosen("dequantize", why)


def _has_even_blocks(cfg: Config) -> bool:
    model, block = cfg.model, cfg.base_precision.block_size or FORMATS[cfg.base_precision.parameters].block_size
    if not isinstance(model, Decoder) or block % 32:
        return False
    return all(width % (8 * block) == 0 for width in (model.embed, model.mlp, model.heads * model.head_dim))


def update_choice(cfg: Config, capability: int | None) -> Choice | None:
    """The update of 8-bit Adam's state and of int8 weights; None: the config has neither."""
    has_state, has_weights = cfg.optimizer.name == "adamw8bit", cfg.precision.parameters == "int8"
    if not has_state and not has_weights:
        return None
    kind = " and ".join(["adamw8bit"] * has_state + ["int8 weights"] * has_weights)
    if cfg.optimizer.kernel != "auto":
        return Choice(cfg.optimizer.kernel, UPDATE, kind, ())
    why = triton_refusal(UPDATE, capability)
    if has_weights and not cfg.precision.stochastic_rounding:
        why = f"triton does not support precision.rounding={cfg.precision.rounding}"
    if why is not None:
        return Choice("none", why, kind, ())
    return Choice("triton", "reads and writes less than half of the bytes of plain JAX", kind, ())
