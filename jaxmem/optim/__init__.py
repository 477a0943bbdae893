"""Optimizers: plain optax transformations that work in any training loop, and the chain that a config names.

AdamW in float32 stores two moments per parameter: with the weight and the gradient, 16 bytes per parameter. The other
optimizers store less; each module documents its memory and cost. A module is imported when one of its names is first
used.

A new optimizer (docs/contributing.md has a complete example; from a script: `jaxmem.register_optimizer`):

1. A file in `rules/`: a `MatrixRule` (layers.py), `scale_by_NAME`, and the public function, `NAME`, with weight decay
   and learning rate.
2. config/optimizers.py: a line in `OPTIMIZERS`, and the class of its settings, whose defaults are the hyperparameters.
3. A new hyperparameter is also a field of `config.optimizers.Optimizer`, with the default None.
4. If it changes the arrays of the state, it is in `FIXED_KEYS` or `STATE_KEYS` of checkpoint/same_run.py.
"""

from importlib import import_module
from typing import Any

from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.lazy import lazy_names

_get, _names = lazy_names(
    __name__,
    apply="apply_updates global_norm leaf_key",
    transformation="chain named_update with_learning_rate",
    clipping="clip record_norm",
    elementwise="is_elementwise updates_single_weights updates_stacks_as_layers",
    layers="MatrixRule ParameterSpec UpdateContext by_layer state_axes",
    master="REMAINDER_BITS in_float32 with_master with_remainder",
    registry="build learning_rate_schedule optimizer",
    selection="Selection scale_updates select_trainable trainable",
)
_functions = (
    entry.implementation.partition(":") for entry in OPTIMIZERS.values() if isinstance(entry.implementation, str)
)
_RULES = {function: module for module, _, function in _functions}  # scale_by_muon: muon
__all__ = sorted({*_names, *_RULES, *OPTIMIZERS})  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Returns a name of the modules above, an implementation in `rules`, or a named optimizer: `optim.adamw(1e-3)`."""
    if name in OPTIMIZERS:
        return _get("optimizer")(name)
    if name in _RULES:
        return getattr(import_module(f"jaxmem.optim.rules.{_RULES[name]}"), name)
    return _get(name)
