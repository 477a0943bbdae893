"""Learning-rate schedules."""

import optax

from jaxmem import config
from jaxmem.optim.optax_promotion import standard_promotion


def schedule(cfg: config.Optimizer, steps: int) -> optax.Schedule:
    """Linear warm-up from zero, then decay to `min_lr_ratio` of the peak at the last update."""
    peak, rest = cfg.learning_rate, max(steps - cfg.warmup, 1)
    decay: optax.Schedule = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=cfg.min_lr_ratio),
        "linear": lambda: optax.linear_schedule(peak, peak * cfg.min_lr_ratio, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[cfg.schedule]()
    if cfg.warmup:
        # Counted from 1, so that update 0 has a learning rate above 0.
        warmup = optax.linear_schedule(peak / cfg.warmup, peak, max(cfg.warmup - 1, 1))
        decay = optax.join_schedules([warmup, decay], [cfg.warmup])
    return standard_promotion(decay)
