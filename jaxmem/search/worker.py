"""A process that compiles what it is asked to: a line of JSON in, a line of JSON out, until its input ends.

`python -m jaxmem.search.worker TARGET [RESERVE_GIB]`. It needs about 1 GiB of memory and never touches a device. What
XLA or anything else prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.machine import devices
from jaxmem.planning.compile import listening
from jaxmem.planning.targets import Target, parse_target
from jaxmem.search import facts


def main(arguments: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    devices.seldom_look_for_garbage()
    target = parse_target(arguments[0])
    if target.is_cpu:
        devices.simulate(target.count)
    serve(sys.stdin, answers, target, float(arguments[1]) if len(arguments) > 1 else None)


def serve(questions: Iterable[str], answers: TextIO, target: Target, reserve_gib: float | None = None) -> None:
    """Of a config that has no program, also where it is XLA that fails, the answer is why."""
    for line in questions:
        asked = json.loads(line)
        cfg = Config.model_validate_json(json.dumps(asked["config"]))
        answer: dict[str, Any]
        try:
            with listening():
                if asked["question"] == "step":
                    answer = facts.as_dict(facts.step_facts(cfg, target, reserve_gib))
                elif asked["question"] == "plan":
                    answer = facts.step_plan(cfg, target)
                else:
                    answer = facts.other_phases(cfg, target, reserve_gib)
        except UserError as error:
            answer = {"refused": str(error).splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
