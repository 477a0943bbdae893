"""Errors in the config of a decoder."""

from collections.abc import Iterator

from jaxmem.config.mesh import divisors
from jaxmem.config.networks import Decoder, Rope
from jaxmem.config.sections import Config
from jaxmem.errors import UserError, as_yaml, nearest_numbers


def check_decoder(cfg: Config) -> Iterator[str]:
    if isinstance(cfg.model, Decoder):
        yield from decoder_errors(cfg.model)


def decoder_errors(model: Decoder) -> Iterator[str]:
    if model.heads % model.kv_heads:
        yield indivisible("model.heads", model.heads, "model.kv_heads", model.kv_heads)
    experts = model.experts
    if experts is not None and experts.top_k > experts.count:
        given = f"model.experts.top_k={experts.top_k} exceeds model.experts.count={experts.count}"
        yield f"{given}; use model.experts.top_k={experts.count} or less"
    for rope in model.ropes:
        yield from _rope(rope, model.head_dim if model.latent is None else model.latent.rope_dim)
    yield from _layer_types(model)
    if wrong := [*_dense_layers(model), *_deepseek(model)]:
        yield from wrong
        return
    from jaxmem.config.hugging_face import config_json

    try:
        config_json(model)
    except UserError as error:  # such a model could be trained, but not exported
        yield str(error)


def _dense_layers(model: Decoder) -> Iterator[str]:
    if (experts := model.experts) is None:
        return
    if max(experts.dense_layers, default=0) >= model.layers:
        given = f"model.experts.dense_layers contains {max(experts.dense_layers)}, but model.layers={model.layers}"
        yield f"{given}; use numbers from 0 to {model.layers - 1}"
    elif not any(model.has_experts):
        given = f"model.experts.every={experts.every} and model.experts.dense_layers={as_yaml(experts.dense_layers)}"
        yield f"{given} leave no layer with experts; use model.experts=null, or remove one of them"
    elif experts.dense_mlp is None and not all(model.has_experts):
        number = model.has_experts.index(False)
        yield f"layer {number} has no experts; set model.experts.dense_mlp to the hidden width of its MLP"
    elif experts.dense_mlp is not None and all(model.has_experts):
        given = f"model.experts.dense_mlp={experts.dense_mlp} requires layers without experts"
        yield f"{given}; set model.experts.dense_layers, or remove model.experts.dense_mlp"


def _deepseek(model: Decoder) -> Iterator[str]:
    if (latent := model.latent) is not None:
        for name in ("rope_dim", "value_dim"):
            size = getattr(latent, name)
            if size > model.head_dim - (name == "rope_dim"):
                given = f"model.latent.{name}={size} exceeds model.head_dim={model.head_dim}, the width of a key"
                yield f"{given}; use a smaller model.latent.{name}"
        if model.kv_heads != model.heads:
            given = f"model.latent computes keys of all heads, but model.kv_heads={model.kv_heads}"
            yield f"{given}; use model.kv_heads={model.heads}"
    if (experts := model.experts) is not None:
        least = -(-experts.top_k * experts.groups // experts.count)  # groups that hold top_k experts
        if experts.count % experts.groups:
            yield indivisible("model.experts.count", experts.count, "model.experts.groups", experts.groups)
        elif not least <= experts.top_groups <= experts.groups:
            given = f"model.experts.top_groups={experts.top_groups} of model.experts.groups={experts.groups} groups"
            yield f"{given}; use {least} to {experts.groups} for model.experts.top_k={experts.top_k}"


def _rope(rope: Rope, head_dim: int) -> Iterator[str]:
    size = int(head_dim * rope.share)
    if size % 2 or not size:
        if rope.share < 1:
            given = f"model.rope.share={as_yaml(rope.share)} of model.head_dim={head_dim} is {size} dimensions"
            use = f"model.rope.share={as_yaml(2 * max(size // 2, 1) / head_dim)}"
            yield f"{given}; rotary positions require an even number above 0; use {use}"
        else:
            yield f"model.head_dim={head_dim} must be even for rotary positions; use model.head_dim={head_dim + 1}"
    if rope.scaling == "longrope" and {len(rope.short_factors), len(rope.long_factors)} != {size // 2}:
        given = f"{len(rope.short_factors)} and {len(rope.long_factors)}"
        yield (
            f"model.rope.scaling=longrope requires {size // 2} values in model.rope.short_factors and "
            f"in model.rope.long_factors, not {given}; set both lists"
        )


def _layer_types(model: Decoder) -> Iterator[str]:
    types = model.layer_types
    if len(types) > model.layers:
        given = f"model.layer_types has {len(types)} values, but model.layers={model.layers}"
        yield f"{given}; use {model.layers} or fewer"
    if model.window is not None and not any(model.windows):
        given = f"model.window={model.window} requires sliding_attention in model.layer_types"
        yield f"{given}; add it, or use model.window=null"
    if model.sliding_rope is not None and not any(model.windows):
        yield "model.sliding_rope requires model.window; use e.g. model.window=1024, or remove model.sliding_rope"


def indivisible(key: str, value: int, other: str, divisor: int) -> str:
    use = nearest_numbers(divisor, divisors(value))
    return f"{key}={value} is not divisible by {other}={divisor}; use {other}={use}"
