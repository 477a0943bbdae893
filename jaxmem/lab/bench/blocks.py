"""The fastest block sizes of each kernel: all that a GPU has room for, each checked first, then measured in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxmem.kernels import tuning
from jaxmem.lab.bench.contest import RIGHT, Contestant, Row, Say, take_turns
from jaxmem.lab.bench.measure import Job, is_selected
from jaxmem.lab.bench.operations import OPERATIONS
from jaxmem.lab.bench.work import Pass, Work

DRY_SIZES = 2  # are enough to see that it works, where nothing is measured


class BlocksJob(NamedTuple):
    """`passes`: of these alone, where there are some; `there`: kinds and sizes of calls whose kernels are cut well."""

    job: Job
    passes: tuple[str, ...]
    there: tuple[tuple[str, tuple[int, ...]], ...]


def tune_blocks(blocks_job: BlocksJob, *, done: Sequence[Row], without: Sequence[str], say: Say) -> Iterator[Row]:
    """Entries of the table of winners: one for each kernel whose sizes can be chosen and that runs here."""
    job, own = blocks_job.job, OPERATIONS[blocks_job.job.operation]
    capability = getattr(jax.devices()[0], "compute_capability", "")
    shared = tuning.SHARED.get(capability, min(tuning.SHARED.values()))
    there = {*blocks_job.there, *((entry["kind"], tuple(entry["sizes"])) for entry in done)}
    work = own.work(own.shape(job.shape, dry=job.dry))
    for of, one in (work.kernels or work.passes).items():
        wanted: list[Any] = []  # when it is needed, once
        for implementation in own.implementations:
            kernel = f"{implementation} {of}"
            if (blocks_job.passes and of not in blocks_job.passes) or not is_selected(
                implementation, of, job.only, without
            ):
                continue
            asked = _called_kernels(one, implementation, work).get(kernel)
            if asked is None or (f"{kernel} {asked.kind}", tuple(asked.sizes)) in there:
                continue
            space = [blocks for blocks in asked.space(shared) if is_selected(kernel, _named(blocks), (), without)]
            if not wanted:
                say(f"plain {of}")
                wanted.append(one.wanted(work))
            contestants = list(_correct(kernel, one, work, wanted[0], space[:DRY_SIZES] if job.dry else space, say))
            take_turns(contestants, job.seconds, say)
            taken = {contestant.of: min(contestant.seconds) for contestant in contestants if contestant.failed is None}
            if taken:
                best = min(taken, key=lambda blocks: taken[blocks])
                yield {
                    "kind": f"{kernel} {asked.kind}",
                    "sizes": list(asked.sizes),
                    "blocks": [int(size) for size in best.split("x")],
                    "of": len(taken),
                    "milliseconds": 1e3 * taken[best],
                }


def _called_kernels(one: Pass, implementation: str, work: Work) -> dict[str, tuning.Asked]:
    """The kernels that a pass calls by an implementation, if it can."""
    with tuning.listening() as heard:
        try:
            one.traced(implementation, work)
        except Exception:  # noqa: BLE001 (it is told where the implementation is measured)
            return {}
    return heard


def _correct(
    kernel: str, one: Pass, work: Work, wanted: Any, space: Iterable[tuple[int, ...]], say: Say
) -> Iterator[Contestant]:
    """Those that compile and give what they should."""
    for blocks in space:
        say(f"{kernel} {_named(blocks)}")
        try:
            with tuning.forced(kernel, blocks):
                call = one.compiled(kernel.split(maxsplit=1)[0], work)
            error = one.far(call(), wanted)
        except Exception:  # noqa: BLE001, S112 (of many sizes some do not compile)
            continue
        if error <= RIGHT:
            yield Contestant(kernel, _named(blocks), call)


def _named(blocks: tuple[int, ...]) -> str:
    return "x".join(map(str, blocks))
