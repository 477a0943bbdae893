"""Bytes and seconds of a step by arithmetic, without compiling it.

state       the exact bytes of the state on one device
passes      saved activations and matmuls of one sequence, from jax's trace, and the chunks in which one device
            computes, where the config says auto; layers: of each value of a layer
memory      bytes of one device at the peak
seconds     the time of a step
"""
