"""Several processes, on one host or many, as one program: JAX's own distributed runtime, found and watched.

    cluster        which processes there are, by whoever started them
    rollcall       who of them is missing, before JAX starts
    join           with joined(): in together, out together; what fails in one stops all
    watch          who has gone since, and why
    agree          small answers that must be the same in every process
    communicator   all-reduce, all-gather, reduce-scatter, broadcast over a mesh axis
    preflight      is one of them slow, and how fast do they talk
    launch         P processes on this host, without a scheduler

Every process runs the same commands in the same order on its own devices, and holds its own share of every array.
Cost: a roll call at the start, a few bytes to process 0 every few seconds, and one number reduced a step.
"""
