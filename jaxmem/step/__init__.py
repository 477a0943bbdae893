"""The compiled training step.

step.py             one update: batch -> loss -> gradients -> update -> metrics
objective.py        the loss, as parts that follow those of the network
model.py            ModelSpec: the structure of the network, its weights' axes, which are trainable
execution.py        ExecutionSpec: compute dtype, kernels, recompute, pipeline stages
kernel_choice.py    the implementation of each operation; context_methods.py: of attention over `context`
kernel_check.py     the check of the chosen implementations before a run, and the next choice for one that fails
categories.py       the category of each array of the state: parameters, optimizer state, ...
initial_weights.py  InitialWeights: how weights are created and stored
state.py            TrainState and StepSpec: shapes and shardings of the state and of a batch
gradients.py        the gradients of several micro-batches
pipeline.py         gradients, updates and evaluation on pipeline stages
programs.py         Program: the functions that `plan` and `train` compile

With `memory.update: during`:

update_during.py     one update: forward, then backward through the parts of the network, updating each of them
parts.py             the parts of a network and of its loss, also of the model of a script; also for pipeline.py, and
                     for the gradients of a script's loss in step.py
update_piecewise.py  the update of stacks layer by layer, and of matrices slice by slice; also for
                     `memory.offload: optimizer`
"""
