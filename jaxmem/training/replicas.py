"""Compares the replicas of the state bitwise (`train.check_replicas`).

Replicas are updated by the same program from the same sums, so they are bitwise equal. A difference is caused by faulty
hardware (a memory cell or a core), and would spread without an error. An array that is sharded over all devices has no
replica. A check reads the state once on every device, and waits for the result.
"""

from collections import Counter
from typing import Any

from jaxmem.checkpoint.record import checksum, named_leaves
from jaxmem.distributed.agree import gather
from jaxmem.errors import UserError


def check_replicas(state: Any, step: int) -> None:
    """Raises an error that names an array whose replicas differ, and the devices in the minority."""
    sums: dict[str, dict[str, int]] = {}
    for own in gather(_checksums(state)):
        for shard, found in own.items():
            sums.setdefault(shard, {}).update(found)
    for shard, found in sums.items():
        (majority, _), *others = Counter(found.values()).most_common()
        if others:
            odd = ", ".join(device for device, value in found.items() if value != majority)
            raise UserError(
                f"{shard.partition(' ')[0]} differs between replicas after step {step}: {odd} differs from the majority"
                f" of {len(found)} copies; exclude that device, and run the same command again"
            )


def _checksums(state: Any) -> dict[str, dict[str, int]]:
    """Checksums as {name and index of a shard: {device of this process: checksum}}."""
    sums: dict[str, dict[str, int]] = {}
    for name, leaf in named_leaves(state).items():
        for shard in leaf.addressable_shards:
            of_part = sums.setdefault(f"{name} {shard.index}", {})
            of_part[f"device {shard.device.id} of process {shard.device.process_index}"] = checksum(shard.data)
    return sums
