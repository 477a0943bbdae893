"""The names of the modules of a decoder in a Hugging Face model, for every family, and their selection by regexes."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxmem.config.hf_values import UnsupportedError
from jaxmem.config.networks import Decoder

MODULES = {
    "embedding": "model.embed_tokens",
    "blocks.attention_norm": "model.layers.{}.input_layernorm",
    "blocks.attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.attention.q": "model.layers.{}.self_attn.q_proj",
    "blocks.attention.k": "model.layers.{}.self_attn.k_proj",
    "blocks.attention.v": "model.layers.{}.self_attn.v_proj",
    "blocks.attention.o": "model.layers.{}.self_attn.o_proj",
    "blocks.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "blocks.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "blocks.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    "blocks.mlp.gate": "model.layers.{}.mlp.gate_proj",
    "blocks.mlp.up": "model.layers.{}.mlp.up_proj",
    "blocks.mlp.down": "model.layers.{}.mlp.down_proj",
    "blocks.mlp.router": "model.layers.{}.mlp.gate",
    "blocks.mlp.shared.gate": "model.layers.{}.mlp.shared_expert.gate_proj",
    "blocks.mlp.shared.up": "model.layers.{}.mlp.shared_expert.up_proj",
    "blocks.mlp.shared.down": "model.layers.{}.mlp.shared_expert.down_proj",
    "blocks.mlp.shared_gate": "model.layers.{}.mlp.shared_expert_gate",
    "norm": "model.norm",
    "head": "lm_head",
}
WITH_POST_NORMS = {**MODULES, "blocks.mlp_norm": "model.layers.{}.pre_feedforward_layernorm"}
# Each expert has a tensor of its own in files, with its number after that of the layer.
EXPERTS = {
    **MODULES,
    "blocks.mlp.gate": "model.layers.{}.mlp.experts.{}.gate_proj",
    "blocks.mlp.up": "model.layers.{}.mlp.experts.{}.up_proj",
    "blocks.mlp.down": "model.layers.{}.mlp.experts.{}.down_proj",
}
MIXTRAL = {
    **MODULES,
    "blocks.mlp.router": "model.layers.{}.block_sparse_moe.gate",
    "blocks.mlp.gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "blocks.mlp.up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "blocks.mlp.down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
}
# DeepSeek-V2: latent attention, and a shared expert without a gate.
LATENT = {
    "blocks.attention.q": "model.layers.{}.self_attn.q_proj",
    "blocks.attention.q_a": "model.layers.{}.self_attn.q_a_proj",
    "blocks.attention.q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "blocks.attention.q_b": "model.layers.{}.self_attn.q_b_proj",
    "blocks.attention.kv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "blocks.attention.kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "blocks.attention.kv_b": "model.layers.{}.self_attn.kv_b_proj",
    "blocks.mlp.shared.gate": "model.layers.{}.mlp.shared_experts.gate_proj",
    "blocks.mlp.shared.up": "model.layers.{}.mlp.shared_experts.up_proj",
    "blocks.mlp.shared.down": "model.layers.{}.mlp.shared_experts.down_proj",
}
ALL_MODULES = {**LATENT, **MODULES}  # modules of any family
# In gpt-oss the weights of all experts of a layer are one tensor [expert, in, out]; its name and that of sinks have no
# ".weight".
GPT_OSS = {
    **MODULES,
    "blocks.attention.sinks": "model.layers.{}.self_attn.sinks",
    "blocks.mlp.router": "model.layers.{}.mlp.router",
    **{
        f"blocks.mlp.{name}.{kind}": f"model.layers.{{}}.mlp.experts.{name}_proj{end}"
        for name in ("gate", "up", "down")
        for kind, end in (("weight", ""), ("bias", "_bias"))
    },
}


class Fused(NamedTuple):
    """The parts of a tensor, one after the other or interleaved along a dimension."""

    parts: tuple[str, ...]
    dim: int = 0
    is_interleaved: bool = False


# The ends of the names of such tensors: in Phi-3 they have the rows of several matrices, in gpt-oss the outputs of gate
# and up alternate.
CONCATENATED = {
    "self_attn.qkv_proj.weight": Fused(tuple(f"self_attn.{name}_proj.weight" for name in "qkv")),
    "mlp.gate_up_proj.weight": Fused(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
}
INTERLEAVED = {
    f"mlp.experts.gate_up_proj{end}": Fused((f"mlp.experts.gate_proj{end}", f"mlp.experts.up_proj{end}"), dim, True)
    for end, dim in (("", 2), ("_bias", 1), ("_blocks", 1), ("_scales", 1))
}
BIASES = {"attention_bias": ("q", "k", "v"), "output_bias": ("o",), "mlp_bias": ("gate", "up", "down")}
EXPERT = ".experts."  # in the names of the modules and tensors of experts
REGEX_SECONDS = 5  # limit of matching a regex from a file in a process of its own
MATCH = """import json, re, sys
patterns, names = json.load(sys.stdin)
print(json.dumps([[bool(re.fullmatch(p, n)) for n in names] for p in patterns]))"""


class HfModule(NamedTuple):
    """A module of one layer."""

    path: str  # its name in a network of jaxmem: blocks.attention.q
    name: str  # its name in a Hugging Face model
    layer: int | None
    has_bias: bool

    @property
    def is_expert(self) -> bool:
        return EXPERT in self.name

    @property
    def is_matrix(self) -> bool:
        return not self.path.endswith("norm")


def names_of(model: Decoder, *, has_experts: bool) -> dict[str, str]:
    """The names of the modules in layers with or without experts, with {} for the layer, and for the expert."""
    return names_with(
        experts=has_experts and model.experts is not None,
        shared=model.experts is not None and model.experts.shared is not None,
        sinks=model.attention_sinks,
        latent=model.latent is not None,
        qk_norm=bool(model.qk_norm),
        post_norms=model.norms != "pre",
    )


def names_with(
    *, experts: bool, shared: bool, sinks: bool, latent: bool, qk_norm: bool, post_norms: bool
) -> dict[str, str]:
    """The names of the modules of layers that have these parts, which identify the family."""
    if sinks:
        names = GPT_OSS
    elif experts:
        names = EXPERTS if qk_norm or shared or latent else MIXTRAL
    else:
        names = WITH_POST_NORMS if post_norms else MODULES
    return names | LATENT if latent else names


def modules_of(model: Decoder) -> list[HfModule]:
    """All modules with weights. A module of experts is listed once for all experts of a layer."""
    biased = {name for field, names in BIASES.items() if getattr(model, field) for name in names}
    absent = {"head"} if model.tie_embeddings else set()
    absent |= set() if model.qk_norm else {"q_norm", "k_norm"}
    absent |= {"attention_post_norm", "mlp_post_norm"} if model.norms == "pre" else set()
    absent |= {"attention_norm", "mlp_norm"} if model.norms == "post" else set()
    absent |= {"router", "shared_gate"}  # PEFT adapts no routers
    if model.latent is not None:
        absent |= {"k", "v", *({"q_a", "q_a_norm", "q_b"} if model.latent.q_rank is None else {"q"})}
    if model.attention_sinks:  # the experts of gpt-oss are not linear layers in any version of transformers
        absent |= {"gate", "up", "down"}
    has_shared = model.experts is not None and model.experts.shared is not None
    kinds = [(names_of(model, has_experts=routed), has_shared and routed) for routed in model.has_experts]
    modules = []
    for path, name in ALL_MODULES.items():
        parent, _, last = path.rpartition(".")
        if "{}" not in name and last not in absent:
            modules.append(HfModule(path, name, None, last in biased))
        for layer, (names, is_shared) in enumerate(kinds if "{}" in name else ()):
            if path in names and last not in absent and (is_shared or parent != "blocks.mlp.shared"):
                modules.append(HfModule(path, names[path].format(layer, 0), layer, last in biased))
    return modules


def select_names(selection: str | Sequence[str], all_names: Sequence[str], key: str) -> set[str]:
    """The names that a regex matches, or that are equal to a name of a list or end with `.` and such a name."""
    if isinstance(selection, str):
        return match_names([selection], all_names, key)[0]
    return {name for name in all_names if name in selection or name.endswith(tuple(f".{last}" for last in selection))}


def match_names(patterns: Sequence[str], all_names: Sequence[str], key: str, form: str = "{}") -> list[set[str]]:
    """The names that each regex, inserted into `form`, matches. A regex from a file could backtrack forever, so all but
    plain names are matched in a process with a time limit."""
    regexes = [form.replace("{}", pattern) for pattern in patterns]
    if all(re.fullmatch(r"[\w.]+", pattern) for pattern in patterns):
        return [{name for name in all_names if regex.fullmatch(name)} for regex in map(re.compile, regexes)]
    given = json.dumps([regexes, all_names])
    command = [sys.executable, "-I", "-S", "-c", MATCH]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=REGEX_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"{key}: matching takes longer than {REGEX_SECONDS} s; use a simpler regex") from None
    if done.returncode:
        raise UnsupportedError(f"{key}: invalid regex: {done.stderr.strip().splitlines()[-1]}")
    return [{name for name, hit in zip(all_names, hits, strict=True) if hit} for hits in json.loads(done.stdout)]
