"""A decoder as a GGUF file, the format of llama.cpp: settings, tokenizer, and weights in one of `FORMATS`.

Matrices are quantized where their last dimension is a multiple of the block; otherwise q4_k becomes q8_0, and q8_0
float16. Norms and biases are float32. The file is written tensor by tensor, with one in host memory at a time.
"""

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config import Decoder
from jaxmem.config.hf_values import read_json
from jaxmem.config.networks import Rope
from jaxmem.data.chat_template import template_for
from jaxmem.data.tokenizer import Tokenizer, tokenizer_for
from jaxmem.errors import UserError, as_yaml, nearest
from jaxmem.hf.files import byte_tokenizer
from jaxmem.hf.gguf_blocks import FORMATS, Format, encode
from jaxmem.hf.writer import model_tensors
from jaxmem.models import Decoder as Network
from jaxmem.models.rope import frequencies

ALIGNMENT = 32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The pre-tokenizers that split text before byte-level BPE: a part of the regular expression that only this one has, and
# its name in llama.cpp.
SPLITS = {r"\p{N}{1,3}": "llama-bpe", r"\p{L}+|\p{N}|": "qwen2"}
UNSUPPORTED = (
    "activation", "norms", "norm_offset", "query_pre_attn_scalar", "attention_soft_cap", "logit_soft_cap",
    "scale_embeddings", "attention_sinks", "layer_types", "sliding_rope",
)  # fmt: skip
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # types of tokens
FALLBACKS = {"q4_k": "q8_0", "q4_0": "float16", "q8_0": "float16"}


def save_gguf(
    model: Network,
    file: str | Path,
    *,
    tokenizer: str | None,
    kind: str = "float16",
    length: int = 2048,
    indices: Sequence[int] | None = None,
) -> None:
    """Writes a model, adapters merged, to a file that must not exist. `tokenizer`: the value of `data.tokenizer`.
    `kind`: one of FORMATS. `length`: the context length. `indices`: the position of each layer in a stack."""
    file = Path(file).expanduser()
    if kind not in FORMATS:
        raise UserError(f"--dtype {kind} is not a GGUF format{nearest(kind, FORMATS)}")
    if file.exists():
        raise UserError(f"{file} exists already; remove it, or use another name")
    if tokenizer is None:
        raise UserError(
            "GGUF export requires data.tokenizer; set data.tokenizer to the directory of the model's tokenizer"
        )
    cfg = model.cfg
    settings = {
        **_settings(cfg, file.stem, kind, length),
        **_vocabulary(tokenizer_for(tokenizer), tokenizer, cfg.vocab),
    }
    tensors = list(_tensors(model, kind, indices))
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as out:
            _write(out, settings, tensors)
            os.fsync(out.fileno())
        unfinished.rename(file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _architecture(cfg: Decoder) -> str:
    for name in UNSUPPORTED:
        if (value := getattr(cfg, name)) != Decoder.model_fields[name].default:
            raise UserError(
                f"GGUF export does not support model.{name}={as_yaml(value)}; export to a directory instead"
            )
    if cfg.experts is not None:
        raise UserError("GGUF export does not support model.experts; export to a directory instead")
    if cfg.qk_norm == "all_heads":
        raise UserError("GGUF export does not support model.qk_norm=all_heads; export to a directory instead")
    if cfg.qk_norm and not (cfg.attention_bias or cfg.output_bias or cfg.mlp_bias):
        return "qwen3"
    if cfg.qk_norm:
        raise UserError("GGUF export does not support model.qk_norm with biases; export to a directory instead")
    return "qwen2" if cfg.attention_bias and not (cfg.output_bias or cfg.mlp_bias) else "llama"


def _settings(cfg: Decoder, name: str, kind: str, length: int) -> dict[str, Any]:
    own = {
        "context_length": min(length, cfg.window or length),  # llama.cpp has no windows in these architectures
        "embedding_length": cfg.embed,
        "block_count": cfg.layers,
        "feed_forward_length": cfg.mlp,
        "vocab_size": cfg.vocab,
        "attention.head_count": cfg.heads,
        "attention.head_count_kv": cfg.kv_heads,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "attention.layer_norm_rms_epsilon": float(cfg.norm_epsilon),
        "rope.dimension_count": cfg.head_dim,
        "rope.freq_base": float(cfg.rope.theta),
        **_rope_scaling(cfg.rope),
    }
    architecture = _architecture(cfg)
    if cfg.rope.scaling == "llama3" and architecture != "llama":
        raise UserError(
            f"GGUF export to {architecture} does not support model.rope.scaling=llama3; export to a directory instead"
        )
    return {
        "general.architecture": architecture,
        "general.name": name,
        "general.file_type": FORMATS[kind].file_type,
        "general.quantization_version": 2,
        "general.alignment": ALIGNMENT,
        **{f"{architecture}.{key}": value for key, value in own.items()},
    }


def _rope_scaling(rope: Rope) -> dict[str, Any]:
    if rope.share < 1 or rope.scaling == "longrope" or not rope.truncate:
        given = f"share={rope.share:g} with scaling={rope.scaling} and truncate={as_yaml(rope.truncate)}"
        raise UserError(f"GGUF export does not support model.rope.{given}; export to a directory instead")
    if rope.scaling in ("none", "llama3"):  # llama3: the file has a tensor of factors instead
        return {}
    settings: dict[str, Any] = {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling == "yarn":
        if rope.attention_factor is not None:
            raise UserError("GGUF export supports only model.rope.attention_factor=null; export to a directory instead")
        settings |= {
            "rope.scaling.original_context_length": rope.original_length,
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return settings


def _vocabulary(tokenizer: Tokenizer, name: str, size: int) -> dict[str, Any]:
    """The tokenizer of a model with `size` embeddings; tokens beyond those of the tokenizer are unused."""
    place = tokenizer.directory
    file = None if place is None else Path(name).expanduser()
    content = byte_tokenizer() if file is None else read_json(file / "tokenizer.json" if file.is_dir() else file)
    model = content["model"]
    if tokenizer.vocab_size > size:
        raise UserError(
            f"data.tokenizer={name} has {tokenizer.vocab_size} tokens, more than model.vocab={size}; "
            "use the model's tokenizer"
        )
    if model.get("type") != "BPE":
        raise UserError(
            f"data.tokenizer={name}: GGUF export supports BPE tokenizers, not {model.get('type')}; "
            "export to a directory instead"
        )
    is_sentencepiece = bool(model.get("byte_fallback"))
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", ())]
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for text, number in model["vocab"].items():
        is_byte = is_sentencepiece and len(text) == 6 and text.startswith("<0x")
        tokens[number], types[number] = text, BYTE if is_byte else NORMAL
    for one in content.get("added_tokens", ()):
        tokens[one["id"]], types[one["id"]] = one["content"], CONTROL if one["special"] else USER
    if (unknown := model.get("unk_token")) in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types, np.int32)}
    if is_sentencepiece:  # a merge has the score of the token that it results in
        ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed(list(enumerate(merges, 1)))}
        scores = np.array([ranks.get(token, 0.0) for token in tokens], np.float32)
        begins_with_space = any(mark in json.dumps(content) for mark in ('"Prepend"', '"first"', '"always"'))
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        found["tokenizer.ggml.add_space_prefix"] = begins_with_space
    else:
        pre = _split(json.dumps(content.get("pre_tokenizer"), ensure_ascii=False), name)
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    found |= {"tokenizer.ggml.eos_token_id": tokenizer.end, "tokenizer.ggml.add_bos_token": bool(tokenizer.begin)}
    if tokenizer.begin:
        found["tokenizer.ggml.bos_token_id"] = tokenizer.begin[0]
    with contextlib.suppress(UserError):  # not every model has a chat template
        found["tokenizer.chat_template"] = template_for(tokenizer).source
    return found


def _split(pre_tokenizer: str, name: str) -> str:
    """llama.cpp's name for a pre-tokenizer."""
    for part, known in SPLITS.items():
        if json.dumps(part)[1:-1] in pre_tokenizer:
            return known
    if '"Split"' in pre_tokenizer:
        raise UserError(
            f"data.tokenizer={name}: GGUF export supports the pre-tokenizers of Llama 3, Qwen and GPT-2 only; "
            "export to a directory instead"
        )
    return "gpt-2"


Tensor = tuple[str, tuple[int, ...], Format, Callable[[], np.ndarray]]


def _tensors(model: Network, kind: str, indices: Sequence[int] | None) -> Iterator[Tensor]:
    cfg = model.cfg
    # In the architecture llama, the two elements of a rotated pair of queries and keys are next to each other.
    heads = {"attn_q": cfg.heads, "attn_k": cfg.kv_heads} if _architecture(cfg) == "llama" else {}
    for one in model_tensors(model, "float32", indices):
        module, _, leaf = one.name.rpartition(".")
        layer = ""
        if module.startswith("model.layers."):
            number, _, module = module.removeprefix("model.layers.").partition(".")
            layer = f"blk.{number}."
        name = NAMES[module]
        values = partial(_interleaved, one.values, heads[name]) if name in heads else one.values
        chosen = kind if len(one.shape) > 1 else "float32"
        while one.shape[-1] % FORMATS[chosen].block:
            chosen = FALLBACKS[chosen]
        yield f"{layer}{name}.{leaf}", one.shape, FORMATS[chosen], values
    if cfg.rope.scaling == "llama3":
        scaled, _ = frequencies(cfg.rope, cfg.head_dim)
        plain, _ = frequencies(Rope(theta=cfg.rope.theta), cfg.head_dim)
        factors = (plain / scaled).astype(np.float32)
        yield "rope_freqs.weight", factors.shape, FORMATS["float32"], lambda: factors


def _interleaved(values: Callable[[], np.ndarray], heads: int) -> np.ndarray:
    x = values()
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _write(out: Any, settings: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    header += b"".join(_text(key) + _value(value) for key, value in settings.items())
    at = 0
    for name, shape, kind, _ in tensors:
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind.type_number, at)
        at += _padded(int(np.prod(shape)) // kind.block * kind.nbytes)
    out.write(header.ljust(_padded(len(header)), b"\0"))
    for *_, kind, values in tensors:
        data = encode(values(), kind)
        out.write(data.ljust(_padded(len(data)), b"\0"))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """The bytes of a setting: the number of its type, then its value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case np.ndarray():
            kind = 6 if value.dtype == np.float32 else 5
            return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
