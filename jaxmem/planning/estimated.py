"""The estimate of a config on a target."""

from jaxmem.config import Config
from jaxmem.estimate.memory import Estimate, estimate
from jaxmem.machine.gpus import CPU
from jaxmem.planning.targets import Target
from jaxmem.step.kernel_choice import resolve_kernels


def resolved_on(cfg: Config, target: Target) -> Config:
    """The config with the kernels that `auto` selects on a target."""
    gpu = target.gpu
    capability = round(10 * float(gpu.compute_capability)) if gpu else None
    return resolve_kernels(cfg, target.platform, capability)


def estimated(cfg: Config, target: Target) -> Estimate:
    """The estimate on a target. Seconds for a CPU are only comparable with each other."""
    return estimate(resolved_on(cfg, target), target.platform, target.gpu or CPU, target.per_host)
