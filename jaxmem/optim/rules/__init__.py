"""One module for each optimizer, written for one matrix (`jaxmem.optim.layers`) or on top of optax."""
