"""Several processes, on one host or many, as one program: JAX's own distributed runtime, found and watched.

    join            before jax starts: who else is there, and go in together
    leave           after the last step: nobody leaves before all are done
    together        around what all do alike: what fails in one process stops the others, and they say why
    agree           small answers that must be the same in every process
    Communicator    all-reduce, all-gather, reduce-scatter, broadcast over a mesh axis
    preflight       is one of them slow, and how fast do they talk
    launch          P processes on this host, without a scheduler

Every process runs the same commands in the same order on its own devices, and holds its own share of every array.
Cost: a roll call at the start, a few bytes to process 0 every few seconds, and one number reduced a step.
"""
