"""The categories of the bytes of a device, and which of them an array of the state is in, by its path."""

import dataclasses
import re
from collections.abc import Mapping

from jaxmem.optim.master import MasterState
from jaxmem.quant import QTensor
from jaxmem.sharding.table import Role

# The categories into which the memory of a device is divided.
CATEGORIES = ("parameters", "quantization", "master", "optimizer", "gradients", "activations", "batch", "other")
# Kinds of activations that estimates and plans have in common.
SAVED = "saved for backward"
GATHERED, COPIES = "weights: gathered or cast", "weights: copies"

_IS_MASTER = re.compile(rf"^state\.opt_state.*\.{MasterState._fields[0]}\b")
# The arrays of a quantized weight besides its integer codes.
_SCALES = "|".join(f.name for f in dataclasses.fields(QTensor) if not f.metadata.get("static") and f.name != "codes")
_IS_SCALE = re.compile(rf"^(state\.)?params\b.*\.({_SCALES})\b")

# The categories of the state, and the sharding role of each.
ROLE_OF_CATEGORY: Mapping[str, Role] = {
    "parameters": "weights", "quantization": "weights", "master": "optimizer", "optimizer": "optimizer"
}  # fmt: skip


def category_of(path: str) -> str:
    """The category (one of CATEGORIES) that an argument of a step belongs to, from its path in jax.

    >>> [category_of(f"state.{path}") for path in ("params['w'].codes", "params['w'].scale", "opt_state.master['w']")]
    ['parameters', 'quantization', 'master']
    """
    if _IS_MASTER.search(path):
        return "master"
    if _IS_SCALE.search(path):
        return "quantization"
    if path.startswith(("state.params", "params")):
        return "parameters"
    if path.startswith("state.opt_state"):
        return "optimizer"
    return "batch" if path.startswith("batch") else "other"
