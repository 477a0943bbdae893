"""Bytes per device before anything is allocated: the real step is compiled, and the compiler says what it holds.

Three columns that should agree: what the arithmetic predicts, what the arrays' shapes and places add up to, and
what XLA allocates. Weights, optimizer state and batch are exact sums over named arrays; the temporaries of the
compiled step (gradients, activations, logits, scratch) are what XLA adds to them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from rich.table import Table

from jaxmem.config import Config
from jaxmem.program import Program, program


@dataclass(frozen=True)
class Plan:
    """What one device holds during a training step."""

    program: Program
    step: jax.stages.Compiled  # the very step that `train` runs
    seconds: float

    @cached_property
    def compiled(self) -> dict[str, int]:
        stats = self.step.memory_analysis()
        return {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
        }

    @cached_property
    def bytes_per_device(self) -> dict[str, int]:
        compiled, state = self.compiled, self.program.state
        total = compiled["arguments"] + compiled["outputs"] - compiled["aliased"] + compiled["temporaries"]
        parts = {
            "parameters": held(state.params),
            "optimizer": held(state.opt_state),
            "batch": held(self.program.batch),
            "temporaries": compiled["temporaries"],
        }
        return {**parts, "other": total - sum(parts.values()), "total": total}

    @cached_property
    def predicted(self) -> dict[str, int]:
        """Arithmetic alone: numbers per parameter times their bytes, over the devices that split them."""
        cfg, mesh = self.program.cfg, self.program.layout.mesh.shape
        width = 2 if cfg.precision.parameters == "bfloat16" else 4

        def share(from_stage: int, numbers: int) -> int:
            split = mesh["tensor"] * (mesh["fsdp"] if cfg.zero >= from_stage else 1)
            return self.program.parameters * width * numbers // split

        return {"parameters": share(3, 1), "optimizer": share(1, 2), "gradients": share(2, 1)}

    def as_json(self) -> dict[str, Any]:
        devices = self.program.layout.mesh.devices
        total = self.bytes_per_device["total"]
        return {
            "model": {"name": self.program.cfg.name, "parameters": self.program.parameters, "trainable": self.program.parameters},
            "target": {"name": devices.flat[0].device_kind, "devices": devices.size},
            "backend": devices.flat[0].platform,
            "bytes_per_device": self.bytes_per_device,
            "predicted": self.predicted,
            "bytes_per_parameter": total * devices.size / self.program.parameters,
            "compiled": self.compiled,
            "seconds": self.seconds,
        }

    def table(self) -> Table:
        """For people: where the memory of one device goes."""
        devices = self.program.layout.mesh.devices.size
        table = Table(title=f"Memory of 1 of {devices} devices: {self.program.parameters:,} parameters")
        for column in ("", "predicted", "compiled", "bytes/param"):
            table.add_column(column, justify="left" if not column else "right", no_wrap=True)
        names = {
            "parameters": "weights",
            "optimizer": "optimizer",
            "batch": "batch",
            "temporaries": "temporaries",
            "other": "other",
            "total": "total",
        }
        for key, name in names.items():
            size = self.bytes_per_device[key]
            if key == "other" and not size:
                continue
            if key == "total":
                table.add_section()
            predicted = self.predicted.get(key)
            each = size * devices / self.program.parameters
            table.add_row(name, "" if predicted is None else readable(predicted), readable(size), f"{each:.2f}")
            if key == "temporaries":
                table.add_row("  gradients", readable(self.predicted["gradients"]), "", "")
        return table


def plan(cfg: Config, devices: Sequence[Any] | None = None) -> Plan:
    """Compile the training step of a config for these devices, by default all that jax sees."""
    return plan_program(program(cfg, devices))


def plan_program(built: Program) -> Plan:
    start = time.perf_counter()
    step = built.lower_step().compile()
    return Plan(built, step, time.perf_counter() - start)


def ideal_flops(built: Program) -> float:
    """Of an update, without any recomputation: 2 for each weight of a product and token forward, twice that backward,
    and causal attention's two products, of which half is empty. Pictures: the weights once for each pixel's place
    is not counted, so this is a lower bound there."""
    cfg, model = built.cfg, built.cfg.model
    if model.family != "decoder":
        return 6.0 * built.parameters * cfg.batch.global_size
    length = cfg.data.sequence_length
    looked_up = 0 if model.tie_embeddings else model.vocab * model.embed
    seen = min(model.window or length, length)
    pairs = seen * length - seen * (seen - 1) / 2  # (query, key) that see each other
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    return cfg.batch.global_size * 3.0 * (2.0 * (built.parameters - looked_up) * length + attention)


def held(tree: Any) -> int:
    """Bytes that one device holds of placed arrays (or their shapes)."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def readable(size: float) -> str:
    """
    >>> readable(1536), readable(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
