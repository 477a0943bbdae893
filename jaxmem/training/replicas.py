"""Whether all devices that hold a copy of the same numbers hold the same bits.

Copies are updated by the same program from the same sums, so they stay the same to the bit: one that differs was
changed by what is broken, a memory cell or a core that reckons wrongly, and would spread unseen. What is split over
all devices has no copy to be compared with. A check reads the state once on every device and waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jaxmem.checkpoint.checksum import checksum
from jaxmem.distributed.agree import gather
from jaxmem.errors import UserError


class Replicas:
    """Checked after every so many steps; None: never."""

    def __init__(self, every: int | None) -> None:
        self._every = every

    def after(self, step: int, state: Any) -> None:
        if self._every and step % self._every == 0:
            for name, devices, alike in differing(state):
                raise UserError(
                    f"{name} differs between copies after step {step}: {devices} of {alike} that should be alike hold"
                    " other bits than most; take that device out, and go on from a checkpoint"
                )


def differing(tree: Any) -> Iterator[tuple[str, str, int]]:
    """Each array with copies that differ: its name, the devices that hold what most do not, and how many copies there
    are."""
    sums: dict[str, dict[str, int]] = {}
    for own in gather(_sums(tree)):
        for part, found in own.items():
            sums.setdefault(part, {}).update(found)
    for part, found in sums.items():
        (most, _), *others = Counter(found.values()).most_common()
        if others:
            odd = [device for device, value in found.items() if value != most]
            yield part.partition(" ")[0], ", ".join(odd), len(found)


def _sums(tree: Any) -> dict[str, dict[str, int]]:
    """Of every part of an array that lies on this process's devices, by the device."""
    sums: dict[str, dict[str, int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        for shard in leaf.addressable_shards:
            held = sums.setdefault(f"{name} {shard.index}", {})
            held[f"device {shard.device.id} of process {shard.device.process_index}"] = checksum(shard.data)
    return sums
