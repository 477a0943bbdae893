"""Several processes, on one host or many, as one program: JAX's distributed runtime, configured and watched.

    cluster        the processes of a run, from the environment of the launcher
    rendezvous     waits for all processes and names the missing ones, before JAX starts
    join           joined(): start and end JAX's runtime together; an error in one process stops all
    watch          names a process that is lost, and stops the others
    agree          small values that must be equal in every process
    communicator   all-reduce, all-gather, reduce-scatter, broadcast over a mesh axis
    preflight      measures whether a process is slow, and the bandwidth of communication
    launch         P processes on this host, without a scheduler

Every process runs the same commands in the same order on its own devices and has its own shards of every array. Cost:
one rendezvous at the start, a few bytes to process 0 every few seconds, and one number all-reduced per step.
"""
