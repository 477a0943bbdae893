"""Optimizers: plain optax transformations that work in anyone's loop, and the chain that a config names.

AdamW in float32 holds two numbers beside each weight and needs a third for the gradient: 16 bytes a parameter
with the weight itself. The others here hold less; each module says how much and at what cost.
"""

from jaxmem.optim.adafactor import scale_by_adafactor
from jaxmem.optim.adam_mini import scale_by_adam_mini
from jaxmem.optim.apollo import scale_by_apollo
from jaxmem.optim.apply import apply, global_norm, leaf_key
from jaxmem.optim.by_layer import At, Leaf, Rule, by_layer
from jaxmem.optim.clipping import clip, remember
from jaxmem.optim.galore import scale_by_galore, scale_by_galore_adam
from jaxmem.optim.master import BITS, with_master, with_remainder
from jaxmem.optim.muon import scale_by_muon
from jaxmem.optim.quantized import scale_by_adam4bit, scale_by_adam8bit, scale_by_lion8bit, trace8bit
from jaxmem.optim.registry import (
    adafactor,
    adam,
    adam_mini,
    adamw,
    adamw4bit,
    adamw8bit,
    apollo,
    apollo_mini,
    build,
    galore_adamw,
    galore_adamw8bit,
    lion,
    lion8bit,
    momentum8bit,
    muon,
    qgalore,
    sgd,
)
from jaxmem.optim.schedule import schedule
from jaxmem.optim.selection import Choice
from jaxmem.optim.trainable import faster, only, trainable

__all__ = [
    "BITS",
    "At",
    "Choice",
    "Leaf",
    "Rule",
    "adafactor",
    "adam",
    "adam_mini",
    "adamw",
    "adamw4bit",
    "adamw8bit",
    "apollo",
    "apollo_mini",
    "apply",
    "build",
    "by_layer",
    "clip",
    "faster",
    "galore_adamw",
    "galore_adamw8bit",
    "global_norm",
    "leaf_key",
    "lion",
    "lion8bit",
    "momentum8bit",
    "muon",
    "only",
    "qgalore",
    "remember",
    "scale_by_adafactor",
    "scale_by_adam4bit",
    "scale_by_adam8bit",
    "scale_by_adam_mini",
    "scale_by_apollo",
    "scale_by_galore",
    "scale_by_galore_adam",
    "scale_by_lion8bit",
    "scale_by_muon",
    "schedule",
    "sgd",
    "trace8bit",
    "trainable",
    "with_master",
    "with_remainder",
]
