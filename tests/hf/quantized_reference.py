"""Tiny checkpoints that other tools quantized, and the values that these tools decode: the reference of tests/hf.

In an environment with torch, transformers 5, bitsandbytes, compressed-tensors and numpy:

    python -m tests.hf.quantized_reference tests/hf/data/quantized.npz

bitsandbytes and compressed-tensors quantize, pack and decode by their own functions. The GPTQ and AWQ checkpoints are
packed here by the formulas of AutoGPTQ and AutoAWQ, because their packages need a GPU to quantize. Each has logits of
transformers with the decoded weights.

Recorded with torch 2.13.0, transformers 5.23.0, bitsandbytes 0.50.2, compressed-tensors 0.20.0, on a CPU.
"""

import json
import sys
from typing import Any

import numpy as np

IDS = np.random.default_rng(3).integers(0, 16, (2, 8))
# Rows of 32 and 96 are not multiples of blocks of 64.
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float32",
}  # fmt: skip
BNB = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": None, "bnb_4bit_quant_storage": "uint8"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "weights": {"type": "int", "dynamic": False, **weights}}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": groups}


CASES: dict[str, tuple[int, dict[str, Any]]] = {  # number of layers, quantization_config
    "nf4 double": (
        2,
        {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "fp4": (1, {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}),
    "llm.int8": (1, {**BNB, "load_in_8bit": True}),
    "gptq": (1, GPTQ),
    "gptq asymmetric": (1, {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq 8 bits": (1, {**GPTQ, "bits": 8, "group_size": -1}),
    "gptq act-order": (1, {**GPTQ, "desc_act": True}),
    "awq": (1, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "packed": (
        1,
        _compressed("pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=32, actorder=None),
    ),
    "packed 8 bits": (1, _compressed("pack-quantized", num_bits=8, symmetric=True, strategy="channel")),
    "int-quantized": (1, _compressed("int-quantized", num_bits=8, symmetric=True, strategy="channel")),
}
SEEDED = {name for name in CASES if name.startswith(("gptq", "awq"))}  # made here, without recorded tensors


def config(name: str) -> dict[str, Any]:
    layers, quantization = CASES[name]
    return {**CONFIG, "num_hidden_layers": layers, "quantization_config": quantization}


def weights(name: str) -> dict[str, np.ndarray]:
    """The weights of the model before they are quantized, in float32."""
    rng = np.random.default_rng(5)
    shapes = {"model.embed_tokens": (16, 64), "lm_head": (16, 64), "model.norm": (64,)}
    for layer in range(CASES[name][0]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}input_layernorm": (64,), f"{at}post_attention_layernorm": (64,)}
        shapes |= {f"{at}self_attn.{one}_proj": (32, 64) for one in "qkv"} | {f"{at}self_attn.o_proj": (64, 32)}
        shapes |= {f"{at}mlp.{one}_proj": (96, 64) for one in ("gate", "up")} | {f"{at}mlp.down_proj": (64, 96)}
    return {
        f"{name}.weight": (rng.standard_normal(shape) * (0.2 if len(shape) > 1 else 0.1) + (len(shape) == 1)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def is_quantized(name: str) -> bool:
    return "_proj" in name


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 words along the last dimension. `order`: which of 8 codes comes at each position from the low bits."""
    count = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, count)[..., list(order or range(count))].astype(np.uint64)
    return (
        (grouped << (np.arange(count, dtype=np.uint64) * np.uint64(bits))).sum(axis=-1).astype(np.uint32).view(np.int32)
    )


def evenly(name: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a GPTQ or AWQ matrix [out, in], and its decoded values."""
    quantization = CASES[name][1]
    bits, group = quantization["bits"], quantization["group_size"] if quantization["group_size"] > 0 else w.shape[1]
    of_input = np.arange(w.shape[1]) // group
    if quantization.get("desc_act"):
        of_input = np.random.default_rng(1).permutation(of_input)
    columns = [w[:, of_input == g] for g in range(of_input.max() + 1)]
    most = 2**bits - 1
    if quantization.get("sym"):
        scales = np.stack([np.abs(x).max(axis=1) / (most / 2) for x in columns]).astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low = np.stack([np.minimum(x.min(axis=1), 0) for x in columns])
        scales = ((np.stack([x.max(axis=1) for x in columns]) - low) / most).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales), 1, most).astype(int)
    scale, zero = scales.astype(np.float32)[of_input].T, zeros[of_input].T
    codes = np.clip(np.rint(w / scale) + zero, 0, most).astype(int)
    values = ((codes - zero) * scale).astype(np.float32)
    if quantization["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": pack(codes.T, bits, order), "qzeros": pack(zeros, bits, order), "scales": scales}, values
    stored = zeros - (quantization.get("checkpoint_format") != "gptq_v2")
    tensors = {"qweight": pack(codes, bits).T.copy(), "qzeros": pack(stored, bits), "scales": scales}
    return {**tensors, "g_idx": of_input.astype(np.int32)}, values


def tensors(name: str, recorded: Any) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint."""
    found = {}
    for key, w in weights(name).items():
        if not is_quantized(key):
            found[key] = w
        elif name in SEEDED:
            module = key.removesuffix("weight")
            found |= {module + end: x for end, x in evenly(name, w)[0].items()}
    return found | {key.removeprefix(f"{name}/"): recorded[key] for key in recorded if key.startswith(f"{name}/model")}


def sample(x: np.ndarray) -> np.ndarray:
    """The rows of a matrix that are recorded."""
    return x[[0, -1]]


def encode(name: str, w: Any) -> tuple[dict[str, Any], Any]:
    """The tensors of a matrix by the package that owns the format, and its decoded values."""
    import torch

    quantization = CASES[name][1]
    if quantization["quant_method"] == "bitsandbytes":
        from bitsandbytes import functional

        if quantization.get("load_in_8bit"):
            codes, scale, _ = functional.int8_vectorwise_quant(w)
            tensors = {"weight": codes, "SCB": scale, "weight_format": torch.zeros((), dtype=torch.uint8)}
            return tensors, functional.int8_vectorwise_dequant(codes, scale)
        double = quantization["bnb_4bit_use_double_quant"]
        kind = quantization["bnb_4bit_quant_type"]
        codes, state = functional.quantize_4bit(w, quant_type=kind, compress_statistics=double, blocksize=64)
        tensors = {"weight": codes, **{f"weight.{end}": part for end, part in state.as_dict(packed=True).items()}}
        state.shape = torch.Size((1, w.numel()))  # its decoder on CPUs errs where a row is not a multiple of a block
        return tensors, functional.dequantize_4bit(codes, state).reshape(w.shape)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    (group,) = quantization["config_groups"].values()
    scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"])
    parts = w.reshape(w.shape[0], -1, group["weights"].get("group_size") or w.shape[1])
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(quantization["format"])
    tensors = compressor.compress({"weight": w, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    return tensors, compressor.decompress(dict(tensors), scheme)["weight"]


def record(file: str) -> None:
    import torch
    import transformers

    found: dict[str, np.ndarray] = {}
    for name in CASES:
        decoded = {}
        for key, w in weights(name).items():
            decoded[key] = torch.tensor(w)
            if not is_quantized(key):
                continue
            if name in SEEDED:
                values = torch.tensor(evenly(name, w)[1])
            else:
                parts, values = encode(name, torch.tensor(w))
                ends = {end: part.numpy() for end, part in parts.items() if part is not None}
                found |= {f"{name}/{key.removesuffix('weight')}{end}": part for end, part in ends.items()}
            decoded[key] = values.float()
            found[f"{name}/values/{key}"] = sample(values.float().numpy())
        settings = transformers.LlamaConfig(**{k: v for k, v in config(name).items() if k != "quantization_config"})
        model = transformers.LlamaForCausalLM(settings)
        model.load_state_dict(decoded)
        with torch.no_grad():
            found[f"{name}/logits"] = model(torch.tensor(IDS)).logits.numpy()
        print(name, json.dumps(config(name)["quantization_config"])[:80], flush=True)
    np.savez_compressed(file, **found)


if __name__ == "__main__":
    record(sys.argv[1])
