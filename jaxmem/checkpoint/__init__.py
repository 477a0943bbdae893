"""Checkpoints: the data that a run needs to resume bit for bit, on any number of devices.

One checkpoint is a directory `checkpoints/STEP/`, written by Orbax: the arrays of the state (each process its own
shards), the data position with its fingerprint, the resolved config, and a checksum of every array. It appears by one
rename when all of it is on disk and disappears by one rename when newer ones replace it, so a run killed at any
moment leaves only complete checkpoints under a step's name. Nothing is pickled.

Cost. On disk: the bytes of the state times `keep` (and one for the best), plus the one being written. The loop waits
while the arrays are read once on the device (checksums) and copied to the host; they are written during the next steps,
which may donate the state. Restoring reads what each device needs, in chunks of at most `CHUNK`, directly to the
requested sharding, so another mesh costs no more than the same one.
"""

from jaxmem.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, manager="Checkpoints", paths="move_aside", record="DamagedError")
