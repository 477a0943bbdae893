"""Search for the configs that fit a target, fastest first: mesh, ZeRO stage, recompute, micro-batches and more.

Thousands of configs are estimated by arithmetic in seconds. The promising configs are compiled on all cores, which
gives their exact bytes and takes a few seconds of CPU time each; results are cached on disk. No GPU is needed.

    fit         fit(cfg or model, target): the front of step time and memory, or the methods of training compared
    largest     maximize(cfg, key, target): the largest model, sequence or batch that fits
"""
