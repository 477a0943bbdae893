"""Checkpoints: all that a run needs to go on as if nothing had happened, on whatever devices are there.

One checkpoint is a directory `checkpoints/STEP/`, written by Orbax: the state's arrays (each process its own
shards), the data's position with its fingerprint, the resolved config, and a checksum of every array. It appears
by one rename when all of it is on disk, and leaves by one rename when newer ones replace it, so a run
killed at any moment leaves only whole checkpoints under a step's name. Nothing is pickled.

Cost. On disk: the bytes of the state, times `keep` (and one for the best), plus the one being written. The loop
waits while the arrays are read once on the device (checksums) and copied to the host; writing goes on behind the
next steps, which may donate the state, and holds this process's share of it in host memory until done.
Restoring reads what each device needs, in chunks of at most `CHUNK`, straight to the sharding asked for: another
mesh costs no more than the same one, and no device ever holds an array that it does not keep.
"""

from jaxmem.checkpoint.files import place, put_aside
from jaxmem.checkpoint.manager import Checkpoints, DamagedError
from jaxmem.checkpoint.policy import Best

__all__ = ["Best", "Checkpoints", "DamagedError", "place", "put_aside"]
