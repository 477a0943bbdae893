"""Applying a stack of layers: one signature with several implementations. Models do not depend on which one is used.

The weights of all layers are stacked, so that a layer is compiled once for any number of layers.

    call.py     a stack that is about to be applied, its settings, and replacing its computation
    apply.py    one layer after the other
    remat.py    activation checkpointing; recompute_plan.py, scheduled.py: recomputing the inputs of layers too
    reverse.py  forward and backward pass that passes the gradient of each layer to a function
"""
