"""Optimizers: plain optax transformations that work in anyone's loop, and the chain that a config names.

AdamW in float32 holds two numbers beside each weight and needs a third for the gradient: 16 bytes a parameter
with the weight itself. The others here hold less; each module says how much and at what cost.
"""

from jaxmem.optim.adafactor import scale_by_adafactor
from jaxmem.optim.adam_mini import scale_by_adam_mini
from jaxmem.optim.apply import apply, global_norm, leaf_key
from jaxmem.optim.by_layer import At, Leaf, Rule, by_layer
from jaxmem.optim.chains import adafactor, adam, adam_mini, adamw, build, lion, muon, sgd
from jaxmem.optim.master import with_master
from jaxmem.optim.muon import scale_by_muon
from jaxmem.optim.schedule import schedule

__all__ = [
    "At",
    "Leaf",
    "Rule",
    "adafactor",
    "adam",
    "adam_mini",
    "adamw",
    "apply",
    "build",
    "by_layer",
    "global_norm",
    "leaf_key",
    "lion",
    "muon",
    "scale_by_adafactor",
    "scale_by_adam_mini",
    "scale_by_muon",
    "schedule",
    "sgd",
    "with_master",
]
