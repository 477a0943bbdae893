"""Compares the replicas of the state bitwise (`train.check_replicas`).

Replicas are updated by the same program from the same sums, so they are bitwise equal. A difference is caused by faulty
hardware, a memory cell or a core, and would spread without an error. An array that is sharded over all devices has no
replica. A check reads the state once on every device and waits for it.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jaxmem.checkpoint.checksum import checksum
from jaxmem.distributed.agree import gather
from jaxmem.errors import UserError


def check_replicas(state: Any, step: int) -> None:
    for name, devices, copies in differing_replicas(state):
        raise UserError(
            f"{name} differs between replicas after step {step}: {devices} differs from the majority of {copies}"
            " copies; remove that device and resume from a checkpoint"
        )


def differing_replicas(tree: Any) -> Iterator[tuple[str, str, int]]:
    """Each array whose copies differ: its name, the devices in the minority, and the number of copies."""
    sums: dict[str, dict[str, int]] = {}
    for own in gather(_checksums(tree)):
        for part, found in own.items():
            sums.setdefault(part, {}).update(found)
    for part, found in sums.items():
        (majority, _), *others = Counter(found.values()).most_common()
        if others:
            odd = [device for device, value in found.items() if value != majority]
            yield part.partition(" ")[0], ", ".join(odd), len(found)


def _checksums(tree: Any) -> dict[str, dict[str, int]]:
    """For each shard on this process's devices, by name and index: its checksum on each device."""
    sums: dict[str, dict[str, int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        for shard in leaf.addressable_shards:
            of_part = sums.setdefault(f"{name} {shard.index}", {})
            of_part[f"device {shard.device.id} of process {shard.device.process_index}"] = checksum(shard.data)
    return sums
