"""Checkpoints: the data that a run needs to resume, bit for bit on the same mesh, and on any number of devices.

One checkpoint is a directory `checkpoints/STEP/`, written by Orbax: the arrays of the state (each process its own
shards), the data position with its fingerprint, the resolved config, and a checksum of every array. One rename makes it
visible when all of it is on disk, and one rename removes it when newer checkpoints replace it. So a run that is killed
at any moment leaves only complete checkpoints under the names of steps. In a bucket, where a rename is a copy, replaced
checkpoints are deleted directly. Nothing is pickled. After a resume on another mesh losses agree to rounding.

Cost on disk: the bytes of the state times `keep`, plus the best checkpoint and the one being written. The training loop
waits while the arrays are read once on the device (checksums) and copied to the host; they are written during the next
steps, which may donate the state. Restoring reads what each device needs, in chunks of `CHUNK_BYTES`, directly to the
requested sharding, so restoring on another mesh costs no more than on the same mesh, except with other pipeline
stages: layers are then reordered, with one more array at a time in memory.

A run resumes in this order: `same_run.refuse_changes` compares its config with the saved one, which may differ in the
mesh; `SavedState.shapes_to_restore` has the shapes and the shardings on the present mesh; `Checkpoints.restore_latest`
reads into them and compares checksums; `SavedState.complete` reorders layers if the pipeline stages are others, and
adds frozen weights that are not saved; `Loader.restore` continues at the saved position.
"""
