"""Several processes, on one host or many, as one program: JAX's distributed runtime, configured and watched.

Every process runs the same commands in the same order on its own devices and has its own shards of every array. It
costs one message of each process at the start, a few bytes to process 0 every few seconds, and one all-reduced number
per step.
"""
