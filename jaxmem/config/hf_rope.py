"""The rotary positions of a Hugging Face `config.json` as `model.rope` and `model.sliding_rope`, and back."""

import json
from collections.abc import Mapping

from jaxmem.config.hf_families import WINDOWS, HfFamily
from jaxmem.config.hf_values import Number, Size, UnsupportedError, check_keys, read
from jaxmem.config.networks import Rope
from jaxmem.typing import JsonDict, JsonView

ORIGINAL_LENGTH = "original_max_position_embeddings"
# Scalings of rotary positions, with the fields of `model.rope` that each has besides `factor`: key and default.
_OPTIONAL = {name: (name, None) for name in ("attention_factor", "mscale", "mscale_all_dim")}
_SCORES = {"mscale_all_dim": ("mscale_all_dim", None)}  # its factor on scores of latent attention is in every scaling
ROPE: dict[str, dict[str, tuple[str, object]]] = {
    "default": {},
    "linear": {**_SCORES},
    "llama3": {"low_frequency": ("low_freq_factor", None), "high_frequency": ("high_freq_factor", None), **_SCORES},
    "yarn": {
        "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0),
        "truncate": ("truncate", True),
        **_OPTIONAL,
    },
    "longrope": {
        "short_factors": ("short_factor", None),
        "long_factors": ("long_factor", None),
        "attention_factor": ("attention_factor", None),
        **_SCORES,
    },
}
_KINDS: JsonDict = {"truncate": bool, "short_factors": list[Number], "long_factors": list[Number]}
_KINDS |= dict.fromkeys(_OPTIONAL, Number | None)  # types of values; others are numbers
FIXED_ROPE: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1.0, None),
    "mscale": (None,),
    "mscale_all_dim": (None,),
}
UNDERSTOOD_ROPE = {"rope_type", "type", "rope_theta", "factor", "attention_factor", ORIGINAL_LENGTH} | {
    key
    for fields in ROPE.values()
    for key, _ in fields.values()  # keys of other scalings are ignored, as in transformers
}


def rope_fields(settings: JsonView, family: HfFamily, windows: JsonView) -> JsonDict:
    """The fields `rope` and `sliding_rope`. `rope_parameters` has an object for each kind of layer if they differ."""
    if family.sliding_theta is None:
        return {"rope": _rope_fields(settings, family)}
    by_kind = read(settings, "rope_parameters", dict[WINDOWS, JsonDict | None], {})
    full = {**(by_kind.get("full_attention") or {}), **read(settings, "rope_scaling", JsonDict, {})}
    theta = read(settings, "rope_local_base_freq", Number, family.sliding_theta)
    sliding = {"rope_theta": theta, "rope_scaling": by_kind.get("sliding_attention"), "rope_parameters": None}
    scalings = ({"rope_scaling": full, "rope_parameters": None}, sliding)
    ropes = [_rope_fields({**settings, **scaling}, family) for scaling in scalings]
    if "layer_types" in windows:
        return dict(zip(("rope", "sliding_rope"), ropes, strict=True))
    return {"rope": ropes[windows["window"] is not None]}


def _rope_fields(settings: JsonView, family: HfFamily) -> JsonDict:
    """The fields of `model.rope`, from `rope_theta` and `rope_scaling`, or from `rope_parameters` (since transformers
    5). If a file has both, `rope_scaling` is used, as in transformers."""
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedError(f"rope_scaling={json.dumps(scaling)} must be a JSON object")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "longrope" if kind in family.longrope else kind
    if not isinstance(kind, str) or kind not in ROPE:
        raise UnsupportedError(f"rope_type={json.dumps(kind)} is not supported; expected one of {', '.join(ROPE)}")
    check_keys(scaling, UNDERSTOOD_ROPE | family.understood, family.not_understood(FIXED_ROPE), section="rope_scaling.")
    settings_of_rope = {**settings, **scaling}
    rope: JsonDict = {"theta": read(settings_of_rope, "rope_theta", Number, 10_000.0)}
    share = read(settings_of_rope, "partial_rotary_factor", Number, 1.0) if family.has_partial_rope else 1
    if share != 1:
        rope["share"] = share
    if kind == "default":
        return rope
    rope["scaling"] = kind
    rope |= {name: read(scaling, key, _KINDS.get(name, Number), default) for name, (key, default) in ROPE[kind].items()}
    if kind != "linear":
        sections = (scaling, settings)
        lengths = [section[ORIGINAL_LENGTH] for section in sections if section.get(ORIGINAL_LENGTH) is not None]
        if len(lengths) == 2 and lengths[0] != lengths[1]:
            given = f"{ORIGINAL_LENGTH} is {lengths[1]}, but in rope_scaling {lengths[0]}"
            raise UnsupportedError(f"{given}; set both to one value")
        default = lengths[0] if lengths else settings.get("max_position_embeddings")
        rope["original_length"] = read({}, ORIGINAL_LENGTH, Size, default)
    longer = None
    if kind == "longrope":
        longer = read(settings, "max_position_embeddings", Size, rope["original_length"]) / rope["original_length"]
    return {**rope, "factor": read(scaling, "factor", Number, longer)}


def scaling_json(rope: Rope) -> JsonDict | None:
    """The inverse: `rope_scaling` of a config.json."""
    if rope.scaling == "none":
        return None
    settings: JsonDict = {"rope_type": rope.scaling, "factor": rope.factor}
    settings |= {key: getattr(rope, name) for name, (key, _) in ROPE[rope.scaling].items()}
    settings = {key: list(x) if isinstance(x, tuple) else x for key, x in settings.items() if x is not None}
    if rope.scaling != "linear":
        settings[ORIGINAL_LENGTH] = rope.original_length
    return settings
