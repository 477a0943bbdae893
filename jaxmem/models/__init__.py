"""Networks as Flax NNX modules, built from common layers. They declare parameters and logical axes, not devices.

    network.py            what a network is: its parts, in the order of its forward pass
    decoder.py, image_networks.py     the families; block.py, attention.py, experts.py, ...: their layers
    embedding.py, cross_entropy.py    the operations with a vocabulary matrix; vocab_slices.py: in slices
    linear.py, fp8.py     matmuls

The model of a script, `train(model=...)`: config/user.py has the arguments, user.py turns the module into `FlaxModel`
(its variables and their axes) and runs it with stored weights, and user_layers.py computes its lists of blocks
(`layers=...`) as stacks. `step.model.ModelSpec` chooses between it and a family; `step.objective` calls the script's
loss with it. `train(network=...)` is a module of
jaxmem's layers and needs neither.
"""

from importlib import import_module
from typing import Any

# The module and class of each model family. Config sections are in config/networks.py, and the names of weights in
# Hugging Face directories in hf/names.py.
NETWORKS: dict[str, Any] = {
    "decoder": ("jaxmem.models.decoder", "Decoder"),
    "vit": ("jaxmem.models.image_networks", "Vit"),
    "convnet": ("jaxmem.models.image_networks", "Convnet"),
    "mlp": ("jaxmem.models.image_networks", "Mlp"),
}


def build(cfg: Any, rngs: Any, execution: Any = None) -> Any:
    """Returns the network of the config section `model`. Only the module of its family is imported."""
    entry = NETWORKS[cfg.family]
    network = getattr(import_module(entry[0]), entry[1]) if isinstance(entry, tuple) else entry
    return network(cfg, rngs) if execution is None else network(cfg, rngs, execution)


def register_model(section: Any, network: Any) -> None:
    """Adds a network that `model.family` can name.

    `section`: a class derived from `jaxmem.config.networks.Family` (for images `ImageInput`), the fields of `model`;
    the default of its field `family` is the name. `network`: a class derived from `jaxmem.models.network.Network` (for
    images `ImageNetwork`); `network(section, rngs, execution)` returns the network.
    """
    from jaxmem.config.networks import register_family

    NETWORKS[register_family(section)] = network
