"""A plan: what one device of a target holds in every phase of a run, and what a step costs it in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import jax

from jaxmem.planning.advice import Warned, warnings_of
from jaxmem.planning.breakdown import PARTS, Breakdown, breakdown
from jaxmem.planning.compile import Compiled, total_of
from jaxmem.planning.history import History, history
from jaxmem.planning.known_shapes import known_shapes
from jaxmem.planning.predict import held, ideal_flops, predict
from jaxmem.planning.targets import Target, reserved, usable
from jaxmem.planning.timeline import Timeline, Traffic, timeline
from jaxmem.step import Program
from jaxmem.step.programs import step_at


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
    others: Mapping[str, int] = field(default_factory=dict)  # bytes of other phases' programs, where compiled
    shorter: Mapping[int, Compiled] = field(default_factory=dict)  # steps of rows shorter than the longest, to be run

    @property
    def step(self) -> jax.stages.Compiled:
        """The very step that `train` runs, on devices that are here; of buckets the longest's."""
        return self.step_for(self.program.cfg.data.sequence_length)

    def step_for(self, bucket: int) -> jax.stages.Compiled:
        """The step that `train` runs on rows of this length."""
        executable = self.shorter.get(bucket, self.compiled_step).executable
        assert executable is not None, f"{self.target.name} is not here"
        return executable

    def total_for(self, bucket: int) -> int:
        """Bytes of a device in a step on rows of this length."""
        if bucket == self.program.cfg.data.sequence_length:
            return self.compiled_step.total
        return self.shorter[bucket].total if bucket in self.shorter else self.others[step_at(bucket)]

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
        whole = self.compiled_step.total
        return {**parts, "other": whole - sum(parts.values()) + parts["other"], "total": whole}

    @cached_property
    def kinds(self) -> dict[str, dict[str, int]]:
        """What each part consists of."""
        found: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
        for item in self.breakdown.buffers:
            found[item.part][item.kind] += item.size
        return {part: dict(kinds.most_common()) for part, kinds in found.items() if kinds}

    @cached_property
    def predicted(self) -> dict[str, int | None]:
        """By arithmetic alone."""
        return predict(self.program)

    @cached_property
    def timeline(self) -> Timeline:
        return timeline(self.compiled_step.module, self.target.gpu, self.target.count, self.target.per_host)

    @cached_property
    def history(self) -> History:
        """The step's memory over its time."""
        return history(self.breakdown, self.compiled_step.total, self.target, self.timeline)

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
        waiting = self.program.spec.host_state
        state = held(self.program.spec.state) - held(waiting)
        aside = held(self.program.spec.state.opt_state) - held(waiting.opt_state)  # while an evaluation runs
        return {
            "initialise": self._other("initialise"),
            "load": state,  # each part of an array is read to where it lies
            "step": self.compiled_step.total,
            **{step_at(bucket): self.total_for(bucket) for bucket in self.program.cfg.data.buckets},
            "evaluate": self._other("evaluate") + aside if self.program.cfg.train.evaluate_every else None,
            "save": state,  # its checksum needs nothing beside; a copy is in host memory, see `host_bytes`
        }

    @cached_property
    def host_bytes(self) -> int:
        """Host memory for each device at its fullest: what is offloaded, and the state's copy while it is saved."""
        return self.compiled_step.host_total + held(self.program.spec.state)

    @property
    def reserved(self) -> int:
        """Bytes of a GPU that the program cannot have."""
        return reserved(self.target, self.reserve_gib)

    @property
    def limit(self) -> int:
        """Bytes of a device that the run may take."""
        return usable(self.target, self.program.cfg, self.reserve_gib)

    @property
    def room(self) -> int:
        """Bytes that are left of a device at its fullest; below 0 it does not fit."""
        return self.limit - max(size for size in self.phases.values() if size is not None)

    @property
    def spilled(self) -> int:
        """Bytes that a device has no room for at its fullest and the host holds for it, with `memory.spill`."""
        return max(0, -self.room) if self.program.cfg.memory.spill != "none" else 0

    @property
    def fits(self) -> bool:
        held = self.room + min(self.spilled, self.target.spillable)
        return held >= 0 and self.host_bytes + self.spilled <= self.target.host_memory

    @cached_property
    def warnings(self) -> list[Warned]:
        return warnings_of(self)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.step_as_json(),
            "spilled_bytes_per_device": self.spilled,
            "phases": self.phases,
            "fits": self.fits,
            "warnings": [asdict(warned) for warned in self.warnings],
            "seconds": self.seconds,
        }

    def step_as_json(self) -> dict[str, Any]:
        """Of the step alone: what needs no other program to be compiled."""
        built, target = self.program, self.target
        return {
            "model": {"name": built.cfg.name, "parameters": built.model.parameters, "trainable": built.model.trainable},
            "target": {
                "name": target.name,
                "devices": target.count,
                "memory_bytes": target.memory,
                "reserved_bytes": self.reserved,
                "limit_bytes": self.limit,
                "host_memory_bytes": target.host_memory,
            },
            "backend": "cpu" if target.is_cpu else "cuda",
            "remat": built.cfg.memory.model_dump(mode="json")["remat"],
            "bytes_per_device": self.bytes_per_device,
            "kinds": self.kinds,
            "predicted": self.predicted,
            "host_bytes_per_device": self.compiled_step.host_total,
            "bytes_per_parameter": self.compiled_step.total * target.count / built.model.parameters,
            "compiled": self.compiled,
            "collectives": self._told(self.timeline.traffic, "wire_bytes"),
            "host_transfers": self._told(self.timeline.host_traffic, "bytes"),
            "messages": [
                {
                    "kind": one.message.kind,
                    "devices": one.message.group,
                    "made_by": one.instruction.op_name,
                    "executed": one.executed,
                    "wire_bytes": one.wire_bytes,
                    "exposed_bytes": one.exposed_bytes,
                    "kernels_beside": one.kernels,
                }
                for one in self.timeline.collectives
            ],
            "flops_per_device": self.timeline.flops,
            "ideal_flops_per_device": self.ideal_flops_per_device,
            "estimated_step_seconds": self.estimated_step_seconds,
            "bound_by": self.timeline.bound if self.target.gpu else None,
        }

    def _told(self, kinds: Mapping[str, Traffic], moved: str) -> dict[str, dict[str, Any]]:
        """Messages or copies by kind; `moved` is what their bytes are called."""
        known = self.target.gpu is not None
        return {
            kind: {
                "executed": one.executed,
                moved: one.wire_bytes,
                "exposed_bytes": one.exposed_bytes,
                "seconds": one.seconds if known else None,
                "exposed_seconds": one.exposed_seconds if known else None,
            }
            for kind, one in sorted(kinds.items())
        }

    def table(self) -> Any:
        """For people."""
        from jaxmem.planning.table import Report

        return Report(self)

    def _other(self, phase: str) -> int:
        """Of a plan for devices that are here, the very program that the run uses."""
        return self.others[phase] if phase in self.others else total_of(getattr(self.program, f"compiled_{phase}"))
