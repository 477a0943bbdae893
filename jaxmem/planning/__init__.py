"""Memory per device before anything is allocated: the step of `train` is compiled, and XLA's decisions are read.

A plan is for local devices, or for any number of GPUs that are not installed, since XLA's GPU compiler runs without a
GPU. A plan of 8 B parameters for 8 GPUs takes about ten seconds of CPU time and 1 GiB of memory. A plan for 1,024 GPUs
takes hardly more, since every device runs the same program.

Where the bytes of a plan come from, in the order of the work:

    step/programs  the `Program` of a config, and its lowered step; its arguments are named `state.params[...]`, ...
    kernels/scopes `purpose`: scopes for embedding, logits, attention, all_scores and update, in the names of
                   operations; models, step, optim and kernels write them, origins, breakdown and history read them
    compile        compiles the step: XLA's scheduled module and its buffer assignment
    hlo            the module: instructions, their operands, order and names
    buffers        the buffer assignment: which value is where in memory, and when; the moment of the peak
    breakdown      each value in memory at the peak and its category: weights and optimizer state by the names of the
                   arguments (`step.categories.category_of`), temporaries by what they were computed from (origins), by
                   their pass and the purpose in their names, and by their shapes only if these say nothing
    result         `Plan.bytes_per_device`: the sums by category

What else a plan has:

    timeline       the schedule in seconds: kernels, collectives, host copies (communication)
    history        memory over the timeline, and the source lines of the largest buffers
    budget         `memory.remat: auto`, from the operations of one traced layer (`estimate.layers`)
    advice, table  warnings, and the text that `jaxmem plan` prints
"""
