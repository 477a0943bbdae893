"""The compiled training step.

step.py             one update: batch -> loss -> gradients -> update -> metrics
objective.py        the loss, as parts that follow those of the network
model.py            ModelSpec: the structure of the network, its weights' axes, which are trainable
execution.py        ExecutionSpec: compute dtype, kernels, recompute, pipeline stages
kernel_choice.py    the implementation of each operation; context_methods.py: of attention over `context`
kernel_check.py     the check of the chosen implementations before a run
categories.py       the category of each array of the state: parameters, optimizer state, ...
initial_weights.py  InitialWeights: how weights are created and stored
state.py            TrainState and StateSpec: shapes and shardings of the state and of a batch
programs.py         Program: the functions that `plan` and `train` compile

With `memory.offload: optimizer` or `memory.update: during`:

update_by_layer.py    the update of one weight after the other, of stacks layer by layer
update_vocab.py       the update of an embedding or output matrix in slices

With `memory.update: during`:

update_during.py      one update: forward, then backward through the parts of the network, updating each of them
by_parts.py           the forward and backward pass, part by part
intercepted_parts.py  the parts of the model of a script
update_in_stages.py   the same on pipeline stages
"""
