"""The estimate of a config on a target, and `memory.remat: auto`: the fastest recompute policy that fits the memory.

Every set of names of activations is a candidate: its saved bytes and its recomputed FLOPs follow from one trace of a
layer (`layers.py`). Further candidates are `none`, which saves most, and `slots_K`, which saves K boundaries in the
best positions. A candidate is dropped if another candidate saves fewer bytes and takes less time. The rest of the
memory of the step cannot be estimated to within a percent, so for GPUs the step is compiled, up to four times, with the
candidate that is expected to be the fastest that fits. For CPUs, whose memory is large and whose compiler is slow, the
estimate decides.

The result is an ordinary policy, known before the step is made. A plan and a run choose the same policy, and
config.yaml of the run records it instead of `auto`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.config import Config, Memory, Save
from jaxmem.config.devices import for_devices
from jaxmem.config.names import IN_CHUNKS, IN_GROUPS
from jaxmem.errors import UserError, as_yaml
from jaxmem.estimate.layers import Layer, layers_of
from jaxmem.estimate.memory import Estimate, estimate
from jaxmem.estimate.passes import passes_in_memory, passes_of
from jaxmem.machine.gpus import CPU, Gpu
from jaxmem.planning.compile import compile_program
from jaxmem.planning.targets import Target, target_devices, usable_memory
from jaxmem.planning.units import format_bytes
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding.share import share_of
from jaxmem.stack.recompute_plan import recompute_plan
from jaxmem.step.categories import ROLE_OF_CATEGORY, SAVED
from jaxmem.step.execution import pipeline_of
from jaxmem.step.kernel_choice import resolve_kernels
from jaxmem.step.programs import program

MAX_COMPILES = 4  # largest number of compiled steps, if one of them fits
UNLIMITED_FACTOR = 1000  # times the memory is allowed when compiling, since at the limit XLA would recompute
# The share of the memory not used by the state that XLA fills with temporaries (xla_gpu_memory_limit_slop_factor). If a
# step needs more, XLA recomputes and overlaps less communication: llama3-70b on 16 H100s takes 1.95 instead of 1.33 s.
FILLED_SHARE = 0.95
MIN_GAIN = 0.01  # no step is compiled for a smaller gain than this share of the time of the layers
FREE_SHARE = 0.1  # share of the memory that an estimate leaves free
BYTES_PER_ELEMENT = 2  # bytes of memory traffic per recomputed element: fused operations write few of their results


@dataclass(frozen=True)
class PolicyCandidate:
    remat: str | Save
    saved: int  # bytes per device
    recomputed: float  # seconds of recomputation per sequence, in all layers or those of a group of a pipeline stage


def resolved_on(cfg: Config, target: Target) -> Config:
    """The config with the kernels that `auto` selects on a target."""
    capability = round(10 * float(target.gpu.compute_capability)) if target.gpu else None
    return resolve_kernels(cfg, target.platform, capability)


def estimated(cfg: Config, target: Target) -> Estimate:
    """The estimate on a target. Seconds for a CPU are only comparable with each other."""
    return estimate(resolved_on(cfg, target), target.platform, target.gpu or CPU, target.per_host)


def resolve_remat(
    cfg: Config,
    target: Target,
    reserve_gib: float | None = None,
    *,
    compiles: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Config, str | None]:
    """Chooses the policy of `memory.remat: auto`.

    Args:
        cfg: The config.
        target: The devices.
        reserve_gib: Memory of each GPU outside the compiled program.
        compiles: False to choose by the estimate alone, with some memory left free.
        progress: Called with a line of text for each step that is compiled.

    Returns:
        The config with a policy, and the reason for it; (the same config, None) if `memory.remat` is not auto.
    """
    if cfg.memory.remat != "auto":
        return cfg, None
    limit = usable_memory(target, cfg.memory, reserve_gib)
    resolved = resolved_on(for_devices(cfg, target.count), target)
    platform = target.platform
    ladder, layers = candidates(resolved, platform, target.gpu or CPU)
    if not layers:
        return cfg.replace(memory={"remat": "none"}), "auto: the model has no stack of layers"

    def needed(candidate: PolicyCandidate) -> int:
        policy = candidate.remat.model_dump() if isinstance(candidate.remat, Save) else candidate.remat
        progress(f"compiling the step with memory.remat={as_yaml(policy)} ...")
        devices = target_devices(target, UNLIMITED_FACTOR * limit)
        built = program(cfg.replace(memory={"remat": candidate.remat}), devices)
        return compile_program(built.lower_step(), here=target.is_here, runs=False).total

    full = estimate(resolved.replace(memory={"remat": "full"}), platform)
    other_bytes = full.total - full.kinds[SAVED]
    if compiles and not target.is_cpu:
        state = sum(full.categories[category] for category in ROLE_OF_CATEGORY)
        most = state + round(FILLED_SHARE * (limit - state))
        chosen = largest_that_fits(ladder, most, needed, other_bytes, MIN_GAIN * layers)
        why = f"auto: the fastest that fits {format_bytes(limit)}"
    else:
        fitting = [candidate for candidate in ladder if other_bytes + candidate.saved <= (1 - FREE_SHARE) * limit]
        chosen = (fitting or ladder[:1])[-1]
        why = f"auto: the fastest that is estimated to fit {format_bytes(limit)}"
    cfg = cfg.replace(memory={"remat": chosen.remat})
    return cfg, f"{why}, recomputes {chosen.recomputed / layers:.0%} of the time of the layers"


def check_size(cfg: Config, target: Target) -> None:
    """Refuses to plan for the CPU of this machine if weights and optimizer state are larger than its memory: the run is
    meant for other devices, and compiling it for a CPU takes minutes."""
    if not target.is_cpu:
        return
    if cfg.memory.remat == "auto":
        cfg = cfg.replace(memory={"remat": "none"})  # no policy changes the state
    categories = estimate(for_devices(cfg, target.count), target.platform).categories
    size = sum(categories[category] for category in ROLE_OF_CATEGORY)
    if size > target.memory:
        raise UserError(
            f"{cfg.name} needs {format_bytes(size)} per device for weights and optimizer state, more than this machine"
            f" has ({target.name}, {format_bytes(target.memory)}); name the devices of the run, such as --target"
            f" h100-80gb:8 (`jaxmem plan --target list`), or --target {target.name} to plan for this CPU"
        )


def largest_that_fits(
    ladder: Sequence[PolicyCandidate],
    limit: int,
    needed: Callable[[PolicyCandidate], int],
    other_bytes: float,
    worth: float = 0.0,
) -> PolicyCandidate:
    """The last candidate that MAX_COMPILES compilations show to fit the limit; if none fits, the first. `other_bytes`:
    the estimated bytes of a step without its saved activations. `worth`: the least gain in seconds per sequence for
    which a step is compiled."""
    compiled: dict[int, int] = {}  # bytes of compiled candidates, by number
    low = -1
    high = len(ladder)  # candidates up to `low` fit; from `high` on they do not
    while high - low > 1 and (len(compiled) < MAX_COMPILES or low < 0):
        if low >= 0 and ladder[low].recomputed - ladder[high - 1].recomputed < worth:
            break
        slope = 1.0
        last = list(compiled)[-2:]
        if len(last) == 2:  # extrapolates, since not every saved byte is in memory at the peak
            slope = (compiled[last[1]] - compiled[last[0]]) / (ladder[last[1]].saved - ladder[last[0]].saved)
        if last:
            other_bytes = compiled[last[-1]] - slope * ladder[last[-1]].saved
        guess = sum(slope * candidate.saved + other_bytes <= limit for candidate in ladder) - 1
        if guess <= low and len(last) == 2:
            break  # by extrapolation, the next candidate does not fit
        number = min(max(guess, low + 1), high - 1)
        compiled[number] = needed(ladder[number])
        if compiled[number] <= limit:
            low = number
        else:
            high = number
    return ladder[max(low, 0)]


def candidates(cfg: Config, platform: str, gpu: Gpu) -> tuple[list[PolicyCandidate], float]:
    """The candidates of a config whose mesh is resolved, ordered by bytes saved, each with less recomputation than the
    one before; and the seconds of the matmuls of all layers per sequence, forward and backward. With pipeline stages,
    the layers of one group count, since `passes_in_memory` are passes through one group."""
    layers = layers_of(cfg, platform)
    if pipeline := pipeline_of(cfg):  # stages share the last stack; nothing of layers before it stays saved
        layers = [dataclasses.replace(layers[-1], count=pipeline.group)]
    copies = share_of(cfg).rows * passes_in_memory(cfg)
    rate = gpu.matmul_rate(compute_dtype(cfg.precision, platform).name)
    without = cfg.replace(memory={"remat": "none"})
    policies = [PolicyCandidate("none", round(copies * passes_of(without, platform).saved), 0.0)]
    for remat, saved, flops, elements in _by_name(cfg.memory, cfg.model.activations, layers):
        policies.append(
            PolicyCandidate(remat, round(copies * saved), flops / rate + BYTES_PER_ELEMENT * elements / gpu.memory_rate)
        )
    if cfg.mesh.stage == 1 and (cfg.memory.update == "after" or cfg.batch.accumulate == 1):
        full = next(policy.recomputed for policy in policies if policy.remat == "full")
        for remat, saved, flops in _by_schedule(layers):
            policies.append(PolicyCandidate(remat, round(copies * saved), full + flops / rate))
    best: list[PolicyCandidate] = []
    for policy in sorted(policies, key=lambda policy: (policy.saved, policy.recomputed)):
        if not best or policy.recomputed < best[-1].recomputed:
            best.append(policy)
    return best, 3 * sum(layer.count * layer.forward for layer in layers) / rate


def _by_name(
    memory: Memory, activations: Collection[str], layers: Sequence[Layer]
) -> Iterator[tuple[str | Save, int, int, int]]:
    """Every set of names of `activations`: bytes saved, FLOPs of matmuls repeated, and elements of other results, in
    all layers."""
    hidden = {*(IN_CHUNKS if memory.mlp_chunk != "auto" else ()), *(IN_GROUPS if memory.head_groups != "auto" else ())}
    names_of_layer = [name for name in activations if name not in hidden]
    for count in range(len(names_of_layer) + 1):
        for names in itertools.combinations(names_of_layer, count):
            costs = [(layer.count, layer.boundary, *layer.saving(names)) for layer in layers]
            saved = sum(n * (boundary + size) for n, boundary, size, *_ in costs)
            flops = sum(n * flops for n, *_, flops, _ in costs)
            elements = sum(n * others for n, *_, others in costs)
            yield Save(save=names) if names else "full", saved, flops, elements


def _by_schedule(layers: Sequence[Layer]) -> Iterator[tuple[str, int, int]]:
    for slots in range(1, max((layer.count for layer in layers), default=0)):
        plans: list[tuple[Layer, Any]] = [(layer, recompute_plan(f"slots_{slots}", layer.count)) for layer in layers]
        saved = sum(layer.boundary * (plan.slots if plan else 1) for layer, plan in plans)
        yield f"slots_{slots}", saved, sum(layer.forward * plan.runs for layer, plan in plans if plan)
