"""What a run is: sections, presets, loading, checking. Imports no jax."""

from jaxmem.config.adapters import LOW_RANK
from jaxmem.config.check import check
from jaxmem.config.load import load_config, save_config
from jaxmem.config.mesh import undivided
from jaxmem.config.networks import Convnet, Decoder, Mlp, Model, Rope, Vit
from jaxmem.config.presets import PRESETS, parameter_count
from jaxmem.config.schema import json_schema
from jaxmem.config.sections import (
    Adapter,
    Batch,
    Checkpoint,
    Cluster,
    Config,
    Data,
    Generate,
    Memory,
    Mesh,
    Objective,
    Optimizer,
    Pipeline,
    Precision,
    Rules,
    Save,
    Source,
    Train,
)

__all__ = [
    "LOW_RANK",
    "PRESETS",
    "Adapter",
    "Batch",
    "Checkpoint",
    "Cluster",
    "Config",
    "Convnet",
    "Data",
    "Decoder",
    "Generate",
    "Memory",
    "Mesh",
    "Mlp",
    "Model",
    "Objective",
    "Optimizer",
    "Pipeline",
    "Precision",
    "Rope",
    "Rules",
    "Save",
    "Source",
    "Train",
    "Vit",
    "check",
    "json_schema",
    "load_config",
    "parameter_count",
    "save_config",
    "undivided",
]
