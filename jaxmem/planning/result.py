"""A plan as it is shown: facts of the compiled step, warnings, JSON and a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

from jaxmem.planning.advice import PlanWarning, warnings_of
from jaxmem.planning.plan_facts import PlanFacts
from jaxmem.planning.timeline import Traffic


class Plan(PlanFacts):
    """The memory of one device of a target in every phase of a run, and the time of a step."""

    @cached_property
    def warnings(self) -> list[PlanWarning]:
        return warnings_of(self)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.step_as_json(),
            "spilled_bytes_per_device": self.spilled,
            "phases": self.phases,
            "fits": self.fits,
            "warnings": [asdict(warning) for warning in self.warnings],
            "seconds": self.seconds,
        }

    def step_as_json(self) -> dict[str, Any]:
        """The facts of the step alone, for which no other program is compiled."""
        built, target, timeline = self.program, self.target, self.timeline
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
            "collectives": self._traffic_as_json(timeline.traffic, "wire_bytes"),
            "host_transfers": self._traffic_as_json(timeline.host_traffic, "bytes"),
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
                for one in timeline.collectives
            ],
            "flops_per_device": timeline.flops,
            "ideal_flops_per_device": self.ideal_flops_per_device,
            "estimated_step_seconds": self.estimated_step_seconds,
            "bound_by": timeline.bound if target.gpu else None,
        }

    def _traffic_as_json(self, traffic: Mapping[str, Traffic], bytes_key: str) -> dict[str, dict[str, Any]]:
        has_speed = self.target.gpu is not None
        return {
            kind: {
                "executed": one.executed,
                bytes_key: one.wire_bytes,
                "exposed_bytes": one.exposed_bytes,
                "seconds": one.seconds if has_speed else None,
                "exposed_seconds": one.exposed_seconds if has_speed else None,
            }
            for kind, one in sorted(traffic.items())
        }

    def table(self) -> Any:
        """To print with rich."""
        from jaxmem.planning.table import PlanTable

        return PlanTable(self, self.warnings)
