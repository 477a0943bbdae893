"""A decoder as a GGUF file, the format of llama.cpp, written by the package `gguf`: settings, tokenizer, and weights in
one of `GGUF_TYPES`.

Matrices are quantized where their last dimension is a multiple of the block, otherwise they are float16. Norms and
biases are float32. The file is written tensor by tensor, with one in host memory at a time.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxmem.config import Decoder
from jaxmem.config.base import Section
from jaxmem.config.gguf import INSTALL
from jaxmem.config.gguf_tokenizer import (
    BYTE,
    CONTROL,
    ENDS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER,
    has_space_prefix,
    pre_tokenizer_name,
)
from jaxmem.config.networks import Rope
from jaxmem.data.chat_template import template_for
from jaxmem.data.tokenizer import FileTokenizer, Tokenizer, tokenizer_for
from jaxmem.errors import UserError, as_yaml, nearest
from jaxmem.hf.files import byte_tokenizer
from jaxmem.hf.gguf import PERMUTED, tensor_names
from jaxmem.hf.tensors import OutputTensor, refuse_infinite
from jaxmem.hf.writer import model_tensors
from jaxmem.machine.files import atomic_file
from jaxmem.models.decoder import Decoder as Network
from jaxmem.models.rope import frequencies
from jaxmem.typing import JsonDict

# Formats that the package writes, and the names of their types of tensors.
GGUF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
GGUF_TYPES |= {name: name.upper() for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")}
BLOCK = 32  # values of a block in the formats of fewer than 16 bits
K_QUANT = ("_k", "_k_s", "_k_m", "_k_l")
UNSUPPORTED = (
    "activation", "norms", "norm_offset", "query_pre_attn_scalar", "attention_soft_cap", "logit_soft_cap",
    "scale_embeddings", "attention_sinks", "layer_types", "sliding_rope", "latent", "experts",
)  # fmt: skip


def save_gguf(
    model: Network,
    file: str | Path,
    *,
    tokenizer: str | None,
    kind: str = "float16",
    length: int = 2048,
    indices: Sequence[int] | None = None,
    chat_template: str | None = None,
    ends: Iterable[int] = (),
) -> None:
    """Writes a model as a GGUF file, adapters merged.

    Args:
        model: The network with its weights.
        file: It must not exist.
        tokenizer: The value of `data.tokenizer`.
        kind: One of GGUF_TYPES.
        length: The context length.
        indices: The position of each layer in a stack, by default in order.
        chat_template: The value of `data.chat_template`; None: the template of the tokenizer, if it has one.
        ends: Tokens that end an answer, in addition to those of the tokenizer.
    """
    file = Path(file).expanduser()
    if kind.lower().endswith(K_QUANT):
        raise UserError(
            f"--dtype {kind}: GGUF export does not write K-quants; export with --dtype float16, and run "
            f"llama-quantize {file} NEW.gguf {kind.upper()} of llama.cpp"
        )
    if kind not in GGUF_TYPES:
        raise UserError(f"--dtype {kind} is not a GGUF format{nearest(kind, GGUF_TYPES)}")
    if file.exists():
        raise UserError(f"{file} exists already; remove it, or use another name")
    if tokenizer is None:
        raise UserError(
            "GGUF export requires data.tokenizer; set data.tokenizer to the directory of the model's tokenizer"
        )
    try:
        import gguf
    except ImportError:
        raise UserError(f"{file}: writing a GGUF file requires the package gguf: {INSTALL}") from None
    cfg = model.cfg
    architecture = _architecture(cfg)
    file_type = "ALL_F32" if kind == "float32" else f"MOSTLY_{GGUF_TYPES[kind]}"
    opened_tokenizer = tokenizer_for(tokenizer, cfg.vocab)
    settings = {
        "general.name": file.stem,
        "general.file_type": int(gguf.LlamaFileType[file_type]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        **{f"{architecture}.{key}": value for key, value in _settings(cfg, architecture, length).items()},
        **_vocabulary(opened_tokenizer, tokenizer, cfg.vocab),
        **_ends(opened_tokenizer, ends),
        **_template(opened_tokenizer, chat_template),
    }
    tensors = list(_tensors(model, architecture, indices))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as unfinished:
            _write(unfinished, architecture, settings, tensors, kind)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error


def _unsupported(setting: str) -> UserError:
    return UserError(f"GGUF export does not support {setting}; export to a directory instead")


def _architecture(cfg: Decoder) -> str:
    for name in UNSUPPORTED:
        value = getattr(cfg, name)
        if value != Decoder.model_fields[name].default:
            raise _unsupported(f"model.{name}" if isinstance(value, Section) else f"model.{name}={as_yaml(value)}")
    if cfg.qk_norm == "all_heads":
        raise _unsupported("model.qk_norm=all_heads")
    has_other_biases = cfg.output_bias or cfg.mlp_bias
    if cfg.qk_norm and (cfg.attention_bias or has_other_biases):
        raise _unsupported("model.qk_norm with biases")
    if cfg.qk_norm:
        return "qwen3"
    return "qwen2" if cfg.attention_bias and not has_other_biases else "llama"


def _settings(cfg: Decoder, architecture: str, length: int) -> JsonDict:
    if cfg.rope.scaling == "llama3" and architecture != "llama":
        raise UserError(
            f"GGUF export to {architecture} does not support model.rope.scaling=llama3; export to a directory instead"
        )
    return {
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


def _rope_scaling(rope: Rope) -> JsonDict:
    if rope.share < 1 or rope.scaling == "longrope" or not rope.truncate:
        given = f"share={rope.share:g} with scaling={rope.scaling} and truncate={as_yaml(rope.truncate)}"
        raise _unsupported(f"model.rope.{given}")
    if rope.scaling == "none":
        return {}
    if rope.scaling == "llama3":  # its factors are a tensor
        return {"rope.scaling.original_context_length": rope.original_length}
    settings: JsonDict = {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling == "yarn":
        if rope.attention_factor is not None:
            raise _unsupported(f"model.rope.attention_factor={rope.attention_factor:g}")
        if rope.mscale is not None and rope.mscale_all_dim is not None:  # llama.cpp's factor is 1 + 0.1 ln(factor)
            given = f"mscale={rope.mscale:g} with mscale_all_dim={rope.mscale_all_dim:g}"
            raise _unsupported(f"model.rope.{given}")
        settings |= {
            "rope.scaling.original_context_length": rope.original_length,
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return settings


def _vocabulary(tokenizer: Tokenizer, name: str, size: int) -> JsonDict:
    """The tokenizer of a model with `size` embeddings; tokens beyond those of the tokenizer are unused."""
    content = json.loads(tokenizer.content) if isinstance(tokenizer, FileTokenizer) else byte_tokenizer()
    model = content["model"]
    if model.get("type") != "BPE":
        raise _unsupported(f"the {model.get('type')} tokenizer data.tokenizer={name}, only BPE")
    is_sentencepiece = bool(model.get("byte_fallback"))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [UNUSED] * size
    for text, number in model["vocab"].items():
        is_byte = is_sentencepiece and len(text) == 6 and text.startswith("<0x")
        tokens[number] = text
        types[number] = BYTE if is_byte else NORMAL
    for added in content.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER
    unknown = model.get("unk_token")
    if unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    metadata: JsonDict = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if is_sentencepiece:  # a merge has the score of the token that it results in
        ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed(list(enumerate(merges, 1)))}
        scores = [ranks.get(token, 0.0) for token in tokens]
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        metadata["tokenizer.ggml.add_space_prefix"] = has_space_prefix(content)
    else:
        # Without merges each byte is a token, wherever a text is split.
        pre = pre_tokenizer_name(content.get("pre_tokenizer")) if merges else "gpt-2"
        if pre is None:
            raise _unsupported(f"the pre-tokenizer of data.tokenizer={name}")
        metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    metadata["tokenizer.ggml.add_bos_token"] = bool(tokenizer.begin)
    if tokenizer.begin:
        metadata["tokenizer.ggml.bos_token_id"] = tokenizer.begin[0]
    return metadata


def _ends(tokenizer: Tokenizer, ends: Iterable[int]) -> JsonDict:
    """The tokens that end a text, of which the format has three. `ends`: those that must be among them."""
    others = dict.fromkeys([*ends, *sorted(tokenizer.ends, reverse=True)])
    numbers = [tokenizer.end, *(number for number in others if number != tokenizer.end)]
    return {f"tokenizer.ggml.{name}_token_id": number for name, number in zip(ENDS, numbers, strict=False)}


def _template(tokenizer: Tokenizer, file: str | None) -> dict[str, str]:
    try:
        return {"tokenizer.chat_template": template_for(tokenizer, file).source}
    except UserError:
        if file:
            raise
        return {}  # not every model has a chat template


def _tensors(model: Network, architecture: str, indices: Sequence[int] | None) -> Iterator[OutputTensor]:
    """The tensors of a model under the names of llama.cpp."""
    cfg = model.cfg
    names = tensor_names(architecture, cfg.layers)
    heads = {"q_proj": cfg.heads, "k_proj": cfg.kv_heads} if architecture == PERMUTED else {}
    for tensor in model_tensors(model, "float32", indices):
        module, _, leaf = tensor.name.rpartition(".")
        last = module.rpartition(".")[2]
        values = partial(_interleaved, tensor.values, heads[last]) if last in heads else tensor.values
        yield replace(tensor, name=f"{names.get_name(module)}.{leaf}", values=values)
    if cfg.rope.scaling == "llama3":
        scaled, _ = frequencies(cfg.rope, cfg.head_dim)
        plain, _ = frequencies(Rope(theta=cfg.rope.theta), cfg.head_dim)
        factors = (plain / scaled).astype(np.float32)
        yield OutputTensor("rope_freqs.weight", factors.dtype, factors.shape, lambda: factors)


def _interleaved(values: Callable[[], np.ndarray], heads: int) -> np.ndarray:
    x = values()
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _stored_kind(tensor: OutputTensor, kind: str) -> str:
    """The format of a tensor, if that of matrices is `kind`."""
    if len(tensor.shape) == 1:
        return "float32"
    return "float16" if kind.startswith("q") and tensor.shape[-1] % BLOCK else kind


def _write(file: Path, architecture: str, settings: JsonDict, tensors: Sequence[OutputTensor], kind: str) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, quantize

    writer = GGUFWriter(file, architecture)
    for key, value in settings.items():
        value_type = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        if value != []:  # the format has no empty lists
            writer.add_key_value(key, value, value_type)
    stored_types = [GGMLQuantizationType[GGUF_TYPES[_stored_kind(tensor, kind)]] for tensor in tensors]
    for tensor, stored_type in zip(tensors, stored_types, strict=True):
        block, nbytes = GGML_QUANT_SIZES[stored_type]
        size = math.prod(tensor.shape) // block * nbytes
        writer.add_tensor_info(tensor.name, tensor.shape, tensor.dtype, size, stored_type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, stored_type in zip(tensors, stored_types, strict=True):
            with np.errstate(over="ignore"):
                stored = quantize(tensor.values(), stored_type)
            writer.write_tensor_data(refuse_infinite(tensor.name, stored) if stored.dtype == np.float16 else stored)
    finally:
        writer.close()
