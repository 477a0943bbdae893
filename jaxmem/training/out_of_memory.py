"""Where memory runs out although the plan fits: plan beside reality, and configs that fit into what was really there.

A plan counts what XLA allocates. What it cannot know is memory that somebody else takes of the device meanwhile, and
what the driver, NCCL or a fragmented pool take beyond what is reserved for them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxmem.errors import UserError
from jaxmem.planning import Plan, readable
from jaxmem.search.nearest import Near, named, nearest_that_fit
from jaxmem.training.progress import device_memory

LESS = 0.1  # of the plan, by which another must be smaller where the device does not tell how much is missing
ASKED = re.compile(r"allocate (?:([\d.]+) ?([KMGT])iB|(\d+) bytes)")


class OutOfMemoryError(UserError):
    """Said in place of XLA's own error."""

    exit_code = 3

    def __init__(self, planned: Plan, told: str, near: list[Near]) -> None:
        there = device_memory()
        asked = _asked(told)
        real = [f"{readable(there['bytes_in_use'])} were in use"] if there else []
        real += [f"{readable(asked)} more were asked for"] if asked else []
        name, plan = planned.program.cfg.name, f"{readable(_planned(planned))} of {readable(planned.limit)}"
        super().__init__(
            f"{name}: out of memory in spite of its plan, which takes {plan} of each device"
            f"{'; ' if real else ''}{' and '.join(real)}. Another process may hold memory there: `jaxmem doctor`\n"
            f"{named(near)}"
        )


@contextmanager
def explained(planned: Plan) -> Iterator[None]:
    """Around all that runs by this plan. The search for others takes up to a minute; of several processes only the one
    that failed would search, and XLA's tuning waits for all, so there none does."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in (told := str(error)):
            raise
        limit = _really(planned, told)
        memory = limit + planned.reserved
        within = dataclasses.replace(planned, target=dataclasses.replace(planned.target, memory=memory))
        near = nearest_that_fit(within) if jax.process_count() == 1 else []
        raise OutOfMemoryError(planned, told, near) from error


def _really(planned: Plan, told: str) -> int:
    """Bytes that a plan may take, by what this one came to."""
    plan, there, asked = _planned(planned), device_memory().get("bytes_in_use"), _asked(told)
    if there is None or asked is None:
        return int((1 - LESS) * plan)
    needed = there + asked
    # More than planned: by as much less. Less than planned: so little was there.
    return min(planned.limit - (needed - plan), plan - 1) if needed > plan else needed - 1


def _planned(planned: Plan) -> int:
    return max(size or 0 for size in planned.phases.values())


def _asked(told: str) -> int | None:
    """Bytes that the allocation would have taken which failed.

    >>> _asked("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB."), _asked("allocate 12 bytes")
    (1610612736, 12)
    """
    if not (found := ASKED.search(told)):
        return None
    number, unit, whole = found.groups()
    return int(whole) if whole else int(float(number) * 1024 ** (1 + "KMGT".index(unit)))
