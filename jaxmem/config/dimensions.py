"""The dimensions of a network's weights, by the names that the section `rules` has for them."""

from __future__ import annotations

from jaxmem.config.networks import Decoder, Mlp, Vit
from jaxmem.config.sections import Config, Rules


def dims(cfg: Config) -> dict[str, dict[str, int]]:
    """Of each dimension of weights, what is counted along it, by the keys of `model`."""
    model = cfg.model
    match model:
        case Decoder():
            sizes = {name: getattr(model, name) for name in ("embed", "vocab", "heads", "kv_heads", "mlp")}
        case Vit():
            sizes = {"embed": model.embed, "heads": model.heads, "kv_heads": model.heads, "mlp": model.mlp}
        case Mlp():
            sizes = {"embed": model.embed, "mlp": model.mlp}
        case _:  # Convnet
            stages = {f"stages[{i}]": channels for i, channels in enumerate(model.stages)}
            return {"embed": stages, "mlp": stages}
    return {name: {name: size} for name, size in sizes.items()}


def divided(cfg: Config) -> dict[str, dict[str, int]]:
    """For each mesh axis that splits weights as usual, the dimensions that it must divide."""
    found = dims(cfg)
    wide = [name for name in ("heads", "mlp") if name in found and "tensor" in getattr(cfg.rules, name)]
    split = cfg.zero > 0 and cfg.rules.embed == Rules().embed
    return {
        "fsdp": found["embed"] if split else {},
        "tensor": {key: size for name in wide for key, size in found[name].items()},
    }


def undivided(cfg: Config) -> tuple[str, ...]:
    """The dimensions that `mesh.tensor` need not divide and does not: key and value heads are then on several of its
    devices at once; a vocabulary is stored replicated and padded while it is computed with."""
    if not isinstance(cfg.model, Decoder):
        return ()
    named = (name for name in ("kv_heads", "vocab") if "tensor" in getattr(cfg.rules, name))
    return tuple(name for name in named if getattr(cfg.model, name) % cfg.mesh.tensor)
