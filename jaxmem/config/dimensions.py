"""The dimensions of a network's weights, by the names that the section `rules` has for them."""

from __future__ import annotations

from jaxmem.config.mesh import Rules
from jaxmem.config.networks import Decoder
from jaxmem.config.sections import Config


def divided(cfg: Config) -> dict[str, dict[str, int]]:
    """For each mesh axis that splits weights as usual, the dimensions that it must divide."""
    found = cfg.model.dims()
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
