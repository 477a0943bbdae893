"""The FLOPs that a training step needs."""

from jaxmem.step import Program


def ideal_flops(built: Program) -> float:
    """FLOPs of an update without recomputation: per token, 2 FLOPs per matmul weight in the forward pass and 4 in the
    backward pass, plus the two matmuls of causal attention, half of which is masked. For images this is a lower bound:
    a convolution uses its weights once per pixel, which is not counted."""
    cfg = built.cfg
    model = built.cfg.model
    parameters = built.model.active_count
    if model.family != "decoder":
        return 6.0 * parameters * cfg.batch.global_size
    length = cfg.row_length
    looked_up = 0 if model.tie_embeddings else model.vocab * model.embed
    seen = [min(window or length, length) for window in model.windows]
    pairs = sum(n * length - n * (n - 1) / 2 for n in seen)  # (query, key) that are not masked, in all layers
    attention = 4 * model.heads * model.head_dim * pairs
    frozen = parameters - built.model.active_trainable_count if cfg.trainable_patterns else 0  # they have no gradient
    if looked_up and built.model.select(built.model.shapes)["embedding"]["weight"] is None:
        frozen -= looked_up  # not in the forward pass either
    forward = 2.0 * (parameters - looked_up) * length + attention
    return cfg.batch.global_size * (3.0 * forward - 2.0 * frozen * length)
