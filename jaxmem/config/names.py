"""What the layers of each family call their values, for `memory.remat: {save: [names]}`."""

_ATTENTION = (
    "attention_norm", "attention_q", "attention_k", "attention_v", "attention", "attention_out", "mlp_norm",
)  # fmt: skip
NAMES: dict[str, tuple[str, ...]] = {
    "decoder": (*_ATTENTION, "mlp_gate", "mlp_up", "mlp_hidden", "mlp_out"),
    "vit": (*_ATTENTION, "mlp_up", "mlp_hidden", "mlp_out"),
    "mlp": ("mlp_up", "mlp_hidden"),
    "convnet": (),
}

# Of these, what is there for some tokens or some heads at a time only, where layers go through a sequence in pieces.
_INPUTS = ("attention_norm", "attention_q", "attention_k", "attention_v")
IN_CHUNKS = (*_INPUTS, "mlp_norm", "mlp_gate", "mlp_up", "mlp_hidden")
IN_GROUPS = (*_INPUTS, "attention")
