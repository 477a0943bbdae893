"""The implementation of attention that a config runs on a GPU, and why: `memory.attention: auto`, resolved."""

from jaxmem.config import Config, Decoder, Vit
from jaxmem.errors import UserError
from jaxmem.kernels.choice import Choice
from jaxmem.kernels.fused_attention.support import PLAIN, Request, choose, refusal
from jaxmem.quant.precision import compute_dtype


def attention_choice(cfg: Config, platform: str, capability: int | None, device: str) -> Choice | None:
    """For devices of a compute capability (90 for 9.0; None: a CPU) and this name; None: the model has no attention.
    UserError where the implementation that the config names does not support it."""
    call = attention_request(cfg, platform)
    if call is None:
        return None
    named = cfg.memory.attention
    if named != "auto":
        if capability is not None and (why := refusal(named, call, capability)):
            raise UserError(f"memory.attention={named}: {why}; use auto")
        return Choice(named, "memory.attention", call.kind, call.sizes)
    if cfg.mesh.context > 1:
        window = isinstance(cfg.model, Decoder) and cfg.model.window
        why = f"mesh.context={cfg.mesh.context}: {'keys from the neighbours' if window else 'ring attention'}"
        return Choice(PLAIN, why, call.kind, call.sizes)
    return choose(call, capability, device)


def resolved(cfg: Config, platform: str, capability: int | None, device: str) -> Config:
    """The config with what `memory.attention: auto` means there."""
    chosen = attention_choice(cfg, platform, capability, device)
    if chosen is None:
        return cfg
    return cfg.model_copy(update={"memory": cfg.memory.model_copy(update={"attention": chosen.implementation})})


def attention_request(cfg: Config, platform: str) -> Request | None:
    """One device's attention of one micro-batch; None: the model has none."""
    model, mesh = cfg.model, cfg.mesh
    if not isinstance(model, Decoder | Vit):
        return None
    if isinstance(model, Decoder):
        length, dim, window = cfg.row_length, model.head_dim, model.window
    else:
        length, dim, window = (model.image_size // model.patch) ** 2, model.embed // model.heads, None
    is_text = isinstance(model, Decoder)
    rows = max(1, cfg.batch.global_size // (cfg.batch.accumulate * max(1, mesh.row_shards)))
    heads = model.heads // mesh.tensor if model.heads % max(1, mesh.tensor) == 0 else model.heads
    return Request(
        dtype=compute_dtype(cfg.precision, platform).name,
        queries=length,
        keys=length,
        heads=heads,
        dim=dim,
        batch=rows,
        masked=is_text,
        window=window is not None,
        deterministic=cfg.train.deterministic,
        has_segments=is_text and cfg.data.packing,
        max_segments=cfg.data.max_segments,
    )
