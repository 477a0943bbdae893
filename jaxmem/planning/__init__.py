"""Memory per device before anything is allocated: the step of `train` is compiled, and XLA's decisions are read.

A plan is for local devices, or for any number of GPUs that are not installed, since XLA's GPU compiler runs without a
GPU. A plan of 8 B parameters for 8 GPUs takes about ten seconds of CPU time and 1 GiB of memory. A plan for 1,024 GPUs
takes hardly more, since every device runs the same program.

A plan's bytes: `result.plan` makes the `Program` of a config (step/programs.py), `compile` compiles its step, `buffers`
reads the arrays that XLA has assigned to memory, and `breakdown` gives each array at the peak its category: weights and
optimizer state by the names of the step's arguments (`step.categories.category_of`), temporaries as below.

    compile      compiles the step: XLA's scheduled module (hlo) and buffer assignment (buffers)
    breakdown    the category of each buffer at the peak: by the inputs that it was computed from, its pass and the
                 purpose in its name; by its shape only if these say nothing
    timeline     the schedule in seconds: kernels, collectives, host copies (communication)
    history      memory over the timeline, and the source lines of the largest buffers
    budget       `memory.remat: auto`, from the operations of one traced layer (`estimate.layers`)
    result       the plan: results of all modules above, warnings (advice), JSON and a table
"""
