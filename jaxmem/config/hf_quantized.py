"""The `quantization_config` of a config.json: how another tool quantized matrices, and the stored format that these
codes map onto."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from jaxmem.config.hf_families import text_settings
from jaxmem.config.hf_modules import match_names, modules_of
from jaxmem.config.hf_values import Size, UnsupportedError, read
from jaxmem.config.networks import Decoder
from jaxmem.typing import JsonDict, JsonView

MAX_COMPARISONS = 10_000_000  # limit on comparing module names with patterns of a file, which is not trusted
GPTQ_ZEROS = {"gptq": 1, "gptq_v2": 0}  # what is added to the zero points of a file, by `checkpoint_format`


@dataclass(frozen=True)
class HfScheme:
    """How a file stores its quantized matrices [out, in]."""

    method: str  # the tensors of a matrix, a key of `hf.quantized.LAYOUTS`
    bits: int
    listed: str | None = None  # the stored format with the same values; None: evenly spaced values
    block_size: int | None = None  # inputs that share a scale; None: all
    is_symmetric: bool = True  # whether the zero point is the middle of the codes
    zero_offset: int = 0  # added to the zero points of the file, as words: a zero point of 0 borrowed from the next
    scale_group: int | None = None  # block scales that share a scale (double quantization)
    is_reordered: bool = False  # whether a block may have any inputs, not only neighbours (act-order)
    skipped: tuple[str, ...] = ()  # modules that are not quantized

    @property
    def format(self) -> str:
        """The stored format that the codes map onto."""
        return self.listed or f"{'' if self.is_symmetric else 'u'}int{self.bits}"


def scheme_of(settings: JsonView) -> HfScheme | None:
    """The scheme of the model that a config.json describes; None: its weights are not quantized."""
    section = settings if settings.get("quantization_config") else text_settings(settings)
    if not section.get("quantization_config"):
        return None
    config = read(section, "quantization_config", JsonDict)
    try:
        method = read(config, "quant_method", str, "bitsandbytes" if "load_in_4bit" in config else None)
        if method not in _SCHEMES:
            expected = "bitsandbytes, gptq, awq, compressed-tensors (pack-quantized, int-quantized) or mxfp4"
            raise UnsupportedError(f"quant_method {method} is not supported; expected {expected}, or no quantization")
        return _SCHEMES[method](config)
    except UnsupportedError as error:
        raise UnsupportedError(f"quantization_config: {error}") from None


def quantization_fields(scheme: HfScheme, settings: JsonView, model: Decoder) -> JsonDict:
    """The section `quantization` of a model with these settings."""
    dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    widest = max(model.embed, model.mlp, model.heads * model.head_dim)
    return {
        "format": None if scheme.is_reordered else scheme.format,
        "block_size": scheme.block_size or widest,
        "scale_group": scheme.scale_group,
        "others": "float32" if dtype == "float32" else "bfloat16",
        "layers": _quantized_layers(scheme, model),
    }


def _quantized_layers(scheme: HfScheme, model: Decoder) -> list[str]:
    """The layers, by their names in jaxmem, that are quantized in at least one layer of the stack."""
    if scheme.method == "mxfp4":  # only experts
        return [f"blocks.mlp.{name}" for name in ("gate", "up", "down")]
    modules = [module for module in modules_of(model) if module.is_matrix and module.path != "embedding"]
    names = sorted({module.name for module in modules})
    regexes = [name.removeprefix("re:") for name in scheme.skipped if name.startswith("re:")]
    plain = [name for name in scheme.skipped if not name.startswith("re:")]
    if len(plain) * len(names) > MAX_COMPARISONS:
        raise UnsupportedError(f"quantization_config: a list of {len(plain)} modules is too long")
    skipped = set().union(*match_names(regexes, names, "quantization_config.ignore"))
    skipped |= {name for name in names if any(fnmatchcase(f".{name}.", f"*.{module}.*") for module in plain)}
    quantized = dict.fromkeys(module.path for module in modules if module.name not in skipped)
    return [path for path in quantized if path != "head" or "lm_head" not in scheme.skipped]


def _bitsandbytes(config: JsonView) -> HfScheme:
    # Without a list, bitsandbytes does not quantize the output projection.
    skipped = tuple(read(config, "llm_int8_skip_modules", list[str], ["lm_head"]))
    if read(config, "load_in_8bit", bool, False):
        return HfScheme("bitsandbytes 8", 8, skipped=skipped)
    read(config, "bnb_4bit_quant_storage", Literal["uint8"], "uint8")
    return HfScheme(
        "bitsandbytes 4",
        4,
        listed=read(config, "bnb_4bit_quant_type", Literal["nf4", "fp4"], "fp4"),
        block_size=64,
        scale_group=256 if read(config, "bnb_4bit_use_double_quant", bool, False) else None,
        skipped=skipped,
    )


def _gptq(config: JsonView) -> HfScheme:
    if config.get("dynamic"):
        raise UnsupportedError("dynamic is not supported; quantize all layers alike")
    form = read(config, "checkpoint_format", Literal["gptq", "gptq_v2"], "gptq")
    return HfScheme(
        "gptq",
        read(config, "bits", Literal[4, 8]),
        block_size=_group_size(config, "group_size"),
        is_symmetric=read(config, "sym", bool, True),
        zero_offset=GPTQ_ZEROS[form],
        is_reordered=read(config, "desc_act", bool, False),
        skipped=() if read(config, "lm_head", bool, False) else ("lm_head",),
    )


def _awq(config: JsonView) -> HfScheme:
    read(config, "version", Literal["gemm", "GEMM"], "gemm")
    read(config, "zero_point", Literal[True], True)
    return HfScheme(
        "awq",
        read({"bits": config.get("w_bit"), **config}, "bits", Literal[4]),
        block_size=_group_size(config, "q_group_size" if "q_group_size" in config else "group_size"),
        is_symmetric=False,
        skipped=("lm_head", *read(config, "modules_to_not_convert", list[str], [])),
    )


def _compressed_tensors(config: JsonView) -> HfScheme:
    groups = read(config, "config_groups", dict[str, JsonDict])
    weights = [read(group, "weights", JsonDict) for group in groups.values()]
    if not weights or any(group != weights[0] for group in weights):
        raise UnsupportedError("config_groups: groups with different weights are not supported; expected one group")
    form = next((group["format"] for group in groups.values() if group.get("format")), config.get("format"))
    form = read({"format": form}, "format", Literal["pack-quantized", "int-quantized"])
    scheme = weights[0]
    read(scheme, "type", Literal["int"], "int")
    strategy = read(scheme, "strategy", Literal["group", "channel", "tensor"], "group")
    order = read(scheme, "actorder", bool | str, False)
    return HfScheme(
        form,
        read(scheme, "num_bits", Literal[4, 8] if form == "pack-quantized" else Literal[8]),
        block_size=_group_size(scheme, "group_size") if strategy == "group" else None,
        is_symmetric=read(scheme, "symmetric", bool, True),
        is_reordered=order is True or str(order).lower() in ("group", "dynamic"),
        skipped=tuple(read(config, "ignore", list[str], [])),
    )


def _group_size(config: JsonView, key: str) -> int | None:
    return None if config.get(key) == -1 else read(config, key, Size)


_SCHEMES: dict[str, Callable[[JsonView], HfScheme]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": lambda _: HfScheme("mxfp4", 4, "mxfp4", 32),
}
