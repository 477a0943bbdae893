"""A plan: what one device of a target holds in every phase of a run, and what a step costs it in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import jax

from jaxmem.checksum import sum_bits
from jaxmem.hardware import reserved
from jaxmem.planning.advice import Warned, warnings_of
from jaxmem.planning.breakdown import PARTS, Breakdown, breakdown, known_shapes
from jaxmem.planning.compile import Compiled, compile_program
from jaxmem.planning.predict import held, ideal_flops, predict
from jaxmem.planning.targets import Target
from jaxmem.planning.timeline import Timeline, timeline
from jaxmem.program import Program


@dataclass(frozen=True)
class Plan:
    """What one device holds and does. Each number is found when it is first asked for."""

    program: Program
    target: Target
    compiled_step: Compiled
    seconds: float  # that planning took
    reserve_gib: float | None = None  # of a GPU's memory that the compiler does not count; None: the usual
    unlimited: Compiled | None = None  # the same step without a limit on memory, where XLA recomputed by itself
    remarks: Mapping[str, Sequence[str]] = field(default_factory=dict)  # from XLA's log
    others: dict[str, Compiled] = field(default_factory=dict)  # programs of other phases that are compiled already

    @property
    def step(self) -> jax.stages.Compiled:
        """The very step that `train` runs."""
        return self.compiled_step.executable

    @property
    def compiled(self) -> dict[str, int]:
        return self.compiled_step.sizes

    @property
    def mesh(self) -> Mapping[str, int]:
        return self.program.layout.mesh.shape

    @cached_property
    def breakdown(self) -> Breakdown:
        return breakdown(self.compiled_step.module, self.compiled_step.assignment, known_shapes(self.program))

    @cached_property
    def bytes_per_device(self) -> dict[str, int]:
        """Of the training step. Every part but `other` is a sum of named buffers."""
        parts = {part: self.breakdown.of_part(part) for part in PARTS}
        total = self.compiled_step.total
        return {**parts, "other": total - sum(parts.values()) + parts["other"], "total": total}

    @cached_property
    def kinds(self) -> dict[str, dict[str, int]]:
        """What each part consists of."""
        found: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
        for item in self.breakdown.items:
            found[item.part][item.kind] += item.size
        return {part: dict(kinds.most_common()) for part, kinds in found.items() if kinds}

    @cached_property
    def predicted(self) -> dict[str, int | None]:
        """By arithmetic alone."""
        return predict(self.program)

    @cached_property
    def timeline(self) -> Timeline:
        return timeline(self.compiled_step.module, self.target.gpu, self.target.count, self.target.per_host)

    @property
    def estimated_step_seconds(self) -> float | None:
        """None where nothing is known of the device's speed."""
        return self.timeline.seconds if self.target.gpu else None

    @cached_property
    def ideal_flops_per_device(self) -> float:
        return ideal_flops(self.program) / self.program.layout.mesh.size

    @cached_property
    def phases(self) -> dict[str, int | None]:
        """Bytes of a device in each phase of a run, with what lies there meanwhile; None: the run has no such phase."""
        state = held(self.program.state)
        aside = held(self.program.state.opt_state)  # while an evaluation runs
        return {
            "initialise": self._other("initialise").total,
            "load": state,  # each part of an array is read to where it lies
            "step": self.compiled_step.total,
            "evaluate": self._other("evaluate").total + aside if self.program.cfg.train.evaluate_every else None,
            "save": state + self._checksum(),  # and a copy in host memory, see `host_bytes`
        }

    @cached_property
    def host_bytes(self) -> int:
        """Host memory for each device at its fullest: what is offloaded, and the state's copy while it is saved."""
        return self.compiled_step.host_bytes + held(self.program.state)

    @property
    def reserved(self) -> int:
        return 0 if self.target.is_cpu else reserved(self.target.count, self.reserve_gib)

    @property
    def room(self) -> int:
        """Bytes that are left of a device at its fullest; below 0 it does not fit."""
        return self.target.memory - self.reserved - max(size for size in self.phases.values() if size is not None)

    @property
    def fits(self) -> bool:
        return self.room >= 0 and self.host_bytes <= self.target.host_memory

    @cached_property
    def warnings(self) -> list[Warned]:
        return warnings_of(self)

    def as_json(self) -> dict[str, Any]:
        built, target, total = self.program, self.target, self.bytes_per_device["total"]
        return {
            "model": {"name": built.cfg.name, "parameters": built.parameters, "trainable": built.parameters},
            "target": {
                "name": target.name,
                "devices": target.count,
                "memory_bytes": target.memory,
                "reserved_bytes": self.reserved,
                "host_memory_bytes": target.host_memory,
            },
            "backend": "cpu" if target.is_cpu else "cuda",
            "bytes_per_device": self.bytes_per_device,
            "kinds": self.kinds,
            "predicted": self.predicted,
            "host_bytes_per_device": self.compiled_step.host_bytes,
            "bytes_per_parameter": total * target.count / built.parameters,
            "compiled": self.compiled,
            "phases": self.phases,
            "collectives": {
                kind: {
                    "executed": one.executed,
                    "wire_bytes": one.wire_bytes,
                    "exposed_bytes": one.exposed_bytes,
                }
                for kind, one in sorted(self.timeline.traffic.items())
            },
            "flops_per_device": self.timeline.flops,
            "ideal_flops_per_device": self.ideal_flops_per_device,
            "estimated_step_seconds": self.estimated_step_seconds,
            "bound_by": self.timeline.bound if self.target.gpu else None,
            "fits": self.fits,
            "warnings": [asdict(warned) for warned in self.warnings],
            "seconds": self.seconds,
        }

    def table(self) -> Any:
        """For people."""
        from jaxmem.planning.table import Report

        return Report(self)

    def _other(self, phase: str) -> Compiled:
        if phase not in self.others:
            lowered = {"initialise": self.program.lower_initialise, "evaluate": self.program.lower_evaluate}[phase]()
            self.others[phase] = compile_program(lowered, here=self.target.is_here)
        return self.others[phase]

    def _checksum(self) -> int:
        """What a checkpoint's checksum needs beside the largest array."""
        largest = max(jax.tree.leaves(self.program.state), key=held)
        stats = compile_program(sum_bits.lower(largest), here=self.target.is_here).executable.memory_analysis()
        return stats.temp_size_in_bytes + stats.output_size_in_bytes
