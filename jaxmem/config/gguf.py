"""GGUF files, the format of llama.cpp, opened as Hugging Face directories; the package `gguf` reads them.

`gguf_directory` writes the settings and the tokenizer of a file as `config.json` and `tokenizer.json` into a directory
of the cache, next to a link to the file. Each command uses this directory like one of Hugging Face; `hf.gguf` decodes
the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmem.config.gguf_tokenizer import special_token_ids, tokenizer_config, tokenizer_json
from jaxmem.config.hf_families import HF_ARCHITECTURES, HfFamily
from jaxmem.config.hf_values import Size, UnsupportedError, read
from jaxmem.errors import UserError, one_line
from jaxmem.machine.files import atomic_directory
from jaxmem.typing import JsonDict, JsonView

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

FILE = "model.gguf"  # name of the link in the directory
FORMAT = "3"  # changes if the same file results in another directory
MAX_VALUES = 3_000_000  # limit of the values of a header, since the package makes an array of each
INSTALL = "pip install 'jaxmem[gguf]'"


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, and its class in transformers."""

    name: str
    names: Mapping[str, str] = field(default_factory=dict)  # further keys of the file, and those of config.json
    fixed: JsonView = field(default_factory=dict)  # values that files do not state, as llama.cpp has them
    layers_27b: int | None = None  # number of layers of the size whose query_pre_attn_scalar is another one

    @property
    def family(self) -> HfFamily:
        return HF_ARCHITECTURES[self.name]

    @property
    def keys(self) -> dict[str, str]:
        """The keys of config.json, by those of a file, after the name of the architecture."""
        keys = {**KEYS, **self.names}
        if self.family.experts is not None:
            count, width = self.family.experts
            keys |= {"expert_count": count, "expert_feed_forward_length": width}
            keys |= {"expert_used_count": "num_experts_per_tok"}
        if self.family.shared is not None:
            keys["expert_shared_feed_forward_length"] = self.family.shared
        return keys


# Keys of all architectures.
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA = {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")} | _WINDOW
_DEEPSEEK = {
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.key_length_mla": "head_dim",
    "attention.value_length_mla": "v_head_dim",
}
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", fixed={"norm_topk_prob": False}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", fixed={"norm_topk_prob": True}),
    "gemma2": Architecture("Gemma2ForCausalLM", _GEMMA, layers_27b=46),
    "gemma3": Architecture("Gemma3ForCausalLM", _GEMMA, layers_27b=62),
    "phi3": Architecture("Phi3ForCausalLM", _WINDOW),
    "gpt-oss": Architecture("GptOssForCausalLM", _WINDOW),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _DEEPSEEK),
}
_MIXTRAL = Architecture("MixtralForCausalLM")  # in files also `llama`
# Keys of a file that do not change logits. `rope.dimension_count`: see `_settings`; `vocab_size`: the shape of the
# embedding decides; `rope.scaling.*`: see `_rope_scaling`.
WITHOUT_EFFECT = {
    "vocab_size", "rope.dimension_count", "attention.value_length", "expert_gating_func", "rope.scaling.finetuned",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier", "attention.layer_norm_epsilon",
    "interleave_moe_layer_step", "expert_shared_count", "rope.freq_base_swa",
}  # fmt: skip


SOFTMAX = 1  # in `expert_gating_func`


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file. `data`: its bytes or values, memory mapped, with the rows of the tensor."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    file: Path
    metadata: JsonView
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def read_gguf(file: Path) -> GgufFile:
    """The metadata and the tensors of a file. The package `gguf` checks no size that a header states, so a value beyond
    the end of the file, and a header of too many values, is refused when it is read."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{file}: reading a GGUF file requires the package gguf: {INSTALL}") from None

    class Reader(GGUFReader):
        count = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.count += 1
            if self.count > MAX_VALUES:
                raise ValueError(f"its header has more than {MAX_VALUES:,} values")
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("a value is beyond the end of the file")
            return super()._get(offset, dtype, count, override_order)

    file = file.resolve()
    try:
        with np.errstate(over="raise"):
            reader = Reader(file)
            metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {
            tensor.name: GgufTensor(tensor.tensor_type, tuple(map(int, tensor.shape[::-1])), tensor.data)
            for tensor in reader.tensors
        }
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError, RecursionError) as error:
        use = "copy it again, or update gguf"
        raise UserError(f"{file}: damaged, truncated or not a GGUF file: {one_line(error)}; {use}") from error
    return GgufFile(file, metadata, tensors)


def gguf_directory(name: str, key: str) -> str:
    """The directory of a file in the cache. `key`: the setting that names the file."""
    from huggingface_hub import constants

    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{key}={name} does not exist; use the path of a GGUF file")
    state = file.stat()
    identity = hashlib.sha256(f"{FORMAT} {file} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()
    directory = Path(constants.HF_HOME) / "jaxmem-gguf" / f"{file.stem}-{identity[:12]}"
    if directory.is_dir():
        return str(directory)
    contents = directory_contents(file)
    try:
        with atomic_directory(directory) as folder:
            for name, content in contents.items():
                (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            (folder / FILE).symlink_to(file)
    except UserError:
        if not directory.is_dir():  # unless another process wrote the same directory meanwhile
            raise
    return str(directory)


def directory_contents(file: Path) -> dict[str, JsonDict]:
    """The JSON files of the directory of a file, by name."""
    opened = read_gguf(file)
    try:
        settings = settings_of(opened)
        return {
            "config.json": settings,
            "tokenizer.json": tokenizer_json(opened.metadata, settings["vocab_size"]),
            "tokenizer_config.json": tokenizer_config(opened.metadata),
        }
    except UnsupportedError as error:
        raise UserError(f"{file}: {error}") from None


def settings_of(opened: GgufFile) -> JsonDict:
    """The config.json of the model of a file."""
    name = opened.architecture
    metadata = opened.metadata
    tensors = opened.tensors
    if name not in ARCHITECTURES:
        expected = ", ".join(ARCHITECTURES)
        raise UnsupportedError(
            f"general.architecture={json.dumps(name)[:60]} is not supported; expected one of {expected}"
        )
    files = metadata.get("split.count", 1)
    if files != 1:
        raise UnsupportedError(f"the model is split into {files} files; join them with llama-gguf-split --merge")
    check_quantization(opened)
    prefix = f"{name}."
    values = {key.removeprefix(prefix): plain(x) for key, x in metadata.items() if key.startswith(prefix)}
    architecture = _MIXTRAL if name == "llama" and values.get("expert_count") else ARCHITECTURES[name]
    keys = architecture.keys
    unknown = [key for key, value in values.items() if value and key not in keys and key not in WITHOUT_EFFECT]
    if unknown:
        raise UnsupportedError(f"{name}.{unknown[0]}={json.dumps(values[unknown[0]])[:60]} is not supported")
    if "token_embd.weight" not in tensors:
        raise UnsupportedError("has no tensor token_embd.weight; use a file with the complete model")
    settings = {keys[key]: value for key, value in values.items() if key in keys}
    settings |= {
        "architectures": [architecture.name],
        "model_type": architecture.family.model_type,  # by which transformers opens an export
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": stored_dtype(opened),
        **architecture.fixed,
        **special_token_ids(metadata),
    }
    if settings.get("sliding_window") == 0:
        settings["sliding_window"] = None
    if name in ("llama", "qwen3", "olmo2", "gpt-oss"):
        settings["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if name == "llama" and "blk.0.ffn_down.bias" in tensors:
        settings["mlp_bias"] = True
    if architecture.family.is_latent:
        _add_latent(settings, values)
    else:
        _add_heads(settings, values, architecture)
    return settings | _rope_scaling(opened, values, settings)


def _add_heads(settings: JsonDict, values: JsonView, architecture: Architecture) -> None:
    """The dimension of heads, if a file does not state it, and what depends on it."""
    width = read(settings, "hidden_size", Size) // read(settings, "num_attention_heads", Size)
    rotated = read(values, "rope.dimension_count", Size, settings.get("head_dim", width))
    if architecture.name == "Phi3ForCausalLM":
        settings["partial_rotary_factor"] = rotated / settings.pop("head_dim", width)
        settings["head_dim"] = width
    else:
        settings.setdefault("head_dim", rotated)
        if rotated != settings["head_dim"]:
            raise UnsupportedError(f"rope.dimension_count={rotated} is not supported; expected {settings['head_dim']}")
    if architecture.layers_27b is not None:
        is_27b = settings["num_hidden_layers"] == architecture.layers_27b
        settings["query_pre_attn_scalar"] = width if is_27b else settings["head_dim"]


def _add_latent(settings: JsonDict, values: JsonView) -> None:
    """The settings of latent attention and of the router, as DeepSeek-V2 has them."""
    gating = values.get("expert_gating_func", SOFTMAX)
    if gating != SOFTMAX:
        raise UnsupportedError(f"deepseek2.expert_gating_func={gating} is not supported; expected {SOFTMAX} (softmax)")
    # Where a file has both, the lengths without `_mla` are those of llama.cpp's cache.
    key = read(values, "attention.key_length_mla", Size, values.get("attention.key_length"))
    rotated = read(values, "rope.dimension_count", Size)
    settings |= {
        "num_key_value_heads": settings["num_attention_heads"],
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,
        "v_head_dim": read(values, "attention.value_length_mla", Size, values.get("attention.value_length")),
        "topk_method": "group_limited_greedy" if values.get("expert_group_count", 1) > 1 else "greedy",
    }


def _rope_scaling(opened: GgufFile, values: JsonView, settings: JsonView) -> JsonDict:
    """`rope_scaling` of config.json, from keys or from the tensors that divide frequencies by a factor each."""
    tensors = opened.tensors
    original = values.get("rope.scaling.original_context_length")
    kind = values.get("rope.scaling.type", "none")
    factor = values.get("rope.scaling.factor", 1.0)
    if "rope_factors_long.weight" in tensors:
        scaling = {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            **{f"{kind}_factor": factors(tensors[f"rope_factors_{kind}.weight"]) for kind in ("short", "long")},
        }
        scaling |= _present(values, {"rope.scaling.attn_factor": "attention_factor"})
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    if "rope_freqs.weight" in tensors:
        return {"rope_scaling": _llama3_scaling(opened, settings, original or 8192)}
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "yarn":
        raise UnsupportedError(f"rope.scaling.type={json.dumps(kind)[:60]} is not supported; expected linear or yarn")
    betas = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    yarn |= _present(values, betas) | ({"truncate": False} if opened.architecture == "gpt-oss" else {})
    if "rope.scaling.yarn_log_multiplier" in values:
        scale = plain(10 * values["rope.scaling.yarn_log_multiplier"])
        yarn |= {"mscale": scale, "mscale_all_dim": scale}
    return {"rope_scaling": yarn}


def _llama3_scaling(opened: GgufFile, settings: JsonView, original: int) -> JsonDict:
    """The scaling of Llama 3.1, of whose parameters a file has only the factors that result from them."""
    stated = np.array(factors(opened.tensors["rope_freqs.weight"]), np.float64)
    head_dim = settings["head_dim"]
    theta = read(settings, "rope_theta", float, 10_000.0)
    factor = float(stated.max(initial=1))
    low = 1.0
    high = 4.0
    turns = original / (2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))  # in the original length
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stated.shape != expected.shape or not np.allclose(stated, expected, rtol=1e-4):
        raise UnsupportedError("rope_freqs.weight has other factors than Llama 3.1; these are not supported")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip


def factors(tensor: GgufTensor) -> list[float]:
    if len(tensor.shape) != 1 or tensor.data.dtype != np.float32:
        raise UnsupportedError("factors of rotary positions must be a vector in float32")
    return [plain(x) for x in tensor.data.tolist()]


def _present(values: JsonView, names: Mapping[str, str]) -> JsonDict:
    return {new: values[old] for old, new in names.items() if old in values}


def plain(value: Any) -> Any:
    """A value with the shortest digits that are equal in float32, the precision of the file: 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) and abs(value) < 3e38 else value


def stored_dtype(opened: GgufFile) -> str:
    """The dtype in which a model of this file is opened: for quantized matrices bfloat16."""
    kinds = {tensor.kind.name for tensor in opened.tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def check_quantization(opened: GgufFile) -> None:
    """Refuses a file with a tensor that the package does not decode."""
    from gguf import GGML_QUANT_SIZES, dequantize

    for kind in {tensor.kind for tensor in opened.tensors.values()}:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            name = next(name for name, tensor in opened.tensors.items() if tensor.kind is kind)
            raise UnsupportedError(f"the package gguf does not decode {kind.name}, used by {name[:80]!r}") from None
