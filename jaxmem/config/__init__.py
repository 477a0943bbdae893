"""The config of a run: its sections, and how they are loaded and checked. Imports no jax.

    sections.py       `Config` and its sections; adapter, mesh, networks, optimizers, recompute: the larger ones
    load.py           from a file or dict to a checked `Config`; methods.py: from the name of a model and a method
    check.py          errors in a config; combinations.yaml: settings that exclude each other; devices.py: the mesh
    user.py           the model, loss and data of a script
    hugging_face.py   Hugging Face's configs; gguf.py: those of llama.cpp; peft.py: adapters; hub.py: by id

The module that loads and saves them is imported at its first use.
"""

from jaxmem.config.adapter import LOW_RANK, Adapter
from jaxmem.config.mesh import MESH_AXES, Mesh, Pipeline, Rules
from jaxmem.config.networks import (
    Convnet,
    Decoder,
    Experts,
    Latent,
    Mlp,
    Model,
    Quantization,
    Rope,
    UserModel,
    Vit,
)
from jaxmem.config.optimizers import Optimizer
from jaxmem.config.recompute import Memory, Save
from jaxmem.config.sections import (
    Batch,
    Checkpoint,
    Cluster,
    Config,
    Data,
    Generate,
    Objective,
    Precision,
    Source,
    Train,
)
from jaxmem.lazy import lazy_names

__getattr__, _ = lazy_names(__name__, load="load_config save_config save_settings")
__all__ = [
    "LOW_RANK", "MESH_AXES", "Adapter", "Batch", "Checkpoint", "Cluster", "Config", "Convnet", "Data", "Decoder",
    "Experts", "Generate", "Latent", "Memory", "Mesh", "Mlp", "Model", "Objective", "Optimizer", "Pipeline",
    "Precision", "Quantization", "Rope", "Rules", "Save", "Source", "Train", "UserModel", "Vit", "load_config",
    "save_config", "save_settings",
]  # fmt: skip
